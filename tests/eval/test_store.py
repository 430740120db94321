from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from locks_hf.eval.arms import Arm
from locks_hf.eval.store import SAMPLE_KEYS, RunStore, read_samples, sample_key, settings_hash

SETTINGS = {"benchmark": "ruler", "model": "tiny", "seed": 42, "haystack": "noise"}


def sample(index=0, arm=Arm("full"), task="niah_single_1", score=100.0, **changes):  # noqa: B008
    return {
        "task": task,
        "length": 512,
        "index": index,
        **asdict(arm),
        "prediction": "über 1\u2028\n2",
        "references": ["1"],
        "score": score,
        "tokens_attended": 64.0,
        "bytes_read_per_step": 4096.0,
        **changes,
    }


def write(folder, samples, **sweep):
    with RunStore(folder, SETTINGS) as store:
        store.begin(sweep)
        for one in samples:
            store.add(one)


def test_samples_come_back(tmp_path):
    samples = [sample(0), sample(1, Arm("locks", 8, 4, True, 64))]
    write(tmp_path / "a" / "run", samples, limit=2)
    with RunStore(tmp_path / "a" / "run", SETTINGS) as store:
        assert store.samples == []
        store.begin({"limit": 3})
        assert store.samples == samples
        assert store.done == {sample_key(one) for one in samples}
        assert store.cut_bytes == 0
    assert json.loads((tmp_path / "a" / "run" / "config.json").read_text()) == {**SETTINGS, "limit": 3}
    line = (tmp_path / "a" / "run" / "samples.jsonl").read_text().splitlines()[0]
    assert list(json.loads(line)) == list(SAMPLE_KEYS)


def test_a_sample_is_in_the_file_at_once(tmp_path):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({})
        store.add(sample(0))
        assert read_samples(tmp_path / "samples.jsonl")[0] == [sample(0)]


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_an_unfinished_last_line_is_removed(tmp_path, kept):
    write(tmp_path, [sample(0), sample(1)])
    path = tmp_path / "samples.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    assert read_samples(path)[0] == [sample(0)]
    assert path.read_bytes() == first + second[:kept]
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({})
        assert store.samples == [sample(0)]
        assert store.cut_bytes == len(second[:kept])
        store.add(sample(1))
    assert path.read_bytes() == first + second


@pytest.mark.parametrize("line", [b"{]\n", b"3\n", b'{"task": "niah_single_1"}\n', b"\xff\n", b"\n"])
def test_a_damaged_line_is_named(tmp_path, line):
    write(tmp_path, [sample(0), sample(1)])
    path = tmp_path / "samples.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + line + second)
    with pytest.raises(ValueError, match=r"line 2 of .*samples.jsonl is not a sample .*--overwrite"):
        RunStore(tmp_path, SETTINGS)
    with RunStore(tmp_path, SETTINGS, overwrite=True) as store:
        store.begin({})
        assert store.samples == []


def test_other_settings_are_refused_by_name(tmp_path):
    write(tmp_path, [sample(0)])
    with pytest.raises(ValueError, match="seed is 42 there and 43 here; haystack is 'noise' there and 'essays' here"):
        RunStore(tmp_path, {**SETTINGS, "seed": 43, "haystack": "essays"})
    assert len(read_samples(tmp_path / "samples.jsonl")[0]) == 1
    with RunStore(tmp_path, {**SETTINGS, "seed": 43}, overwrite=True) as store:
        assert len(read_samples(tmp_path / "samples.jsonl")[0]) == 1
        store.begin({})
        assert store.samples == []
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 43


def test_what_is_known_later_is_compared_too(tmp_path):
    def go_on(identity, **options):
        with RunStore(tmp_path, SETTINGS, **options) as store:
            store.settle({"model_identity": identity})
            store.begin({})
            store.add(sample(len(store.samples)))

    write(tmp_path, [sample(0)])
    go_on("one")  # the run does not know its model: nothing to compare
    go_on("one")
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"model_identity is 'one' there and 'two' here.* start anew with --overwrite"):
        go_on("two")
    assert (tmp_path / "samples.jsonl").read_bytes() == before
    go_on("two", overwrite=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_identity"] == "two"


def test_overwrite_leaves_foreign_files_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, [sample(0)])
    with RunStore(tmp_path, SETTINGS, overwrite=True) as store:
        store.begin({})
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_samples_without_config_and_damaged_config(tmp_path):
    write(tmp_path, [sample(0)])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        RunStore(tmp_path, SETTINGS)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no config\.json"):
        RunStore(tmp_path, SETTINGS)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to the output directory"):
        RunStore(tmp_path / "file" / "run", SETTINGS)


def test_two_runs_in_one_directory(tmp_path):
    with RunStore(tmp_path, SETTINGS), pytest.raises(ValueError, match="another run is writing"):
        RunStore(tmp_path, SETTINGS, overwrite=True)
    with RunStore(tmp_path, SETTINGS):
        pass


def test_a_refused_directory_is_free_again(tmp_path):
    write(tmp_path, [])
    with pytest.raises(ValueError, match="other settings"):
        RunStore(tmp_path, {**SETTINGS, "seed": 1})
    with RunStore(tmp_path, SETTINGS):
        pass


def test_errors_are_those_of_the_last_run(tmp_path):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({})
        store.add_error({"task": "niah_single_1", "error": "out of memory"})
        store.add_error({"task": "niah_single_2", "error": "out of memory"})
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 2
    write(tmp_path, [])
    assert not (tmp_path / "errors.jsonl").exists()


def test_results_are_written_whole(tmp_path):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({"limit": 1})
        path = store.write_results([{"score": 1.0}], {"python": "3"})
    assert json.loads(path.read_text()) == {
        "config": {**SETTINGS, "limit": 1},
        "environment": {"python": "3"},
        "rows": [{"score": 1.0}],
    }
    assert not list(tmp_path.glob("*.partial"))


def test_settings_hash():
    assert settings_hash({"a": 1, "b": 2}) == settings_hash({"b": 2, "a": 1}) != settings_hash({"a": 1, "b": 3})


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="was not written by an evaluation"):
            RunStore(tmp_path, SETTINGS, overwrite=overwrite)
    assert config.read_text() == '{"model_type": "llama"}'


@pytest.mark.parametrize("change", [{"rank": [1]}, {"score": "x"}, {"length": "512"}, {"tokens_attended": "x"}])
def test_a_sample_with_a_field_of_another_kind_is_named(tmp_path, change):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({})
        store.add(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a sample"):
        read_samples(path)
