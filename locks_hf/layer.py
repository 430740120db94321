"""One layer of the cache: pages of keys and values, their summaries, and the books of what each row holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import CacheLayerMixin

from . import handoff
from .config import LocksConfig
from .kernels.backend import check_head_dim_and_dtype
from .rows import PaddingReader, RowLedger
from .selectors import LocksSelector, PageSelector, PageView
from .stats import LayerCounters

# Spare room behind a prompt, so that short generations never move the cache.
_HEADROOM_TOKENS = 512
# Pages summarised at once: bounds the float64 temporaries of the reference.
_SUMMARIZE_CHUNK = 1 << 16
# In assisted generation an append of at most this many tokens that follows a rollback is the check of drafted tokens.
_MAX_DRAFT = 64

# More tokens than any buffer holds: the next step that the host takes part in asks the device.
_UNKNOWN = 1 << 62
# Decode steps on the device after which the books are brought up to date, lest notes on padding pile up.
_MOST_NOTED = 1024


class LocksLayer(CacheLayerMixin):
    """Keys, values and page summaries of one attention layer.

    ``update`` only stages new tokens; the attention function ``"locks"`` recognises the tensor that it returned and
    asks the layer to :meth:`commit` them. That is how padding, which only attention sees, is dropped on write: each row
    holds its real tokens and nothing else, and its page grid starts at its first real token.

    Args:
        config: Shared configuration of the cache.
        selector: Shared page selector.
        padding: Shared reader of attention masks.
        drafting: Whether assisted generation has begun; see :meth:`activate_past_recording`.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, config: LocksConfig, selector: PageSelector, padding: PaddingReader, drafting: bool = False):
        self.config = config
        self.selector = selector
        self._padding = padding
        self._clear()
        if drafting:
            self.activate_past_recording()

    def _clear(self) -> None:
        self.is_initialized = False
        self.__dict__.pop("batch_size", None)
        self.summaries: dict[str, torch.Tensor] = {}
        self.counters = LayerCounters()
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None
        self._ledger: RowLedger | None = None  # behind the device while decoding: read it through `_rows`
        self._counts: torch.Tensor | None = None  # see `counts`
        self._summarized: list[int] = []  # pages of each row that have a summary
        self._started = False
        self._positions = 0  # seen in passes that the host took part in: the same for all layers
        self._room = 0  # at least as many tokens as the longest row holds
        self._prepared = False  # room was made for the next decode step
        self._forget_steps()
        self._staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self._returned: torch.Tensor | None = None
        self._drafting = False
        self._prompt_expected = False
        self._last_append = 0
        self._rolled_back = False

    def _forget_steps(self) -> None:
        """Begin to note decode steps that are not in the ledger yet: how many, and who had padding in which."""
        self._steps = 0
        self._step_padding: dict[int, torch.Tensor] = {}

    # What the attention function and diagnostics read

    @property
    def keys(self) -> torch.Tensor | None:
        """Cached keys ``(B, H, longest row, d)``, a view; shorter rows hold anything finite past their length."""
        return None if self._key_buffer is None else self._key_buffer[:, :, : self.max_length]

    @property
    def values(self) -> torch.Tensor | None:
        """Cached values, like :attr:`keys`."""
        return None if self._value_buffer is None else self._value_buffer[:, :, : self.max_length]

    @property
    def key_buffer(self) -> torch.Tensor:
        """Keys with spare capacity ``(B, H, capacity, d)``."""
        return self._key_buffer

    @property
    def value_buffer(self) -> torch.Tensor:
        """Values with spare capacity ``(B, H, capacity, d)``."""
        return self._value_buffer

    @property
    def _rows(self) -> RowLedger:
        """The ledger, brought up to date with the decode steps that only the device has counted."""
        if self._started:
            *lengths, seen = self._counts.tolist()
            steps = seen - self._ledger.seen
            if steps:
                self._count_steps(steps, lengths)
        return self._ledger

    def settle(self) -> None:
        """Wait for the device and take its decode steps into the books, before what they depend on changes."""
        if self._ledger is not None:
            self._rows  # noqa: B018  for its effect

    def _count_steps(self, steps: int, lengths: list[int]) -> None:
        """Take ``steps`` decode steps into the books, after which the rows hold ``lengths`` tokens.

        Raises:
            ValueError: If steps of a compiled model ran past the end of the buffers.
        """
        config, before, capacity = self.config, self._ledger.lengths, self._key_buffer.shape[2]
        if max(lengths) > capacity:
            raise ValueError(
                f"the cache was full: a compiled model decoded up to {max(lengths)} tokens in room for {capacity}, and "
                "what it gave past them is NaN. Call cache.make_room(tokens) before its steps, and start again with a "
                "new cache"
            )
        added = torch.tensor(lengths) - torch.tensor(before)
        real = None
        if bool((added < steps).any()):
            if steps <= self._steps:
                real = torch.ones((len(lengths), steps), dtype=torch.bool)
                for step, mask in self._step_padding.items():
                    if step < steps:
                        real[:, step] = mask.cpu()
            else:  # compiled steps leave no note of which were padding: they are taken to be the first
                real = torch.arange(steps) >= (steps - added)[:, None]
        new = np.ones((len(lengths), steps), dtype=np.int64) if real is None else real.numpy()
        now = np.array(before)[:, None] + np.cumsum(new, axis=1)  # tokens of each row after each step
        sparse = now.max(axis=0) > config.whole_budget
        if not sparse.all():
            self.counters.add_dense(now[:, ~sparse], self.n_kv_heads)
        if sparse.any():
            now = now[:, sparse]
            self.counters.add_sparse(
                now, self.n_kv_heads, config.page_size, config.page_slots, None, self.score_bytes(now)
            )
        self._ledger.append(steps, real)
        self._summarized = [length // config.page_size for length in self._ledger.lengths]
        # A step that is prepared or noted may not have reached the device yet.
        self._step_padding = {step - steps: mask for step, mask in self._step_padding.items() if step >= steps}
        self._steps = max(0, self._steps - steps)
        self._room = max(self._ledger.lengths) + self._steps + self._prepared

    @property
    def row_lengths(self) -> list[int]:
        """Real tokens of each row; waits for the device."""
        return [] if self._ledger is None else list(self._rows.lengths)

    @property
    def max_length(self) -> int:
        """Real tokens of the longest row; waits for the device."""
        return max(self._rows.lengths, default=0) if self._ledger is not None else 0

    @property
    def host_positions(self) -> int:
        """Positions seen in passes that the host took part in, staged ones included; the same for all layers."""
        return self._positions + (0 if self._staged is None else self._staged[0].shape[2])

    @property
    def counts(self) -> torch.Tensor:
        """int32 ``(B + 1,)`` on the device: real tokens of each row, then logical positions seen."""
        return self._counts

    @property
    def steps_on_device(self) -> bool:
        """Whether the next single token can be a decode step that the host takes no part in."""
        return self._started and not self._drafting and decodes_on_device(self.selector)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self._key_buffer.shape[1]

    def page_view(self, tokens_back: int = 0) -> PageView:
        """The layer as a selector sees it, or as it stood ``tokens_back`` tokens ago."""
        lengths = self._counts[:-1] - tokens_back if tokens_back else self._counts[:-1]
        return PageView(self._key_buffer, self.summaries, lengths, self.max_length - tokens_back)

    def padding_of(self, attention_mask: torch.Tensor | None, size: int) -> torch.Tensor | None:
        """Which of the ``size`` new tokens are real; see :meth:`PaddingReader.new_tokens`."""
        rows = self._rows
        return self._padding.new_tokens(attention_mask, rows.batch, rows.seen, size, reader=id(self))

    def is_staged(self, key: torch.Tensor) -> bool:
        """Whether ``key`` is the very tensor the last ``update`` returned, not yet committed."""
        return self._staged is not None and self._returned is key

    def discard_staged(self) -> None:
        """Forget what the last ``update`` staged, as if it had not been called."""
        self._staged = self._returned = None

    # Cache contract

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shape, dtype and device of the first states.

        Raises:
            ValueError: If the head_dim or dtype has no kernel, or keys and values differ in shape.
        """
        if key_states.shape != value_states.shape:
            raise ValueError(
                "Locks needs keys and values of one shape, got "
                f"{tuple(key_states.shape)} and {tuple(value_states.shape)}; latent-attention models are not supported"
            )
        batch, _, _, head_dim = key_states.shape
        check_head_dim_and_dtype(head_dim, key_states.dtype)
        if self.config.rank > head_dim:
            raise ValueError(f"rank {self.config.rank} exceeds head_dim {head_dim}: use a rank of at most {head_dim}")
        self.device = key_states.device
        self.dtype = key_states.dtype
        self.batch_size = batch
        empty = key_states.new_empty((*key_states.shape[:2], 0, head_dim))
        self._key_buffer, self._value_buffer = empty, empty.clone()
        self.summaries = {
            name: torch.empty((*key_states.shape[:2], 0, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.selector.summary_fields(self.config, head_dim, self.dtype).items()
        }
        self._nowhere = key_states.new_full((1, 1, 1, 1), float("nan"))
        self._ledger = RowLedger(batch)
        self._counts = _in_place(torch.zeros(batch + 1, dtype=torch.int32, device=self.device))
        self._summarized = [0] * batch
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stage new tokens ``(B, H, n, d)``.

        Returns:
            The tokens as they are; where they continue a sequence, NaN over all its logical positions, so that
            attention that does not ask the layer for its pages cannot pass for right.

        Raises:
            ValueError: If earlier tokens were never asked for (the model is not on ``"locks"``), or the states do not
                match the cache in batch size, KV heads, head_dim, dtype or device.
        """
        self._require_committed()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = handoff.pending()
        if self._started and before is not None and before._padding is self._padding:
            # The layer before this one attended nothing but the new tokens.
            before._require_committed()
        held = self._key_buffer
        expected = (held.shape[0], held.shape[1], key_states.shape[2], held.shape[3])
        if key_states.shape != expected or value_states.shape != expected:
            raise ValueError(
                f"this cache holds {held.shape[0]} rows of {held.shape[1]} KV heads with head_dim {held.shape[3]}, but "
                f"got keys {tuple(key_states.shape)} and values {tuple(value_states.shape)}: use one cache per batch, "
                "or call cache.reset() before a new one"
            )
        if key_states.dtype != held.dtype or key_states.device != held.device:
            raise ValueError(
                f"this cache holds {held.dtype} on {held.device}, but got {key_states.dtype} on {key_states.device}: "
                "call cache.reset() before using it with another model"
            )
        self._staged = (key_states, value_states)
        if self._started:
            positions = 1 if key_states.shape[2] == 1 and self.steps_on_device else self.get_seq_length()
            shape = (*key_states.shape[:2], positions, key_states.shape[3])
            key_states, value_states = self._nowhere.expand(shape), self._nowhere.expand(shape)
        self._returned = key_states
        handoff.offer(self)
        return key_states, value_states

    def take_step(self, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The one staged token a row, keys and values ``(B, H, 1, d)``, for a step while :attr:`steps_on_device`.

        Args:
            real: bool ``(B,)``, false where the row's token is padding, or ``None``: all real.
        """
        key, value = self._staged
        if not torch.compiler.is_compiling():
            self.prepare_step()
            self.count_step(real)
        elif not self._prepared:
            self._room = _UNKNOWN  # no host was there to make room
        self._prepared = False
        self.discard_staged()
        return key, value

    def prepare_step(self) -> bool:
        """Do once before a decode step what needs the host.

        Returns:
            Whether the buffers moved.

        Raises:
            ValueError: If the step does not fit ``max_cache_len``.
        """
        if self._prepared:
            return False
        if self._steps >= _MOST_NOTED:
            self.settle()
        moved = self._leave_inference_mode()
        moved = self.make_room(1) or moved
        self._prepared = True
        return moved

    def count_step(self, real: torch.Tensor | None) -> None:
        """Note a decode step on the device; ``real`` as in :meth:`take_step`."""
        self._steps += 1
        self._positions += 1
        self._prepared = False
        if real is not None and not _capturing(self.device):
            self.note_padding(real)

    def note_padding(self, real: torch.Tensor) -> None:
        """Note which rows' tokens were real in the last decode step, bool ``(B,)``."""
        self._step_padding[self._steps - 1] = real

    def make_room(self, tokens: int) -> bool:
        """Grow, if it has to be, for so many more tokens a row; asks the device only when room may be short.

        Returns:
            Whether the buffers moved.

        Raises:
            ValueError: If they do not fit ``max_cache_len``.
        """
        limit = self.config.max_cache_len or self._key_buffer.shape[2]
        if self._room + tokens <= min(limit, self._key_buffer.shape[2]):
            self._room += tokens
            return False
        self._room, before = self.max_length, self._key_buffer
        self._reserve(self._room + tokens)
        self._room += tokens
        return self._key_buffer is not before

    def get_seq_length(self) -> int | torch.Tensor:
        """Logical length: every position seen, padding included.

        A 0-d tensor on the device, as for a static cache, where that knows alone, so that asking does not wait for it;
        otherwise an int, as before the first tokens and always on the CPU.
        """
        staged = 0 if self._staged is None else self._staged[0].shape[2]
        if not self._started:
            return staged
        if torch.compiler.is_compiling() or (self.device.type != "cpu" and self.steps_on_device):
            return self._counts[-1] + staged
        return self._rows.seen + staged

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Logical key length including the new tokens, and offset 0.

        A decode step without the host needs no mask over the past: there the length is 1, the new token.
        """
        if query_length == 1 and self.steps_on_device:
            return 1, 0
        return int(self.get_seq_length()) + query_length, 0

    def get_max_length(self) -> int:
        """``max_cache_len``, or -1 if the cache grows."""
        return -1 if self.config.max_cache_len is None else self.config.max_cache_len

    def reset(self) -> None:
        """Drop everything, counters included."""
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` logical positions.

        Raises:
            ValueError: If the count is positive.
        """
        tokens_to_remove = int(tokens_to_remove)  # generate may pass a 0-d tensor
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative int, got {tokens_to_remove}; "
                f"to keep the first n tokens call crop(n - cache.get_seq_length())"
            )
        if not self.is_initialized:
            return
        self._require_committed()
        removed = -tokens_to_remove
        if not removed and not self._drafting:  # asks the device nothing: generate may do this after every step
            return
        rows = self._rows
        self._rolled_back = self._drafting and removed < self._last_append
        if removed:
            rows.drop_last(removed)
            self._positions = max(0, self._positions - removed)
            self._sync_rows()

    def activate_past_recording(self) -> None:
        """Assisted generation begins: from its first rollback on, several tokens at once are drafts to check.

        That ends with the first append of several tokens that does not follow a rollback, the prompt apart.
        """
        self._drafting = True
        self._prompt_expected = True
        self._rolled_back = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace the rows by those at ``beam_idx``."""
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times, copies adjacent."""
        if self.is_initialized:
            rows = torch.arange(self._ledger.batch, device=self.device).repeat_interleave(repeats)
            self._take_rows(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows at ``indices`` (an index tensor, counted from the end where negative, or a bool tensor)."""
        if self.is_initialized:
            self._take_rows(torch.arange(self._ledger.batch)[torch.as_tensor(indices, device="cpu")])

    def offload(self) -> None:
        """Not supported.

        Raises:
            ValueError: Always; it would silently keep the summaries on the device.
        """
        raise ValueError("LocksCache keeps keys and values on the model's device; offloading is not supported")

    # Writing

    def commit(self, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Write the staged tokens, dropping padding, and summarise the pages they complete.

        Args:
            real: bool ``(B, n)`` on the CPU marking real tokens, or ``None``: all real.

        Returns:
            The staged keys and values ``(B, H, n, d)``, and whether they are a check of drafted tokens.

        Raises:
            ValueError: If they do not fit ``max_cache_len``; nothing is written then.
        """
        key, value = self._staged
        self.discard_staged()  # first: on an error below nothing is kept of them
        size = key.shape[2]
        rows_before = self._rows
        starts = rows_before.lengths
        if real is None:
            counts = [size] * self._ledger.batch
        else:
            counts = real.sum(1).tolist()
        self._reserve(max(start + count for start, count in zip(starts, counts, strict=True)))
        # Gradients reach the new tokens through what is returned; the buffers would keep every step's graph alive.
        new_key, new_value = key.detach(), value.detach()
        if real is None and self._ledger.uniform:
            start = starts[0] if starts else 0
            self._key_buffer[:, :, start : start + size] = new_key
            self._value_buffer[:, :, start : start + size] = new_value
        elif real is None and size == 1:
            rows = torch.arange(self._ledger.batch, device=self.device)
            self._key_buffer[rows, :, self._counts[:-1].long()] = new_key[:, :, 0]
            self._value_buffer[rows, :, self._counts[:-1].long()] = new_value[:, :, 0]
        else:
            for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
                chosen = slice(None) if real is None else real[row].to(self.device)
                self._key_buffer[row, :, start : start + count] = new_key[row][:, chosen]
                self._value_buffer[row, :, start : start + count] = new_value[row][:, chosen]
        is_draft_check = self._rolled_back and real is None and 1 < size <= _MAX_DRAFT
        if size > 1 and not is_draft_check and not self._prompt_expected:
            self._drafting = False
        self._prompt_expected = False
        self._rolled_back = False
        self._last_append = size
        self._ledger.append(size, real)
        self._started = True
        self._positions += size
        self._publish_counts()
        self._summarize_complete_pages()
        return key, value, is_draft_check

    def _require_committed(self) -> None:
        if self._staged is not None:
            raise ValueError(
                "the model's attention never asked this LocksCache for its pages: its attention implementation is not "
                "'locks'. Load the model with attn_implementation='locks' or call locks_hf.patch(model), then start "
                "again with a new cache or cache.reset(). (On a model that is on 'locks', either a forward pass was "
                "interrupted, or it is a latent-attention model, which expands what it caches and is not supported)"
            )

    def _reserve(self, tokens: int) -> None:
        capacity, page_size = self._key_buffer.shape[2], self.config.page_size
        limit = self.config.max_cache_len
        if limit is not None and tokens > limit:
            raise ValueError(
                f"the cache is full: max_cache_len is {limit} tokens, but a row needs {tokens}. Make the cache with a "
                "larger max_cache_len, or without one to let it grow"
            )
        if tokens <= capacity:
            self._leave_inference_mode()
            return
        wanted = limit if limit is not None else _capacity_for(max(tokens + _HEADROOM_TOKENS, capacity + capacity // 2))
        pages = -(-wanted // page_size)
        self._key_buffer = _grown(self._key_buffer, pages * page_size)
        self._value_buffer = _grown(self._value_buffer, pages * page_size)
        self.summaries = {name: _grown(array, pages) for name, array in self.summaries.items()}

    def _leave_inference_mode(self) -> bool:
        """Copy what was made under ``torch.inference_mode``, which cannot be written to outside; whether it had to."""
        if torch.is_inference_mode_enabled() or not (self._key_buffer.is_inference() or self._counts.is_inference()):
            return False
        if self._key_buffer.is_inference():
            self._key_buffer = _in_place(self._key_buffer.clone())
            self._value_buffer = _in_place(self._value_buffer.clone())
            self.summaries = {name: _in_place(array.clone()) for name, array in self.summaries.items()}
        if self._counts.is_inference():
            self._counts = _in_place(self._counts.clone())
        return True

    def _summarize_complete_pages(self) -> None:
        page_size = self.config.page_size
        complete = [length // page_size for length in self._ledger.lengths]
        if self.summaries:
            if len(set(complete)) == 1 and len(set(self._summarized)) == 1:
                if complete[0] > self._summarized[0]:
                    self._summarize_block(self._summarized[0], complete[0])
            else:
                pairs = [
                    (row, page)
                    for row, (done, n) in enumerate(zip(self._summarized, complete, strict=True))
                    for page in range(done, n)
                ]
                if pairs:
                    self._summarize_pairs(pairs)
        self._summarized = [max(done, n) for done, n in zip(self._summarized, complete, strict=True)]

    def _summarize_block(self, first: int, last: int) -> None:
        """Summarise pages ``first`` to ``last`` of every row."""
        page_size = self.config.page_size
        batch, heads = self._key_buffer.shape[:2]
        step = max(1, _SUMMARIZE_CHUNK // max(1, batch * heads))
        for start in range(first, last, step):
            stop = min(start + step, last)
            keys = self._key_buffer[:, :, start * page_size : stop * page_size]
            keys = keys.unflatten(2, (stop - start, page_size)).flatten(0, 2)
            for name, array in self._summaries_of(keys).items():
                self.summaries[name][:, :, start:stop] = array.unflatten(0, (batch, heads, stop - start))

    def _summaries_of(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast(self.device.type, enabled=False):
            arrays = self.selector.summarize(keys, self.config)
        if arrays.keys() != self.summaries.keys():
            raise ValueError(
                f"{type(self.selector).__name__}.summarize returned {sorted(arrays)}, but its summary_fields are "
                f"{sorted(self.summaries)}"
            )
        return arrays

    def _summarize_pairs(self, pairs: list[tuple[int, int]]) -> None:
        """Summarise single (row, page) pairs."""
        page_size = self.config.page_size
        paged = self._key_buffer.unflatten(2, (-1, page_size))
        step = max(1, _SUMMARIZE_CHUNK // self.n_kv_heads)
        for start in range(0, len(pairs), step):
            rows, pages = torch.tensor(pairs[start : start + step], device=self.device).unbind(1)
            keys = paged[rows, :, pages]  # (N, H, P, d)
            for name, array in self._summaries_of(keys.flatten(0, 1)).items():
                self.summaries[name][rows, :, pages] = array.unflatten(0, keys.shape[:2])

    def _sync_rows(self) -> None:
        """Bring what is derived from the ledger up to date after rows or lengths changed."""
        self._summarized = [
            min(done, length // self.config.page_size)
            for done, length in zip(self._summarized, self._ledger.lengths, strict=True)
        ]
        self._publish_counts()

    def _publish_counts(self) -> None:
        """Tell the device what the ledger holds."""
        counts = torch.tensor([*self._ledger.lengths, self._ledger.seen], dtype=torch.int32)
        self._leave_inference_mode()
        if self._counts.shape == counts.shape:
            self._counts.copy_(counts)  # in place: graphs hold its address
        else:
            self._counts = _in_place(counts.to(self.device))
        self._room = max(self._ledger.lengths, default=0)
        self._prepared = False
        self._forget_steps()

    def _take_rows(self, rows: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        self._require_committed()
        ledger = self._rows
        rows = rows.to(self.device)
        self._key_buffer = _in_place(self._key_buffer.index_select(0, rows))
        self._value_buffer = _in_place(self._value_buffer.index_select(0, rows))
        self.summaries = {name: _in_place(array.index_select(0, rows)) for name, array in self.summaries.items()}
        if ledger.uniform and rows.shape[0] == ledger.batch and ledger.all_real:
            return  # beams of equal length: nothing that the host tracks differs between rows
        host_rows = rows.tolist()
        ledger.take_rows(host_rows)
        self._summarized = [self._summarized[row] for row in host_rows]
        self.batch_size = len(host_rows)
        self._sync_rows()

    # Copies

    def fork(self, config: LocksConfig, selector: PageSelector, padding: PaddingReader) -> LocksLayer:
        """A new layer with a copy of the tokens and its own summaries for ``config`` and ``selector``."""
        self._require_committed()
        new = LocksLayer(config, selector, padding)
        if not self.is_initialized:
            return new
        new.lazy_initialization(self._key_buffer[:, :, :0], self._value_buffer[:, :, :0])
        new._reserve(self.max_length)
        new._key_buffer[:, :, : self.max_length] = self.keys
        new._value_buffer[:, :, : self.max_length] = self.values
        new._ledger = self._rows.copy()
        new._started = self._started
        new._positions = self._positions
        new._publish_counts()
        if selector.summary_key(config) == self.selector.summary_key(self.config):
            pages = self.max_length // config.page_size
            for name, array in self.summaries.items():
                new.summaries[name][:, :, :pages] = array[:, :, :pages]
            new._summarized = list(self._summarized)
        else:
            new._summarize_complete_pages()
        return new

    # Accounting

    def score_bytes(self, lengths: npt.ArrayLike) -> int:
        """Bytes read in sparse steps to score the pages before the most recent ones of rows of the given lengths."""
        n_pages = int((np.maximum(np.asarray(lengths) - 1, 0) // self.config.page_size).sum())
        head_dim = self._key_buffer.shape[3]
        return self.n_kv_heads * self.selector.score_bytes(self.config, n_pages, head_dim, self.dtype)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of cached tokens and of summaries, in use and allocated."""
        if not self.is_initialized:
            return {"summary_bytes": 0, "summary_bytes_allocated": 0, "kv_bytes": 0, "kv_bytes_allocated": 0}
        per_token = 2 * self.n_kv_heads * self._key_buffer.shape[3] * self.dtype.itemsize
        per_page = self.n_kv_heads * self.selector.bytes_per_page(self.config, self._key_buffer.shape[3], self.dtype)
        return {
            "summary_bytes": sum(n // self.config.page_size for n in self._rows.lengths) * per_page
            if self.summaries
            else 0,
            "summary_bytes_allocated": sum(array.nbytes for array in self.summaries.values()),
            "kv_bytes": sum(self._ledger.lengths) * per_token,
            "kv_bytes_allocated": self._key_buffer.nbytes + self._value_buffer.nbytes,
        }


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def decodes_on_device(selector: PageSelector) -> bool:
    """Whether decode steps need nothing from the host: not with selectors of a user's own, derived ones included."""
    return type(selector) is LocksSelector


def _capacity_for(tokens: int) -> int:
    """``tokens`` rounded up to one of eight sizes an octave: compiled steps are made anew for each size they meet."""
    step = max(_HEADROOM_TOKENS, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


def _grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """``buffer`` with its third dimension enlarged to ``size``: old content, then zeros.

    Dense attention masks what is past the end of a shorter row, but no mask silences a NaN in unwritten memory.
    """
    grown = buffer.new_zeros((*buffer.shape[:2], size, *buffer.shape[3:]))
    grown[:, :, : buffer.shape[2]] = buffer
    return _in_place(grown)


def _in_place(buffer: torch.Tensor) -> torch.Tensor:
    """Tell the compiler that steps write to the buffer where it lies: otherwise it captures no CUDA graphs."""
    if buffer.device.type == "cuda":
        torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer
