"""Attention of one query token a row over a context that is held apart from the model.

A *held context* is one static buffer of keys and of values a layer and a length ``T`` on the host. Every backend here
writes the new token at position ``T - 1`` and attends all ``T``, so that a captured graph does the same work at each
replay. The model reaches the backend through one registered operation that takes the query, the new key and value and
the layer's number and nothing else. So a compiled model knows neither the backend nor the length: it is compiled once,
and each arm and context costs one capture.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from locks_hf.kernels import attend, top_pages
from locks_hf.kernels.backend import use_triton

IMPLEMENTATION = "locks_timing_held"
PAGE = 16  # tokens a page of FlashInfer's page table and of Quest
_FA3_MODULES = (
    "flash_attn_interface",
    "fa3_fwd_interface",
    "fa3_fwd.flash_attn_interface",
    "fa3_fwd",
    "flash_attn_3.flash_attn_interface",
    "flash_attn_3",
)


@dataclass
class Held:
    """A context that does not grow.

    Attributes:
        keys: For each layer ``(B, H, capacity, d)``, contiguous, ``capacity`` a multiple of :data:`PAGE`.
        values: Likewise.
        length: Tokens ``T`` attended, the new one among them, from 1 to ``capacity``.
        heads: Query heads.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int
    heads: int


class Backend(ABC):
    """One way to attend a held context."""

    name: str
    #: What to say about it beside its figures.
    note = ""

    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run here, or ``None`` if it can."""
        return None

    def bind(self, held: Held) -> None:
        """Plan for a context; outside of any graph."""
        self.held = held

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write the new token and attend.

        Args:
            layer: Which layer's buffers.
            query: ``(B, H * G, 1, d)``, any strides.
            key: ``(B, H, 1, d)``, likewise.
            value: Likewise.
            scaling: Factor on the logits.

        Returns:
            ``(B, 1, H * G, d)``, contiguous.
        """

    def _append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values, position = self.held.keys[layer], self.held.values[layer], self.held.length - 1
        if use_triton(keys.device):
            from .append import append_triton

            append_triton(key[:, :, 0], value[:, :, 0], keys, values, position)
        else:
            keys[:, :, position] = key[:, :, 0]
            values[:, :, position] = value[:, :, 0]


