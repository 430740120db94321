"""How well selectors find the pages that matter: attention mass, page recall and output error on real queries.

``python -m locks_hf.diagnostics`` runs one long prompt through a model, takes the queries near its end, and compares
each selector's page set with the exact attention of those queries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedTokenizerBase

from .attention import locks_attention, locks_mask
from .cache import LocksCache
from .config import LocksConfig
from .kernels import SummaryLayout, combine, score, summarize, top_pages
from .layer import LocksLayer
from .models import DEFAULT_MODEL, load
from .selectors.oracle import exact_page_lse
from .selectors.quest import envelope_score

_RECORDER = "locks_recorder"


@dataclass(frozen=True)
class Recorded:
    """Attention inputs of one layer.

    Attributes:
        queries: The last queries of the prompt, ``(H * G, n, d)`` float32.
        keys: All keys ``(H, T, d)`` float32.
        values: All values ``(H, T, d)`` float32.
        scaling: Factor on the logits.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class Method:
    """A way to score pages that the table compares.

    Attributes:
        name: Row label.
        kind: ``"oracle"``, ``"locks"``, ``"quest"`` (envelope bound, shares averaged as usual) or ``"centroid"``.
        rank: For ``"locks"``.
        basis_bits: For ``"locks"``.
        refit: For ``"locks"``.
    """

    name: str
    kind: str
    rank: int = 8
    basis_bits: int = 4
    refit: bool = False


METHODS = (
    Method("oracle", "oracle"),
    Method("r8 bf16", "locks", 8, 16),
    Method("r8i4", "locks", 8, 4),
    Method("r8i4 refit", "locks", 8, 4, True),
    Method("r4i4", "locks", 4, 4),
    Method("r4i4 refit", "locks", 4, 4, True),
    Method("r2i4", "locks", 2, 4),
    Method("r2i4 refit", "locks", 2, 4, True),
    Method("quest envelope", "quest"),
    Method("centroid only", "centroid"),
)


@contextmanager
def _recording(model: PreTrainedModel, layers: set[int], n_queries: int) -> Iterator[dict[int, Recorded]]:
    """Run the model densely and keep the attention inputs of some layers."""
    records: dict[int, Recorded] = {}

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        if module.layer_idx in layers:
            records[module.layer_idx] = Recorded(
                query[0, :, -n_queries:].float().clone(),
                key[0].float().clone(),
                value[0].float().clone(),
                query.shape[-1] ** -0.5 if scaling is None else scaling,
            )
        # Dense, for these keys are of no LocksCache; and it refuses what Locks does not support.
        return locks_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    before = model.config._attn_implementation
    AttentionInterface.register(_RECORDER, attention)
    AttentionMaskInterface.register(_RECORDER, locks_mask)
    try:
        model.set_attn_implementation(_RECORDER)
        yield records
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(_RECORDER, None)
        AttentionMaskInterface._global_mapping.pop(_RECORDER, None)


@torch.inference_mode()
def record(model: PreTrainedModel, input_ids: torch.Tensor, layers: set[int], n_queries: int) -> dict[int, Recorded]:
    """Attention inputs of ``layers`` for one prompt.

    Args:
        model: Causal language model.
        input_ids: ``(1, T)``.
        layers: Layer indices.
        n_queries: Queries to keep, counted from the end.

    Returns:
        One :class:`Recorded` a layer.

    Raises:
        ValueError: If the model is not causal, or its attention is of a kind that Locks does not support.
    """
    with _recording(model, layers, n_queries) as records:
        model(input_ids, use_cache=False, logits_to_keep=1)
    if records.keys() != layers:
        raise ValueError(
            f"{type(model).__name__} does not use Transformers' attention interface in layers "
            f"{sorted(layers - records.keys())}, so that its attention cannot be recorded"
        )
    return records


def full_attention_layers(model: PreTrainedModel) -> list[int]:
    """Indices of the layers that Locks selects in: those without a sliding window or chunks.

    Raises:
        ValueError: If there is none, or a layer is of a kind that Locks does not support.
    """
    layers = LocksCache(config=model.config).layers
    return [index for index, layer in enumerate(layers) if isinstance(layer, LocksLayer)]


