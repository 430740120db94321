"""Milliseconds per generated token on a CPU: LocksCache against DynamicCache with SDPA.

One process, one prompt, one prefill. Each setting then generates windows of tokens with ``model.generate()``, in turn,
so that what else the machine does meets all of them; the cache goes back to the prompt after each window. A window's
time runs from its first new token to its last. Windows of whole pages hold their share of the pages that complete and
are summarised.

    OMP_WAIT_POLICY=PASSIVE python scripts/bench_cpu_decode.py --length 8000 --budget 2048 --rank 8
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import DynamicCache, StoppingCriteria

from locks_hf import LocksCache, patch
from locks_hf.models import DEFAULT_MODEL, load


class Clock(StoppingCriteria):
    """Notes when each token is there, and stops nothing."""

    def __init__(self):
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs) -> torch.BoolTensor:
        """No row is done."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def window(model, ids, cache, tokens: int) -> float:
    """Milliseconds per token of ``tokens`` tokens after one that is not timed; the cache is left as it was."""
    before = cache.get_seq_length()
    clock = Clock()
    model.generate(ids, past_key_values=cache, max_new_tokens=tokens + 1, do_sample=False, stopping_criteria=[clock])
    cache.crop(before - cache.get_seq_length())
    return 1000 * (clock.times[-1] - clock.times[0]) / tokens


def dense_copy(cache: LocksCache) -> DynamicCache:
    """A DynamicCache that holds the same keys and values."""
    copy = DynamicCache()
    for index, layer in enumerate(cache.locks_layers):
        copy.update(layer.keys.clone(), layer.values.clone(), index)
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--length", type=int, default=8000, help="prompt tokens (default 8000)")
    parser.add_argument("--budget", type=int, nargs="+", default=[2048])
    parser.add_argument("--rank", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=32, help="timed tokens a window (default 32, two pages)")
    parser.add_argument("--windows", type=int, default=7, help="timed windows a setting (default 7)")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's own choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    model, tokenizer = load(options.model, device="cpu", dtype=torch.float32, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, options.length), generator=generator)
    prefilled = LocksCache(rank=options.rank[0], budget=options.budget[0])
    with torch.no_grad(), patch(model):
        model(ids[:, :-1], past_key_values=prefilled, logits_to_keep=1)

    dense = ("DynamicCache, sdpa", dense_copy(prefilled))
    sparse = [
        (f"LocksCache, rank {rank}, budget {budget}", prefilled.fork(rank=rank, budget=budget))
        for rank in options.rank
        for budget in options.budget
    ]
    times: dict[str, list[float]] = {}
    for turn in range(-1, options.windows):  # the first warms up
        for name, cache in (dense, *sparse):
            if isinstance(cache, LocksCache):
                with patch(model):
                    took = window(model, ids, cache, options.tokens)
            else:
                took = window(model, ids, cache, options.tokens)
            if turn >= 0:
                times.setdefault(name, []).append(took)

    base = statistics.median(times[dense[0]])
    print(
        f"{options.length} tokens of context, {options.windows} windows of {options.tokens} tokens, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print("| cache | ms per token: median | least | most | against dense | sparse steps |")
    print("|---|---|---|---|---|---|")
    for name, cache in (dense, *sparse):
        took = times[name]
        median = statistics.median(took)
        share = "-"
        if isinstance(cache, LocksCache):
            stats = cache.stats()
            share = f"{stats.sparse_steps / (stats.sparse_steps + stats.dense_steps):.0%}"
        print(f"| {name} | {median:.1f} | {min(took):.1f} | {max(took):.1f} | {median / base:.2f} | {share} |")


if __name__ == "__main__":
    main()