class SdpaBackend(Backend):
    """``scaled_dot_product_attention`` held to one of torch's backends.

    Grouped KV where that backend takes it, else a group's queries as query tokens of one head, which is the same.
    """

    def __init__(self, name: str, kind: SDPBackend):
        self.name = name
        self._kind = kind
        self._grouped: bool | None = None

    def unavailable(self, device: torch.device) -> str | None:
        """A GPU for cuDNN; whether the others take the shape shows when they run."""
        if self._kind is SDPBackend.CUDNN_ATTENTION:
            if device.type != "cuda":
                return "cuDNN needs a CUDA device"
            if not torch.backends.cudnn.is_available():
                return "this torch has no cuDNN"
        return None

    def bind(self, held: Held) -> None:
        """Find out whether the backend takes grouped KV, on a few tokens."""
        super().bind(held)
        key = held.keys[0]
        tokens = key.new_zeros((1, key.shape[1], 64, key.shape[3]))
        query = key.new_zeros((1, held.heads, 1, key.shape[3]))
        self._grouped = True
        try:
            self._sdpa(query, tokens, tokens, 1.0)
        except RuntimeError:
            self._grouped = False
            self._sdpa(query, tokens, tokens, 1.0)
        self.note = "" if self._grouped else "takes no grouped KV: a group's queries go in as tokens of one head"

    def _sdpa(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        """Query ``(B, H * G, 1, d)``, keys and values ``(B, H, T, d)`` to ``(B, H * G, 1, d)``."""
        batch, kv_heads, length, head_dim = keys.shape
        heads = query.shape[1]
        if not self._grouped:
            # The group's queries as query tokens of one head: the same attention, and no copy of a key.
            query = query.reshape(batch * kv_heads, 1, heads // kv_heads, head_dim)
            one_head = (batch * kv_heads, 1, length, head_dim)
            keys, values = (x.as_strided(one_head, (x.stride(1), 0, *x.stride()[2:])) for x in (keys, values))
        with sdpa_kernel(self._kind):
            out = F.scaled_dot_product_attention(
                query, keys, values, scale=scaling, enable_gqa=query.shape[1] != keys.shape[1]
            )
        return out.reshape(batch, heads, 1, head_dim)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :meth:`Backend.attend`."""
        self._append(layer, key, value)
        length = self.held.length
        keys, values = self.held.keys[layer][:, :, :length], self.held.values[layer][:, :, :length]
        return self._sdpa(query.contiguous(), keys, values, scaling).transpose(1, 2).contiguous()


class Fa3Backend(Backend):
    """FlashAttention-3's ``flash_attn_with_kvcache``, from whichever package has it."""

    name = "fa3"

    def __init__(self):
        self._function = None

    def unavailable(self, device: torch.device) -> str | None:
        """Needs Hopper and one of the packages."""
        if device.type != "cuda":
            return "FlashAttention-3 needs a CUDA device"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "FlashAttention-3 needs a Hopper GPU (sm_90)"
        reasons = []
        for name in _FA3_MODULES:
            try:
                self._function = importlib.import_module(name).flash_attn_with_kvcache
                self.note = f"{name}.flash_attn_with_kvcache"
                return None
            except (ImportError, AttributeError, OSError, RuntimeError) as error:
                if not isinstance(error, ModuleNotFoundError):
                    reasons.append(f"{name}: {error}")
        return "; ".join(reasons) or "not installed (pip install fa3-fwd, or build flash_attn_interface)"

    def bind(self, held: Held) -> None:
        """The lengths, as FlashAttention takes them."""
        super().bind(held)
        key = held.keys[0]
        self._lengths = torch.full((key.shape[0],), held.length, dtype=torch.int32, device=key.device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :meth:`Backend.attend`."""
        self._append(layer, key, value)
        length = self.held.length
        keys, values = self.held.keys[layer][:, :, :length], self.held.values[layer][:, :, :length]
        out = self._function(
            query.transpose(1, 2).contiguous(),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            cache_seqlens=self._lengths,
            softmax_scale=scaling,
            causal=False,
        )
        return (out[0] if isinstance(out, tuple) else out).contiguous()


class FlashInferBackend(Backend):
    """FlashInfer's batch decode over a page table of 16-token pages, planned once, split over the KV."""

    name = "flashinfer"

    def __init__(self):
        self._module = None

    def unavailable(self, device: torch.device) -> str | None:
        """Needs a GPU and the package."""
        if device.type != "cuda":
            return "FlashInfer needs a CUDA device"
        try:
            self._module = importlib.import_module("flashinfer")
        except ModuleNotFoundError as error:
            return f"not installed (pip install flashinfer-python): {error}"
        except Exception as error:  # its import loads compiled parts, which fail in their own ways
            return f"cannot be imported: {error}"
        self.note = f"flashinfer {getattr(self._module, '__version__', '?')}, pages of {PAGE}, tensor cores"
        return None

    def bind(self, held: Held) -> None:
        """Lay the page table over the buffers and plan; every layer has the same table."""
        super().bind(held)
        key = held.keys[0]
        batch, heads, capacity, head_dim = key.shape
        device = key.device
        pages_a_head, used = capacity // PAGE, -(-held.length // PAGE)
        # Page i starts i * PAGE tokens into the buffer; a row's first head begins every heads * pages_a_head pages.
        first = torch.arange(batch, dtype=torch.int32)[:, None] * (heads * pages_a_head)
        indices = (first + torch.arange(used, dtype=torch.int32)).flatten().to(device)
        indptr = (torch.arange(batch + 1, dtype=torch.int32) * used).to(device)
        last = torch.full((batch,), held.length - (used - 1) * PAGE, dtype=torch.int32, device=device)
        span = (batch - 1) * heads * pages_a_head + pages_a_head
        shape, stride = (span, heads, PAGE, head_dim), (PAGE * head_dim, capacity * head_dim, head_dim, 1)
        self._pages = [
            (k.as_strided(shape, stride, k.storage_offset()), v.as_strided(shape, stride, v.storage_offset()))
            for k, v in zip(held.keys, held.values, strict=True)
        ]
        wrapper_type = self._module.BatchDecodeWithPagedKVCacheWrapper
        self._workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
        # Its FlashAttention-3 kernels, the default on Hopper, do not split one row's KV over the GPU.
        backend = {"backend": "fa2"} if "backend" in inspect.signature(wrapper_type.__init__).parameters else {}
        self._wrapper = wrapper_type(
            self._workspace,
            "HND",
            **backend,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty_like(indptr),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last),
        )
        options = {"pos_encoding_mode": "NONE", "q_data_type": key.dtype, "kv_data_type": key.dtype}
        known = inspect.signature(self._wrapper.plan).parameters
        self._plan = lambda scaling: self._wrapper.plan(
            indptr,
            indices,
            last,
            held.heads,
            heads,
            head_dim,
            PAGE,
            sm_scale=scaling,
            **{name: option for name, option in options.items() if name in known},
        )
        self._planned: float | None = None
        self._plan_for(head_dim**-0.5)

    def _plan_for(self, scaling: float) -> None:
        if scaling != self._planned:  # only in a warm-up: a captured step always finds its plan
            self._plan(scaling)
            self._planned = scaling

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :meth:`Backend.attend`."""
        self._plan_for(scaling)
        self._append(layer, key, value)
        return self._wrapper.run(query[:, :, 0].contiguous(), self._pages[layer])[:, None].contiguous()


class NoAttention(Backend):
    """Nothing but an output to go on with: what a step costs around its attention. It needs no held context."""

    name = "none"
    note = "attention replaced by a fill of its output: what the step costs around it"

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :meth:`Backend.attend`. Memory of its own each time: the compiler reuses what it was given."""
        batch, heads, _, head_dim = query.shape
        return query.new_full((batch, 1, heads, head_dim), 0.1)


class QuestBackend(Backend):
    """The efficiency baseline of App. B.4: Quest with pages chosen by each query head, two layers dense.

    A page's score is its envelope bound; minima and maxima lie side by side, so that it is one matrix product. The
    package's own exact top-k and attention follow, every query head taken as a KV head of its own by strides, without
    copies of keys: a row and KV head become a row, the group's heads its heads, with stride 0. As the top-k is that of
    Locks, the first page is always among the chosen, besides the most recent.

    Args:
        dense: Attends the layers that stay dense.
        budget: Tokens a query head attends.
        dense_layers: How many of the first layers stay dense.
    """

    name = "quest"

    def __init__(self, dense: Backend, budget: int = 2048, dense_layers: int = 2):
        self._dense = dense
        self._slots = max(2, -(-budget // PAGE))
        self._dense_layers = dense_layers
        self.note = f"{budget} tokens a query head, {dense_layers} dense layers on {dense.name}"

    def unavailable(self, device: torch.device) -> str | None:
        """As its dense layers."""
        return self._dense.unavailable(device)

    def bind(self, held: Held) -> None:
        """Make the envelopes of all pages, incomplete last ones from the tokens they have."""
        super().bind(held)
        self._dense.bind(held)
        self._envelopes = [
            None if layer < self._dense_layers else make_envelopes(keys, held.length)
            for layer, keys in enumerate(held.keys)
        ]
        batch, heads = held.keys[0].shape[:2]
        self._lengths = torch.full((batch * heads,), held.length, dtype=torch.int32, device=held.keys[0].device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """See :meth:`Backend.attend`."""
        envelopes = self._envelopes[layer]
        if envelopes is None:
            return self._dense.attend(layer, query, key, value, scaling)
        keys, values, position = self.held.keys[layer], self.held.values[layer], self.held.length - 1
        batch, heads, capacity, head_dim = keys.shape
        one_query = query[:, :, 0]
        if use_triton(keys.device):
            from .append import append_triton

            halves = append_triton(
                key[:, :, 0], value[:, :, 0], keys, values, position, one_query, envelopes, page_size=PAGE
            )
        else:
            self._append(layer, key, value)
            last = envelopes[:, :, position // PAGE]
            last[..., :head_dim] = torch.minimum(last[..., :head_dim], key[:, :, 0])
            last[..., head_dim:] = torch.maximum(last[..., head_dim:], key[:, :, 0])
            grouped = one_query.unflatten(1, (heads, -1))
            halves = torch.cat([grouped.clamp(max=0), grouped.clamp(min=0)], dim=-1)
        score = (halves.flatten(0, 1) @ envelopes.flatten(0, 1).transpose(1, 2)).float()  # (B H, G, J)
        pages = top_pages(score, self._lengths, PAGE, self._slots)
        group = score.shape[1]
        as_heads = (x.view(batch * heads, 1, capacity, head_dim).expand(-1, group, -1, -1) for x in (keys, values))
        by_group = one_query.reshape(batch * heads, group, head_dim)
        out = attend(by_group, *as_heads, pages, self._lengths, PAGE, scaling)
        return out.view(batch, 1, heads * group, head_dim)


def make_envelopes(keys: torch.Tensor, length: int) -> torch.Tensor:
    """Channel minima, then maxima of each page of the first ``length`` tokens.

    Args:
        keys: ``(B, H, capacity, d)``.
        length: Tokens, at least 1.

    Returns:
        ``(B, H, ceil(length / PAGE), 2 d)``, contiguous.
    """
    batch, heads, _, head_dim = keys.shape
    n_pages, whole = -(-length // PAGE), length // PAGE
    out = keys.new_empty((batch, heads, n_pages, 2 * head_dim))
    if whole:
        paged = keys[:, :, : whole * PAGE].unflatten(2, (whole, PAGE))
        torch.amin(paged, dim=3, out=out[:, :, :whole, :head_dim])
        torch.amax(paged, dim=3, out=out[:, :, :whole, head_dim:])
    if whole < n_pages:
        rest = keys[:, :, whole * PAGE : length]
        out[:, :, whole, :head_dim] = rest.amin(dim=2)
        out[:, :, whole, head_dim:] = rest.amax(dim=2)
    return out


DENSE = ("cudnn", "flash", "fa3", "flashinfer", "math")


def make_backend(name: str, budget: int, device: torch.device) -> Backend:
    """A backend by its name.

    Args:
        name: One of :data:`DENSE`, ``"quest"`` or ``"none"``.
        budget: Tokens a query head attends under Quest.
        device: Where it is to run: Quest's dense layers take the first of FA3, cuDNN, flash and math that is there.

    Raises:
        ValueError: If there is no such backend.
    """
    if name == "quest":
        there = (make_backend(dense, budget, device) for dense in ("fa3", "cudnn", "flash", "math"))
        return QuestBackend(next(dense for dense in there if dense.unavailable(device) is None), budget)
    makers = {
        "cudnn": lambda: SdpaBackend("cudnn", SDPBackend.CUDNN_ATTENTION),
        "flash": lambda: SdpaBackend("flash", SDPBackend.FLASH_ATTENTION),
        "math": lambda: SdpaBackend("math", SDPBackend.MATH),
        "fa3": Fa3Backend,
        "flashinfer": FlashInferBackend,
        "none": NoAttention,
    }
    if name not in makers:
        raise ValueError(f"unknown backend {name!r}; there are: {', '.join((*makers, 'quest'))}")
    return makers[name]()


# The backend that the operation below calls: read when a step runs or is captured, never when it is compiled.
_bound = threading.local()


@torch.library.custom_op("locks_hf_timing::attend_held", mutates_args=())
def _attend_held(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
) -> torch.Tensor:
    backend = getattr(_bound, "backend", None)
    if backend is None:
        raise RuntimeError("no backend is bound: the model runs outside of locks_hf.timing.backends.attending")
    return backend.attend(layer, query, key, value, scaling)


@_attend_held.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
    batch, heads, _, head_dim = query.shape
    return query.new_empty((batch, 1, heads, head_dim))


def _held_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function of :data:`IMPLEMENTATION`: one query token a row over the bound backend's context."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.locks_hf_timing.attend_held(query, key, value, module.layer_idx, scaling), None


@contextmanager
def registered(model: PreTrainedModel) -> Iterator[None]:
    """Put the model on :data:`IMPLEMENTATION`; on leaving it has its own again and the name is gone.

    The name has no mask function, for which Transformers makes no mask.
    """
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION] = _held_attention
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        yield
    finally:
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]


@contextmanager
def attending(backend: Backend) -> Iterator[None]:
    """Have the operation call ``backend``, on this thread."""
    _bound.backend = backend
    try:
        yield
    finally:
        del _bound.backend
