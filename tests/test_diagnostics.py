from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from locks_hf import diagnostics
from locks_hf.diagnostics import METHODS, Method, quality_table, record, selection_quality
from tests.helpers import VOCAB, tiny_model


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def records(model):
    ids = torch.randint(64, (1, 500), generator=torch.Generator().manual_seed(1))
    return record(model, ids, {0, 2}, 20)


def test_record_keeps_what_attention_saw_and_leaves_no_trace(model, records):
    assert set(records) == {0, 2}
    assert records[0].queries.shape == (4, 20, 16)
    assert records[0].keys.shape == records[0].values.shape == (2, 500, 16)
    assert records[0].scaling == 16**-0.5
    assert model.config._attn_implementation == "sdpa"
    assert diagnostics._RECORDER not in AttentionInterface()
    assert diagnostics._RECORDER not in AttentionMaskInterface()


def test_quality_against_a_direct_computation(records):
    """The oracle's mass and output error, query by query, from plain softmax attention."""
    (row,) = selection_quality(records, [64], methods=METHODS[:1], query_stride=7, progress=False)
    pages, masses, errors = 480 // 16, [], []
    for recorded in records.values():
        for i in range(0, 20, 7):
            for head in range(2):
                queries = recorded.queries[2 * head : 2 * head + 2, i]
                keys, values = recorded.keys[head, :480], recorded.values[head, :480]
                weights = torch.softmax(queries @ keys.T / 4, dim=-1)
                share = weights.view(2, pages, 16).sum(-1).mean(0)
                others = share.clone()
                others[[0, pages - 1]] = -1
                chosen = [0, pages - 1, *others.topk(2).indices.tolist()]
                masses.append(share[chosen].sum().item())
                kept = torch.zeros(pages)
                kept[chosen] = 1
                sparse = weights * kept.repeat_interleave(16)
                sparse = sparse / sparse.sum(-1, keepdim=True)
                exact = weights @ values
                errors += ((sparse @ values - exact).norm(dim=-1) / exact.norm(dim=-1)).tolist()
    assert row.mass == pytest.approx(sum(masses) / len(masses), rel=1e-4)
    assert row.output_error == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert row.recall == 1


def test_order_of_methods(records):
    methods = (METHODS[0], Method("full rank", "locks", 15, 16, True), *METHODS[1:])
    rows = {row.method: row for row in selection_quality(records, [64], methods=methods, progress=False)}
    assert rows["full rank"].recall > 0.95
    assert all(row.mass <= rows["oracle"].mass + 1e-6 for row in rows.values())
    assert all(0 <= row.recall <= 1 and math.isfinite(row.output_error) for row in rows.values())
    table = quality_table(list(rows.values()))
    assert table.count("\n") == len(methods) + 1
    assert f"| oracle | {rows['oracle'].mass:.4f} / 1.000 /" in table


def test_a_prompt_with_too_few_pages(records):
    with pytest.raises(
        ValueError, match="30 pages before the recorded queries, fewer than the 64 slots of budget 1024"
    ):
        selection_quality(records, [1024], progress=False)


def test_layers_with_a_window_are_left_out(monkeypatch, tmp_path, capsys):
    kinds = ["sliding_attention", "full_attention"] * 3
    hybrid = tiny_model("gemma3_text", num_hidden_layers=6, sliding_window=16, layer_types=kinds)
    assert diagnostics.full_attention_layers(hybrid) == [1, 3, 5]
    seen = []

    def load(*args, **kwargs):
        return hybrid, lambda text, **kwargs: {"input_ids": torch.tensor([[ord(letter) % VOCAB for letter in text]])}

    def spy(model, ids, layers, n_queries):
        seen.append(layers)
        return record(model, ids, layers, n_queries)

    monkeypatch.setattr(diagnostics, "load", load)
    monkeypatch.setattr(diagnostics, "record", spy)
    text = tmp_path / "text.txt"
    text.write_text("Pages of keys and what they hold. " * 20)
    command = ["--text", str(text), "--length", "300", "--budget", "64"]
    assert diagnostics.main([*command, "--layer-stride", "2"]) == 0
    assert seen == [{1, 5}]
    hybrid = tiny_model("mistral", sliding_window=16)
    assert diagnostics.main(command) == 2
    assert "MistralConfig has no full-attention layer" in capsys.readouterr().err


def test_what_locks_does_not_support_is_refused():
    ids = torch.randint(1, VOCAB, (1, 40))
    with pytest.raises(ValueError, match="is not causal"):
        record(tiny_model("bert", "eager", intermediate_size=48), ids, {0}, 8)
    with pytest.raises(ValueError, match="logit soft-capping"):
        record(tiny_model("gemma2"), ids, {0}, 8)
    with pytest.raises(ValueError, match=r"BloomForCausalLM does not use .* in layers \[0, 1\]"):
        record(tiny_model("bloom", "eager"), ids, {0, 1}, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "16"], "at least two pages = 32 tokens"),
        (["--queries", "0"], "--queries must be a power of two from 1 to 64, got 0"),
        (["--layer-stride", "0"], "--layer-stride must be at least 1, got 0"),
        (["--text", "no/such/file"], "no/such/file"),
    ],
)
def test_bad_options_before_the_model_is_loaded(monkeypatch, capsys, options, message):
    monkeypatch.setattr(diagnostics, "load", lambda *args, **kwargs: pytest.fail("loaded the model"))
    assert diagnostics.main(options) == 2
    assert message in capsys.readouterr().err


def test_command(model, monkeypatch, tmp_path, capsys):
    def tokenizer(text, **kwargs):
        return {"input_ids": torch.tensor([[ord(letter) % 64 for letter in text]])}

    monkeypatch.setattr(diagnostics, "load", lambda *args, **kwargs: (model, tokenizer))
    text = tmp_path / "text.txt"
    text.write_text("Pages of keys and what they hold. " * 40)
    command = ["--text", str(text), "--length", "600", "--budget", "64", "128", "--output", str(tmp_path / "rows.json")]
    assert diagnostics.main(command) == 0
    assert "| r8i4 refit |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 2 * len(METHODS)
    assert diagnostics.main(["--text", str(text), "--length", "6000"]) == 2
    assert "--length 6000 is beyond the model's window of 1024 tokens" in capsys.readouterr().err
    text.write_text("Too short. " * 60)
    assert diagnostics.main(["--text", str(text), "--length", "1000"]) == 2
    assert "only 660 tokens, 1000 are asked for" in capsys.readouterr().err
