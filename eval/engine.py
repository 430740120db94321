"""Greedy generation with one dense prefill per batch and one fork of its cache per arm."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from locks_hf import LocksCache

from .arms import Arm


@dataclass
class Prefill:
    """A batch of prompts that has been through the model.

    Attributes:
        ids: Prompt and first new token, left padded, ``[rows, width + 1]`` int64.
        mask: 1 where ``ids`` is no padding, same shape.
        cache: Keys and values of the prompts.
        fork: The copy that the last arm continued, cut back to the prompts, for arms with the same summaries.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    cache: LocksCache
    fork: LocksCache | None = None

    def cache_for(self, arm: Arm) -> LocksCache:
        """A copy of the prompts' cache with the settings of ``arm``, which must be given back by :meth:`cut_back`."""
        settings = arm.cache_settings()
        budget = settings.pop("budget", None)
        fork, self.fork = self.fork, None  # before a new copy is made, so that both never take memory at once
        if fork is not None and fork.selector.name == settings.pop("selector"):
            held = vars(fork.locks_config)
            if all(held[name] == value for name, value in settings.items()):
                fork.reconfigure(budget=budget)
                fork.reset_stats()
                return fork
        del fork
        return self.cache.fork(**arm.cache_settings())

    def cut_back(self, cache: LocksCache) -> None:
        """Take the new tokens off a copy and keep it, unless it has layers that cannot forget tokens."""
        if len(cache.locks_layers) == len(cache.layers):
            cache.crop(self.cache.get_seq_length() - cache.get_seq_length())
            self.fork = cache


@dataclass(frozen=True)
class Decoded:
    """What one arm made of a batch.

    Attributes:
        texts: Predictions, without the end-of-sequence token and what follows it.
        tokens_attended: Mean tokens attended per (layer, KV head, row) and decode step; ``None`` if the first
            token ended every row, or was the only one wanted.
        bytes_read_per_step: Summary and KV bytes read per decode step and row, over all layers; ``None``
            likewise.
    """

    texts: list[str]
    tokens_attended: float | None
    bytes_read_per_step: float | None


class Engine:
    """A model that answers batches of prompts greedily under any arm.

    The tokens are those of ``model.generate()`` with a cache of the arm's settings: prefill is dense under
    every arm, so it is run once, its first new token is common to all of them, and each arm continues from a
    copy.

    Args:
        model: Causal language model with ``attn_implementation="locks"``. Its generation config is replaced
            by a plain greedy one, so that sampling settings or penalties that came with the checkpoint have
            no say.
        tokenizer: Its tokenizer.
        max_new_tokens: New tokens a record.
        add_special_tokens: Whether the tokenizer adds its special tokens (BOS); off for prompts from a chat
            template, which hold them already.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        add_special_tokens: bool = True,
    ):
        stop = model.generation_config.eos_token_id
        stop = [] if stop is None else [stop] if isinstance(stop, int) else list(stop)
        if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stop:
            stop.append(tokenizer.eos_token_id)
        pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        model.generation_config = GenerationConfig(
            do_sample=False,
            eos_token_id=stop or None,
            pad_token_id=pad,
            disable_compile=True,  # on a GPU every arm and batch size would be compiled, for a few dozen tokens each
        )
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.add_special_tokens = add_special_tokens
        # Transformers renamed the argument.
        forward = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in forward else "past_key_values"
        self._stop = frozenset(stop)
        self._pad = pad

    @torch.inference_mode()
    def prefill(self, texts: Sequence[str]) -> Prefill:
        """Run prompts through the model densely and take the first new token of each."""
        rows = [self._ids(text) for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([[self._pad] * (width - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        cache = LocksCache(selector="full", max_cache_len=width + self.max_new_tokens, config=self.model.config)
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        first = output.logits[:, -1].argmax(-1, keepdim=True)
        return Prefill(torch.cat([ids, first], 1), torch.cat([mask, torch.ones_like(first)], 1), cache)

    @torch.inference_mode()
    def decode(self, prefill: Prefill, arm: Arm) -> Decoded:
        """Continue a prefilled batch under one arm; the prompts of ``prefill`` stay as they are."""
        ids, stats = prefill.ids, None
        prompt = ids.shape[1] - 1
        if self.max_new_tokens > 1 and not self._stop.issuperset(ids[:, -1].tolist()):
            cache = prefill.cache_for(arm)
            ids = self.model.generate(
                ids,
                attention_mask=prefill.mask,
                max_new_tokens=self.max_new_tokens - 1,
                **{self._cache_argument: cache},
            )
            stats = cache.stats()
            prefill.cut_back(cache)
        # Cut by token ids: a prompt's text cannot be cut off the front of a decoded string.
        texts = [self._text(row) for row in ids[:, prompt:].tolist()]
        if stats is None:
            return Decoded(texts, None, None)
        return Decoded(texts, stats.tokens_attended, stats.bytes_read_per_step / len(texts))

    def batch_size_for(self, length: int) -> int:
        """Rows of ``length`` tokens that fit on the GPU by a careful estimate, 1 to 64; 1 on a CPU.

        Depends on the model and the device alone, not on what is free at the moment, so that an interrupted
        run goes on with the same batches.
        """
        if self.model.device.type != "cuda":
            return 1
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv = 2 * config.num_hidden_layers * heads * head_dim
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        # The prefilled cache, its copy for an arm with summaries, and the widest activations of a prefill.
        bytes_per_token = (2.25 * kv + 3 * inner + 8 * config.hidden_size) * self.model.dtype.itemsize
        total = torch.cuda.get_device_properties(self.model.device).total_memory
        room = 0.8 * total - self.model.get_memory_footprint()
        rows = max(1, min(64, int(room / (bytes_per_token * length))))
        return 1 << (rows.bit_length() - 1)

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=self.add_special_tokens, verbose=False)["input_ids"]
        # Some tokenizers end every text with the end-of-sequence token, but these texts are to be continued.
        while len(ids) > 1 and ids[-1] in self._stop:
            ids = ids[:-1]
        return ids

    def _text(self, ids: list[int]) -> str:
        end = next((place for place, token in enumerate(ids) if token in self._stop), len(ids))
        return self.tokenizer.decode(ids[:end], skip_special_tokens=True)
