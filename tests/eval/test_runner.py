from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tqdm import tqdm

from locks_hf.eval.arms import Arm
from locks_hf.eval.engine import Decoded
from locks_hf.eval.ruler import Record
from locks_hf.eval.runner import make_batches, run_length
from locks_hf.eval.store import RunStore, read_samples

TASKS = ["niah_single_1", "niah_multivalue"]
ARMS = [Arm("full"), Arm("quest", budget=64)]


class FakeEngine:
    """Answers with the text and the batch it was in; can run out of memory or be interrupted."""

    def __init__(self, fits=100, arm_fits=None, stop_after=None):
        self.fits = fits
        self.arm_fits = arm_fits or {}
        self.stop_after = stop_after
        self.prefilled = []
        self.decoded = []

    def prefill(self, texts):
        if len(texts) > self.fits:
            raise torch.OutOfMemoryError("no room for the prompts")
        self.prefilled.append(list(texts))
        return list(texts)

    def decode(self, prefill, arm):
        if self.stop_after is not None and len(self.decoded) == self.stop_after:
            raise KeyboardInterrupt
        if len(prefill) > self.arm_fits.get(arm.selector, 100):
            raise torch.OutOfMemoryError("no room for the arm")
        self.decoded.append((len(prefill), arm))
        return Decoded([f"{text} {arm.selector} of {len(prefill)}" for text in prefill], 64.0, 4096.0)


def make_record(task, index):
    return Record(task, 512, index, f"{task}#{index}", (f"#{index} full",), 500)


def run(folder, engine, *, limit=5, batch_size=4, arms=ARMS, tasks=TASKS):
    with RunStore(folder, {"benchmark": "ruler", "seed": 0}) as store, tqdm(disable=True) as progress:
        store.begin({}, {})
        return run_length(512, make_batches(tasks, limit, batch_size), arms, make_record, engine, store, progress)


def content(folder):
    return sorted((folder / "samples.jsonl").read_text().splitlines())


def test_batches_mix_tasks_and_cover_everything():
    batches = make_batches(["a", "b", "c"], 4, 5)
    assert [len(batch) for batch in batches] == [5, 5, 2]
    assert batches[0] == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1)]
    assert len({key for batch in batches for key in batch}) == 12
    assert make_batches(["a"], 2, 64) == [[("a", 0), ("a", 1)]]


def test_a_run_stores_every_sample_and_its_score(tmp_path):
    engine = FakeEngine()
    assert run(tmp_path, engine) == 0
    samples, _ = read_samples(tmp_path / "samples.jsonl")
    assert len(samples) == 2 * 5 * 2
    assert all((one["score"] == 100.0) == (one["selector"] == "full") for one in samples)
    assert len(engine.prefilled) == 3
    assert len(engine.decoded) == 6


def test_nothing_is_done_twice(tmp_path):
    run(tmp_path, FakeEngine())
    again = FakeEngine()
    assert run(tmp_path, again) == 0
    assert again.prefilled == []
    more = FakeEngine()
    run(tmp_path, more, arms=[*ARMS, Arm("oracle", budget=64)])
    assert len(more.prefilled) == 3
    assert {arm.selector for _, arm in more.decoded} == {"oracle"}


@pytest.mark.parametrize("stop_after", range(6))
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path, stop_after):
    run(tmp_path / "whole", FakeEngine())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", FakeEngine(stop_after=stop_after))
    assert len(content(tmp_path / "parts")) == [0, 4, 8, 12, 16, 18][stop_after]
    run(tmp_path / "parts", FakeEngine())
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


@pytest.mark.parametrize("lost", [1, 3, 7, 19])
def test_a_batch_with_one_lost_sample_is_computed_whole(tmp_path, lost):
    run(tmp_path, FakeEngine())
    path = tmp_path / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:lost] + lines[lost + 1 :]))
    engine = FakeEngine()
    run(tmp_path, engine)
    assert len(engine.prefilled) == len(engine.decoded) == 1
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_out_of_memory_halves_the_batches(tmp_path, capsys):
    engine = FakeEngine(fits=2)
    assert run(tmp_path, engine, batch_size=8) == 0
    assert [len(texts) for texts in engine.prefilled] == [2, 2, 2, 2, 2]
    assert len(content(tmp_path)) == 20
    out, err = capsys.readouterr()
    assert out == ""
    assert "8 records of 512 tokens do not fit into GPU memory" in err


def test_out_of_memory_in_an_arm_keeps_what_is_done(tmp_path):
    engine = FakeEngine(arm_fits={"quest": 3})
    assert run(tmp_path, engine) == 0
    samples, _ = read_samples(tmp_path / "samples.jsonl")
    assert len(samples) == 20
    assert sum(one["prediction"].endswith("full of 4") for one in samples) == 4
    assert all(one["prediction"].endswith("of 2") for one in samples if one["selector"] == "quest")


def test_a_record_that_does_not_fit_alone_is_an_error_and_the_run_goes_on(tmp_path):
    assert run(tmp_path, FakeEngine(arm_fits={"full": 0}), limit=2) == 4
    samples, _ = read_samples(tmp_path / "samples.jsonl")
    assert {one["selector"] for one in samples} == {"quest"}
    errors = [line for line in (tmp_path / "errors.jsonl").read_text().splitlines()]
    assert len(errors) == 4
    assert '"selector": "full"' in errors[0]
    assert "no room for the arm" in errors[0]
    assert run(tmp_path, FakeEngine(), limit=2) == 0
    assert len(content(tmp_path)) == 8
    assert not (tmp_path / "errors.jsonl").exists()


def test_prompts_that_do_not_fit_alone_fail_under_every_arm(tmp_path):
    assert run(tmp_path, FakeEngine(fits=0), limit=1) == 4
    assert content(tmp_path) == []
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 4


def test_other_errors_are_not_swallowed(tmp_path):
    def fail(texts):
        raise RuntimeError("kernel")

    with pytest.raises(RuntimeError, match="kernel"):
        run(tmp_path, SimpleNamespace(prefill=fail))
