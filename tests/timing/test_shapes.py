import pytest
import torch
from transformers import AutoConfig

from locks_hf.timing.shapes import load_model, make_model, resolve_shape


def test_glm_has_the_sizes_of_the_paper():
    shape = resolve_shape("glm-4-9b-1m")
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (40, 32, 4, 128)
    # 9.48 billion, of which the embedding, 151552 x 4096, is not read at a decode step.
    assert 8.8e9 < shape.parameters - 151552 * 4096 < 8.9e9
    assert shape.config.architectures is None and shape.config.model_type == "glm"
    assert shape.config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize(
    ("name", "billions", "groups"), (("llama-3.1-8b", 8.03, 4), ("qwen3-4b", 4.02, 4)), ids=lambda value: str(value)
)
def test_other_shapes_have_their_models_parameters(name, billions, groups):
    shape = resolve_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert shape.heads // shape.kv_heads == groups


def test_a_configuration_on_disk_is_a_shape(tmp_path, tiny_shape):
    tiny_shape.config.save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        shape = resolve_shape(str(name))
        assert shape.describe() | {"name": "tiny"} == tiny_shape.describe()


@pytest.mark.parametrize(
    ("name", "message"),
    (
        ("glm-4", "unknown shape 'glm-4': shapes are glm-4-9b-1m, llama-3.1-8b, qwen3-4b, tiny"),
        ("{tmp}", "holds no config.json"),
    ),
)
def test_unknown_shapes_are_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        resolve_shape(name.format(tmp=tmp_path))


def test_models_with_other_kinds_of_layers_are_refused(tmp_path):
    AutoConfig.for_model("gemma3_text", num_hidden_layers=6).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers that are not full attention"):
        resolve_shape(str(tmp_path))


def test_random_weights_are_those_of_the_seed_and_give_finite_logits(tiny_shape, tiny):
    again = make_model(tiny_shape, torch.device("cpu"), torch.float32, seed=0)
    for weight, other in zip(tiny.parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other)
    logits = tiny(torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all()
    assert not any(weight.requires_grad for weight in tiny.parameters())


def test_a_built_in_shape_has_no_checkpoint(tiny_shape):
    with pytest.raises(ValueError, match="a shape without weights"):
        load_model(tiny_shape, torch.device("cpu"), torch.float32)
