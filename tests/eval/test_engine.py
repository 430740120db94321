from __future__ import annotations

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from locks_hf import LocksCache
from locks_hf.eval.arms import Arm
from locks_hf.eval.engine import Engine
from locks_hf.eval.ruler import TASKS, NeedleGenerator
from locks_hf.models import load

ARMS = [
    Arm("full"),
    Arm("oracle", budget=64),
    Arm("locks", 8, 4, True, 64),
    Arm("locks", 2, 16, False, 96),
    Arm("quest", budget=64),
]
NEW = 12


@pytest.fixture(scope="module")
def texts(haystack, words):
    names = ("niah_single_1", "niah_single_2", "niah_multikey_3")
    return [NeedleGenerator(TASKS[name], 500, words, haystack=haystack).record(0).text for name in names]


@pytest.fixture
def engine(tiny_model):
    model, tokenizer = load(str(tiny_model), device="cpu", dtype="float32")
    model.generation_config.eos_token_id = None
    tokenizer.eos_token_id = None
    return Engine(model, tokenizer, max_new_tokens=NEW)


def new_ids(engine, text, arm, max_new_tokens=NEW):
    """Plain generate() with a fresh cache."""
    inputs = engine.tokenizer(text, return_tensors="pt")
    cache = LocksCache(**arm.cache_settings())
    ids = engine.model.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, **{engine._cache_argument: cache}
    )
    return ids[0, inputs["input_ids"].shape[1] :].tolist(), cache.stats()


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.label)
def test_one_record_gives_what_generate_gives(engine, texts, arm):
    expected, stats = new_ids(engine, texts[1], arm)
    decoded = engine.decode(engine.prefill(texts[1:2]), arm)
    assert decoded.texts == [engine.tokenizer.decode(expected, skip_special_tokens=True)]
    assert decoded.tokens_attended == pytest.approx(stats.tokens_attended)
    assert decoded.bytes_read_per_step == pytest.approx(stats.bytes_read_per_step)
    if arm.budget:
        assert decoded.tokens_attended <= 2 * arm.budget


def test_a_batch_gives_what_its_records_give_alone(engine, texts):
    assert len({len(engine.tokenizer(text)["input_ids"]) for text in texts}) == 3
    prefill = engine.prefill(texts)
    for arm in ARMS:
        expected = [engine.tokenizer.decode(new_ids(engine, text, arm)[0], skip_special_tokens=True) for text in texts]
        assert engine.decode(prefill, arm).texts == expected, arm


def test_arms_do_not_disturb_each_other(engine, texts):
    prefill = engine.prefill(texts)
    first = [engine.decode(prefill, arm) for arm in ARMS]
    assert [engine.decode(prefill, arm) for arm in reversed(ARMS)] == first[::-1]
    assert len({tuple(decoded.texts) for decoded in first}) > 1


def test_arms_of_equal_summaries_share_one_copy(engine, texts, monkeypatch):
    made = []
    fork = LocksCache.fork
    monkeypatch.setattr(LocksCache, "fork", lambda self, **settings: made.append(settings) or fork(self, **settings))
    arms = [Arm("locks", 4, 4, True, budget) for budget in (32, 64, 4096)] + [Arm("locks", 2, 4, True, 32)]
    prefill = engine.prefill(texts[:2])
    shared = [engine.decode(prefill, arm) for arm in arms]
    assert [settings["rank"] for settings in made] == [4, 2]
    alone = [engine.decode(engine.prefill(texts[:2]), arm) for arm in arms]
    assert shared == alone


def stop_at(engine, token):
    """The same model and tokenizer with an end-of-sequence token."""
    engine.model.generation_config.eos_token_id = token
    return Engine(engine.model, engine.tokenizer, max_new_tokens=NEW)


def test_predictions_end_at_the_end_of_sequence(engine, texts):
    rows = [new_ids(engine, text, ARMS[0])[0] for text in texts]
    end = rows[0][4]
    cut = [row[: row.index(end)] if end in row else row for row in rows]
    assert len(cut[0]) <= 4
    engine = stop_at(engine, [end])
    decoded = engine.decode(engine.prefill(texts), ARMS[0])
    assert decoded.texts == [engine.tokenizer.decode(row, skip_special_tokens=True) for row in cut]


def test_a_first_token_that_ends_a_row(engine, texts):
    rows = [new_ids(engine, text, ARMS[0])[0] for text in texts]
    end = rows[0][0]
    engine = stop_at(engine, end)
    alone = engine.decode(engine.prefill(texts[:1]), ARMS[2])
    assert (alone.texts, alone.tokens_attended, alone.bytes_read_per_step) == ([""], None, None)
    other = next(place for place, row in enumerate(rows) if row[0] != end)
    pair = engine.decode(engine.prefill([texts[0], texts[other]]), ARMS[0])
    row = rows[other]
    expected = row[: row.index(end)] if end in row else row
    assert pair.texts == ["", engine.tokenizer.decode(expected, skip_special_tokens=True)]


def test_one_new_token(engine, texts):
    engine = Engine(engine.model, engine.tokenizer, max_new_tokens=1)
    decoded = engine.decode(engine.prefill(texts[:1]), ARMS[2])
    assert decoded.texts == [engine.tokenizer.decode(new_ids(engine, texts[0], ARMS[0], 1)[0])]
    assert decoded.tokens_attended is None


def test_sampling_settings_of_the_checkpoint_have_no_say(tiny_model, texts, recwarn):
    model, tokenizer = load(str(tiny_model), device="cpu", dtype="float32")
    plain = Engine(model, tokenizer, max_new_tokens=NEW)
    expected = plain.decode(plain.prefill(texts), ARMS[0])
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0, num_beams=3)
    model.generation_config.eos_token_id = 2
    again = Engine(model, tokenizer, max_new_tokens=NEW)
    assert again.decode(again.prefill(texts), ARMS[0]) == expected
    assert not [w for w in recwarn if "deprecated" in str(w.message)]


def test_special_tokens_are_added_once(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model, _ = load(str(tiny_model), device="cpu", dtype="float32")
    seen = []

    class Recorder:
        pad_token_id, eos_token_id = 0, 2

        def __call__(self, text, *, add_special_tokens, verbose):
            seen.append(add_special_tokens)
            return tokenizer(text, add_special_tokens=add_special_tokens)

    for flag in (True, False):
        Engine(model, Recorder(), max_new_tokens=2, add_special_tokens=flag).prefill(["the old mill"])
    assert seen == [True, False]


def test_prompts_do_not_end_in_the_end_of_sequence(tiny_model):
    model, tokenizer = load(str(tiny_model), device="cpu", dtype="float32")
    plain = tokenizer("the old mill")["input_ids"]
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    assert tokenizer("the old mill")["input_ids"] == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    prefill = Engine(model, tokenizer, max_new_tokens=2).prefill(["the old mill"])
    assert prefill.ids[0, :-1].tolist() == [tokenizer.bos_token_id, *plain]


def test_batch_size_on_a_cpu(engine):
    assert engine.batch_size_for(4096) == 1


@pytest.mark.parametrize(("length", "rows"), [(64, 64), (100_000_000, 1)])
def test_batch_size_on_a_gpu_follows_the_length(engine, monkeypatch, length, rows):
    memory = type("Properties", (), {"total_memory": 1 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(type(engine.model), "device", torch.device("cuda"))
    assert engine.batch_size_for(length) == rows
    sizes = [engine.batch_size_for(2**n) for n in range(6, 24)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size & (size - 1) == 0 for size in sizes)


def test_nothing_is_compiled_for_a_few_tokens(engine):
    assert engine.model.generation_config.disable_compile
