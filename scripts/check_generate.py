"""Every way of generating, with a LocksCache against the dense cache, on a real model.

At a budget that covers everything the tokens must equal those of DynamicCache; at a small budget decoding must work and
the counters must show sparse steps. Prints one line a case and exits with 1 if any fails.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from transformers import DynamicCache

from locks_hf import LocksCache
from locks_hf.models import DEFAULT_MODEL, load

EVERYTHING = 1 << 20
FACTS = (
    "The harbour master keeps the spare key under the third barrel.",
    "The library closes at nine on Thursdays.",
    "Our train leaves from platform twelve.",
    "The red notebook belongs to Ada.",
)


def long_prompt(tokenizer, tokens: int, seed: int) -> torch.Tensor:
    """Ids of about ``tokens`` tokens of varied sentences with facts in between, ``(n,)``."""
    generator = torch.Generator().manual_seed(seed)
    nouns = ("river", "garden", "engine", "letter", "mountain", "window", "ship", "market")
    verbs = ("crosses", "holds", "follows", "answers", "carries", "watches")
    sentences = []
    while len(sentences) * 9 < tokens:
        a, b = torch.randint(len(nouns), (2,), generator=generator).tolist()
        verb = verbs[int(torch.randint(len(verbs), (1,), generator=generator))]
        sentences.append(f"In year {len(sentences)} the {nouns[a]} {verb} the {nouns[b]}.")
        if len(sentences) % 40 == 20:
            sentences.append(FACTS[len(sentences) // 40 % len(FACTS)])
    return tokenizer(" ".join(sentences), return_tensors="pt")["input_ids"][0, :tokens]


def draft_of(model):
    """A draft model: the first third of the layers, so that some drafted tokens are rejected."""
    draft = copy.deepcopy(model)
    layers = len(draft.model.layers) // 3
    draft.model.layers = draft.model.layers[:layers]
    draft.config.num_hidden_layers = layers
    return draft


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device")
    parser.add_argument("--length", type=int, default=700, help="prompt tokens (default 700)")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--budget", type=int, default=64, help="the small budget (default 64)")
    options = parser.parse_args()
    model, tokenizer = load(options.model, device=options.device, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    draft = draft_of(model)
    prompt = long_prompt(tokenizer, options.length, 0)[None].to(model.device)
    common = {"max_new_tokens": options.new_tokens, "do_sample": False}

    def generate(ids, cache, **settings):
        torch.manual_seed(0)
        return model.generate(ids, past_key_values=cache, **{**common, **settings})

    def batch_of_unequal_prompts(cache):
        rows = [long_prompt(tokenizer, options.length * (8 - i) // 8, i) for i in range(8)]
        width = len(rows[0])
        ids = torch.full((8, width), tokenizer.eos_token_id)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = row
            mask[i, width - len(row) :] = 1
        return generate(ids.to(model.device), cache, attention_mask=mask.to(model.device))

    def three_turns(cache):
        messages, ids = [], None
        for question in ("Tell me about the river.", "Who owns the red notebook?", "When does the library close?"):
            context = tokenizer.decode(prompt[0]) + "\n" if not messages else ""
            messages.append({"role": "user", "content": context + question})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            turn = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
            if ids is not None:  # what the cache has seen stays as it is, whatever the template would make of it now
                turn = torch.cat([ids, turn[:, -24:]], dim=1)
            ids = generate(turn, cache)
            messages.append({"role": "assistant", "content": tokenizer.decode(ids[0, turn.shape[1] :])})
        return ids

    cases: dict[str, Callable] = {
        "greedy": lambda cache: generate(prompt, cache),
        "chunked prefill": lambda cache: generate(prompt, cache, prefill_chunk_size=256),
        "sampling": lambda cache: generate(prompt, cache, do_sample=True, temperature=0.8, top_k=50),
        "beams (4)": lambda cache: generate(prompt, cache, num_beams=4),
        "assisted (draft model)": lambda cache: generate(prompt, cache, assistant_model=draft),
        "batch of 8 unequal prompts": batch_of_unequal_prompts,
        "3-turn chat on one cache": three_turns,
    }
    failures = 0
    small_column = f"same tokens at b={options.budget}"
    print(f"| case | equal to DynamicCache at full budget | {small_column} | sparse steps | dense steps | attended |")
    print("|---|---|---|---|---|---|")
    for name, run in cases.items():
        dense = run(DynamicCache())
        covering = LocksCache(budget=EVERYTHING)
        equal = torch.equal(run(covering), dense) and covering.stats().sparse_steps == 0
        small = LocksCache(budget=options.budget)
        tokens = run(small)
        stats = small.stats()
        shared = min(tokens.shape[1], dense.shape[1])
        new = slice(-options.new_tokens, None)
        same = (tokens[:, :shared][:, new] == dense[:, :shared][:, new]).float().mean().item()
        sparse = stats.sparse_steps > 0 and stats.dense_steps == 0 and stats.tokens_attended <= options.budget
        failures += not (equal and sparse)
        print(
            f"| {name} | {'yes' if equal else 'NO'} | {same:.0%} | {stats.sparse_steps} | {stats.dense_steps} "
            f"| {stats.tokens_attended:.1f} |",
            flush=True,
        )
    print(
        f"\n{len(cases) - failures} of {len(cases)} cases hold: tokens equal at the full budget, and every step sparse "
        f"at b={options.budget}, where other tokens are to be expected."
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
