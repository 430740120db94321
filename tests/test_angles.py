"""Sines and cosines of a compiled step: computed once, the same numbers, and nothing left on the model."""

import copy
import pickle
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from locks_hf.angles import SharedAngles
from locks_hf.linears import fast_linears
from tests.helpers import tiny_model

rotary = pytest.fixture(lambda: tiny_model("llama").eval())


def hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def forward(model, compile_with=None):
    tokens, positions = torch.tensor([[3]]), torch.tensor([[200_000]])

    def step(tokens, positions):
        return model(tokens, position_ids=positions, use_cache=False).logits

    with torch.no_grad():
        if compile_with is None:
            return step(tokens, positions)
        torch.compiler.reset()
        return torch.compile(step, fullgraph=True, backend=compile_with)(tokens, positions)


def test_a_compiled_step_has_one_kernel_with_sines(rotary):
    tokens, positions = torch.tensor([[3]]), torch.tensor([[200_000]])

    def sines():
        torch.compiler.reset()
        step = torch.compile(lambda x, at: rotary(x, position_ids=at, use_cache=False).logits, fullgraph=True)
        with torch.no_grad():
            logits, code = run_and_get_code(step, tokens, positions)
        return logits, sum(len(re.findall(r"^ +\w+_sin_\w+\(", part, re.MULTILINE)) for part in code)

    expected, many = sines()
    with fast_linears(rotary):
        logits, few = sines()
    assert few == 1 < many
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_the_graph_changes_only_while_it_lasts(rotary):
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum("realized" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    expected = forward(rotary)
    before = hooks(rotary)
    with fast_linears(rotary):
        assert hooks(rotary) > before
        assert torch.equal(forward(rotary), expected)
        with fast_linears(rotary):
            pass
        assert torch.equal(forward(rotary, backend), expected)
    assert hooks(rotary) == before
    assert torch.equal(forward(rotary, backend), expected)
    assert graphs == [2, 0]


def test_frequencies_that_are_named_by_the_kind_of_layer():
    model, graphs = tiny_model("gemma3_text").eval(), []

    def backend(graph, inputs):
        graphs.append(sum("realized" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    expected = forward(model)
    with fast_linears(model):
        assert torch.equal(forward(model, backend), expected)
    assert graphs[0] in (2, 4)  # sines and cosines of one kind or two


def test_an_exported_model_is_as_without_it(rotary):
    with fast_linears(rotary), torch.no_grad():
        program = torch.export.export(rotary, (torch.tensor([[3, 5]]),), {"use_cache": False}, strict=False)
    assert "realized" not in str(program.graph)


def test_gradients_are_left_alone(rotary):
    with fast_linears(rotary):
        torch.compiler.reset()
        tokens = torch.tensor([[3, 5]])
        step = torch.compile(lambda x: rotary(x, use_cache=False).logits.sum(), backend="aot_eager")
        step(tokens).backward()
    assert rotary.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_it_no_more(rotary, copied):
    with fast_linears(rotary):
        other = copied(rotary)
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum("realized" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    assert torch.equal(forward(other, backend), forward(rotary))
    assert graphs == [0]


def test_models_without_rotary_embeddings_stay_as_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    angles = SharedAngles(model)
    assert hooks(model) == 0
    angles.remove()
