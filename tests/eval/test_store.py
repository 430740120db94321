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
        store.begin(sweep, {})
        for one in samples:
            store.add(one)


def test_samples_come_back(tmp_path):
    samples = [sample(0), sample(1, Arm("locks", 8, 4, True, 64))]
    write(tmp_path / "a" / "run", samples, limit=2)
    with RunStore(tmp_path / "a" / "run", SETTINGS) as store:
        assert store.samples == []
        store.begin({"limit": 3}, {})
        assert store.samples == samples
        assert store.done == {sample_key(one) for one in samples}
        assert store.cut_bytes == 0
    assert json.loads((tmp_path / "a" / "run" / "config.json").read_text()) == {**SETTINGS, "limit": 3}
    line = (tmp_path / "a" / "run" / "samples.jsonl").read_text().splitlines()[0]
    assert list(json.loads(line)) == list(SAMPLE_KEYS)


def test_a_sample_is_in_the_file_at_once(tmp_path):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({}, {})
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
        store.begin({}, {})
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
        store.begin({}, {})
        assert store.samples == []


def test_other_settings_are_refused_by_name(tmp_path):
    write(tmp_path, [sample(0)])
    with pytest.raises(ValueError, match="seed is 42 there and 43 here; haystack is 'noise' there and 'essays' here"):
        RunStore(tmp_path, {**SETTINGS, "seed": 43, "haystack": "essays"})
    assert len(read_samples(tmp_path / "samples.jsonl")[0]) == 1
    with RunStore(tmp_path, {**SETTINGS, "seed": 43}, overwrite=True) as store:
        assert len(read_samples(tmp_path / "samples.jsonl")[0]) == 1
        store.begin({}, {})
        assert store.samples == []
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 43


def test_what_is_known_later_is_compared_too(tmp_path):
    def go_on(identity, **options):
        with RunStore(tmp_path, SETTINGS, **options) as store:
            store.settle({"model_identity": identity})
            store.begin({}, {})
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
        store.begin({}, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["samples.jsonl", "results.json", "errors.jsonl"])
def test_files_without_config_are_left_alone(tmp_path, name, overwrite):
    (tmp_path / name).write_text('{"my": "thesis"}')
    with pytest.raises(ValueError, match=rf"holds {name} but no config\.json .* choose another --output$"):
        RunStore(tmp_path, SETTINGS, overwrite=overwrite)
    assert (tmp_path / name).read_text() == '{"my": "thesis"}'


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000], ids=["cut off", "binary", "deep"])
def test_a_config_that_is_not_json_is_left_alone(tmp_path, content, overwrite):
    write(tmp_path, [sample(0)])
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        RunStore(tmp_path, SETTINGS, overwrite=overwrite)
    assert (tmp_path / "config.json").read_bytes() == content


@pytest.mark.parametrize("name", ["config.json", "samples.jsonl"])
def test_a_directory_in_the_place_of_a_file(tmp_path, name):
    write(tmp_path, [])
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=rf"{name} is not a file"):
        RunStore(tmp_path, SETTINGS, overwrite=True)


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


def test_a_directory_where_nothing_was_begun_is_gone_again(tmp_path):
    with RunStore(tmp_path / "runs" / "a", SETTINGS):
        assert (tmp_path / "runs" / "a").is_dir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    with RunStore(tmp_path / "runs" / "a", SETTINGS), RunStore(tmp_path / "runs" / "b", SETTINGS) as store:
        store.begin({}, {})
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]
    (tmp_path / "samples.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="holds samples"):
        RunStore(tmp_path, SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "samples.jsonl"]


def test_errors_are_those_of_the_last_run(tmp_path):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({}, {})
        store.add_error({"task": "niah_single_1", "error": "out of memory"})
        store.add_error({"task": "niah_single_2", "error": "out of memory"})
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 2
    write(tmp_path, [])
    assert not (tmp_path / "errors.jsonl").exists()


def test_results_are_written_whole(tmp_path):
    with RunStore(tmp_path, SETTINGS) as store:
        store.begin({"limit": 1}, {"python": "3"})
        path = store.write_results([{"score": 1.0}])
    assert json.loads(path.read_text()) == {
        "config": {**SETTINGS, "limit": 1},
        "environment": {"python": "3"},
        "rows": [{"score": 1.0}],
    }
    assert not list(tmp_path.glob("*.partial"))


class TestEnvironments:
    """The environment is that of the first sample; others that made samples come after it."""

    @staticmethod
    def go_on(folder, environment, *, new):
        with RunStore(folder, SETTINGS) as store:
            store.begin({}, environment)
            for _ in range(new):
                store.add(sample(len(store.samples)))
            results = json.loads(store.write_results([]).read_text())
        return results["environment"], results.get("later_environments")

    def test_another_one_counts_when_it_makes_a_sample(self, tmp_path):
        one, again, other = ({"command": c, "git": g} for c, g in (("a", "1"), ("b", "1"), ("c", "2")))
        assert self.go_on(tmp_path, one, new=2) == (one, None)
        assert self.go_on(tmp_path, other, new=0) == (one, None)
        assert self.go_on(tmp_path, again, new=1) == (one, None)
        assert self.go_on(tmp_path, other, new=1) == (one, [other])
        assert self.go_on(tmp_path, one, new=1) == (one, [other])

    def test_it_is_kept_with_the_first_sample(self, tmp_path):
        with RunStore(tmp_path, SETTINGS) as store:
            store.begin({}, {"git": "1"})
            store.add(sample(0))
        assert self.go_on(tmp_path, {"git": "2"}, new=0) == ({"git": "1"}, None)

    def test_a_run_from_before_keeps_that_of_its_results(self, tmp_path):
        self.go_on(tmp_path, {"git": "1"}, new=1)
        (tmp_path / "environments.json").unlink()
        assert self.go_on(tmp_path, {"git": "2"}, new=1) == ({"git": "1"}, [{"git": "2"}])

    def test_overwrite_forgets_it(self, tmp_path):
        self.go_on(tmp_path, {"git": "1"}, new=1)
        with RunStore(tmp_path, SETTINGS, overwrite=True) as store:
            store.begin({}, {"git": "2"})
            store.add(sample(0))
            assert store.environments == [{"git": "2"}]

    def test_a_damaged_file_is_named(self, tmp_path):
        self.go_on(tmp_path, {"git": "1"}, new=1)
        (tmp_path / "environments.json").write_text("{")
        with pytest.raises(ValueError, match=r"environments\.json is damaged"):
            self.go_on(tmp_path, {"git": "1"}, new=0)


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
        store.begin({}, {})
        store.add(sample(0))
    path = tmp_path / "samples.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a sample"):
        read_samples(path)