def _page_lse(method: Method, query: torch.Tensor, keys: torch.Tensor, page_size: int, scaling: float) -> torch.Tensor:
    """Page scores ``(n, H, G, J)`` of ``n`` queries ``(n, H, G, d)`` over keys ``(H, T, d)``."""
    n_queries, n_heads, group, head_dim = query.shape
    n_pages = keys.shape[1] // page_size
    pages = keys.unflatten(1, (n_pages, page_size))
    # All queries see the same keys, so they pass for more heads of one group.
    heads = query.transpose(0, 1).reshape(1, n_heads * n_queries * group, head_dim)
    count = torch.full((1,), n_pages, dtype=torch.int32, device=keys.device)
    if method.kind == "oracle":
        lse = exact_page_lse(heads, keys[None], count, page_size, scaling)
    elif method.kind == "quest":
        low, high = pages.aminmax(dim=2)
        lse = envelope_score(heads, low[None], high[None]) * scaling
    elif method.kind == "centroid":
        lse = (heads.unflatten(1, (n_heads, -1)) @ pages.mean(dim=2).transpose(-1, -2)) * scaling
    else:
        layout = SummaryLayout(head_dim, method.rank, page_size, method.basis_bits)
        summaries = summarize(pages.flatten(0, 1), layout, method.refit)
        summaries = {name: array.unflatten(0, (1, n_heads, n_pages)) for name, array in summaries.items()}
        lse = score(heads, summaries, count, n_pages, layout, scaling)
    return lse[0].unflatten(1, (n_queries, group)).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Quality:
    """Selection quality, means over layers, KV heads and queries.

    Attributes:
        method: Row label.
        budget: Tokens.
        mass: True group-mean attention mass of the selected pages, among the pages considered.
        recall: Share of the exact-LSE set that is selected.
        output_error: Norm of the attention output's error over the norm of the output.
    """

    method: str
    budget: int
    mass: float
    recall: float
    output_error: float


@torch.inference_mode()
def selection_quality(
    records: dict[int, Recorded],
    budgets: list[int],
    *,
    methods: tuple[Method, ...] = METHODS,
    query_stride: int = 4,
    page_size: int = 16,
    progress: bool = True,
) -> list[Quality]:
    """Compare the page sets of several methods with exact attention.

    Each recorded query looks at the complete pages before the first recorded query.

    Args:
        records: From :func:`record`.
        budgets: Budgets in tokens.
        methods: What to compare.
        query_stride: Take every ``query_stride``-th recorded query.
        page_size: Tokens a page.
        progress: Show a bar.

    Returns:
        One :class:`Quality` per method and budget.

    Raises:
        ValueError: If a budget is below two pages, or the prompt has fewer pages than a budget has slots.
    """
    budgets = list(dict.fromkeys(budgets))
    slots = {budget: LocksConfig(budget=budget, page_size=page_size, rank=1).page_slots for budget in budgets}
    sums = {(method.name, budget): [0.0, 0.0, 0.0] for method in methods for budget in budgets}
    for recorded in tqdm(list(records.values()), desc="layers", disable=not progress):
        n_pages = (recorded.keys.shape[1] - recorded.queries.shape[1]) // page_size
        if n_pages < max(slots.values()):
            raise ValueError(
                f"the prompt has {n_pages} pages before the recorded queries, fewer than the {max(slots.values())} "
                f"slots of budget {max(budgets)}: use a longer prompt or a smaller budget"
            )
        tokens = n_pages * page_size
        keys, values = recorded.keys[:, :tokens], recorded.values[:, :tokens]
        query = recorded.queries[:, ::query_stride].transpose(0, 1).unflatten(1, (keys.shape[0], -1))  # (n, H, G, d)
        n = query.shape[0]
        counts = torch.full((n,), n_pages, dtype=torch.int32, device=keys.device)
        lengths = counts * page_size
        weights = torch.softmax(query @ keys.transpose(-1, -2) * recorded.scaling, dim=-1)  # (n, H, G, T)
        page_mass = weights.unflatten(-1, (n_pages, page_size)).sum(-1).mean(dim=2)  # (n, H, J)
        output = weights @ values
        exact = combine(_page_lse(METHODS[0], query, keys, page_size, recorded.scaling), counts)
        for method in methods:
            value = combine(_page_lse(method, query, keys, page_size, recorded.scaling), counts)
            for budget in budgets:
                best = top_pages(exact, lengths, page_size, slots[budget]).long()
                chosen = top_pages(value, lengths, page_size, slots[budget]).long()
                kept = torch.zeros_like(page_mass, dtype=torch.bool).scatter_(-1, chosen, True)
                mass = page_mass.gather(-1, chosen).sum(-1)
                recall = kept.gather(-1, best).float().mean(-1)
                kept_weights = weights * kept.repeat_interleave(page_size, dim=-1)[:, :, None, :]
                sparse = kept_weights @ values / kept_weights.sum(-1, keepdim=True)
                error = (sparse - output).norm(dim=-1) / output.norm(dim=-1)
                totals = sums[method.name, budget]
                for i, measured in enumerate((mass, recall, error)):
                    totals[i] += measured.mean().item() / len(records)
    return [Quality(name, budget, *totals) for (name, budget), totals in sums.items()]


