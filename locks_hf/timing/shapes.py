"""Model shapes by name, and models of them with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# Sizes from the models' public configurations; special tokens play no part in a timing.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_SHAPES: dict[str, tuple[str, dict]] = {
    "glm-4-9b-1m": (
        "glm",
        {
            "num_hidden_layers": 40,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 13696,
            "vocab_size": 151552,
            "max_position_embeddings": 1 << 20,
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 1 << 17,
        },
    ),
    "qwen3-4b": (
        "qwen3",
        {
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "max_position_embeddings": 1 << 17,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": (
        "glm",
        {
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 96,
            "vocab_size": 128,
            "max_position_embeddings": 1 << 17,
            "partial_rotary_factor": 0.5,
        },
    ),
}
SHAPES = tuple(_SHAPES)


@dataclass(frozen=True)
class Shape:
    """What timings and memory estimates need to know of a model.

    Attributes:
        name: As asked for.
        config: The text model's configuration.
        layers: Attention layers.
        heads: Query heads.
        kv_heads: KV heads ``H``.
        head_dim: Channels ``d`` of a head.
        parameters: Weights, tied ones once.
    """

    name: str
    config: PreTrainedConfig
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int

    def describe(self) -> dict:
        """The sizes as JSON types, for ``config.json``."""
        sizes = {name: getattr(self, name) for name in ("layers", "heads", "kv_heads", "head_dim", "parameters")}
        text = self.config.get_text_config(decoder=True)
        return {
            "name": self.name,
            "model_type": text.model_type,
            **sizes,
            "hidden_size": text.hidden_size,
            "vocab_size": text.vocab_size,
        }


def resolve_shape(name: str) -> Shape:
    """The shape of a name, a configuration or a model directory.

    Args:
        name: One of :data:`SHAPES`, the path of a ``config.json`` or of a directory with one, or a Hub id.

    Raises:
        ValueError: If there is no such shape, or the model does not have one head_dim in every layer.
    """
    if name in _SHAPES:
        kind, sizes = _SHAPES[name]
        config = AutoConfig.for_model(kind, **_NO_TOKENS, **sizes)
    else:
        config = _load_config(name)
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ("full_attention",))
    if kinds != {"full_attention"}:
        raise ValueError(
            f"{name} has layers that are not full attention ({sorted(kinds)}): timings fill all layers alike"
        )
    try:
        heads = text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        layers = text.num_hidden_layers
    except AttributeError as error:
        raise ValueError(f"{name} is not the configuration of a decoder-only language model: {error}") from error
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum({id(p): p.numel() for p in model.parameters()}.values())
    return Shape(name, config, layers, heads, kv_heads, head_dim, parameters)


def _load_config(name: str) -> PreTrainedConfig:
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{name!r} holds no config.json, so it is no model directory")
    known = f"shapes are {', '.join(SHAPES)}, the path of a config.json or of a model directory, or a Hub id"
    if not path.exists() and "/" not in name:
        raise ValueError(f"unknown shape {name!r}: {known}")
    try:
        return AutoConfig.from_pretrained(str(path) if path.exists() else name)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ValueError(f"cannot read the configuration of {name!r} ({first}): {known}") from error


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A model with random weights, made on the device itself; activations stay finite over all layers.

    The weights are what Transformers initialises: normal with the configuration's ``initializer_range``, norms one.

    Args:
        shape: The shape.
        device: Where it is made.
        dtype: Of the weights.
        seed: Of the random numbers.

    Returns:
        The model in evaluation mode, on ``"sdpa"``.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)


def load_model(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint that ``shape`` was resolved from, through :func:`locks_hf.models.load`.

    Raises:
        ValueError: If the shape has a built-in name, which stands for no checkpoint, or as ``load``.
        OSError: If the model is not to be had.
    """
    from locks_hf.models import load

    if shape.name in _SHAPES:
        raise ValueError(
            f"{shape.name} is a shape without weights: --checkpoint needs a directory or a Hub id as --shape"
        )
    model, _ = load(shape.name, device=device, dtype=dtype, attn_implementation="sdpa")
    return model.requires_grad_(False)