def quality_table(rows: list[Quality]) -> str:
    """Markdown table, one row a method, ``mass / recall / output error`` per budget."""
    budgets = sorted({row.budget for row in rows})
    lines = [
        "| method | " + " | ".join(f"b={budget}" for budget in budgets) + " |",
        "|---" * (len(budgets) + 1) + "|",
    ]
    for name in dict.fromkeys(row.method for row in rows):
        cells = {
            row.budget: f"{row.mass:.4f} / {row.recall:.3f} / {row.output_error:.3f}"
            for row in rows
            if row.method == name
        }
        lines.append(f"| {name} | " + " | ".join(cells[budget] for budget in budgets) + " |")
    return "\n".join(lines)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> torch.Tensor:
    """The first ``tokens`` token ids of ``text``, ``(1, tokens)``.

    Raises:
        ValueError: If the text is too short.
    """
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"the text has only {ids.shape[1]} tokens, {tokens} are asked for: give a longer --text")
    return ids


def main(arguments: list[str] | None = None) -> int:
    """Command line of ``python -m locks_hf.diagnostics``."""
    parser = argparse.ArgumentParser(
        prog="python -m locks_hf.diagnostics",
        description="Attention mass, recall of the exact-LSE set and output error of page selectors on one prompt.",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub id, local path or smollm2 (default)")
    parser.add_argument("--text", type=Path, help="text file for the prompt (default: the essay haystack)")
    parser.add_argument("--length", type=int, default=6144, help="prompt length in tokens (default 6144)")
    parser.add_argument("--budget", type=int, nargs="+", default=[64, 128, 256, 512], help="tokens attended")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--layer-stride", type=int, default=3, help="look at every n-th full-attention layer (default 3)"
    )
    parser.add_argument("--queries", type=int, default=16, help="queries, spread over the last 64 tokens (default 16)")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    options = parser.parse_args(arguments)
    try:
        for budget in options.budget:
            LocksConfig(budget=budget, page_size=options.page_size, rank=1)
        if options.page_size < 16:
            raise ValueError(
                f"--page-size must be at least 16 (the table has rank 8 and more), got {options.page_size}"
            )
        if options.queries not in (1, 2, 4, 8, 16, 32, 64):
            raise ValueError(f"--queries must be a power of two from 1 to 64, got {options.queries}")
        if options.length < 64 + 2 * options.page_size:
            raise ValueError(
                f"--length must be at least {64 + 2 * options.page_size} tokens (two pages and the last 64), got "
                f"{options.length}"
            )
        if options.output is not None:
            options.output.open("a").close()
        if options.layer_stride < 1:
            raise ValueError(f"--layer-stride must be at least 1, got {options.layer_stride}")
        if options.text is None:
            from .eval.haystack import read_essays

            text = read_essays()
        else:
            text = options.text.read_text(encoding="utf-8")
        model, tokenizer = load(options.model, device=options.device, dtype=torch.float32)
        window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if window is not None and options.length > window:
            raise ValueError(f"--length {options.length} is beyond the model's window of {window} tokens")
        ids = prompt_ids(tokenizer, text, options.length).to(model.device)
        layers = set(full_attention_layers(model)[:: options.layer_stride])
        print(f"running {options.length} tokens through {options.model}", file=sys.stderr)
        records = record(model, ids, layers, 64)
        rows = selection_quality(
            records, options.budget, query_stride=64 // options.queries, page_size=options.page_size
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("mass / recall / output error\n")
    print(quality_table(rows))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
