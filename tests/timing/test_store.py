import json

import pytest

from locks_hf.timing.store import CellStore, read_cells

SETTINGS = {"timing": "decode", "measurement": True, "shape": {"name": "tiny"}, "seed": 0}
ENVIRONMENT = {"command": "first", "device": "gpu"}


def cell(arm="none", status="ok", **values):
    return {"cell": {"context": 16, "batch": 1, "arm": arm}, "status": status, **values}


def write(folder, *cells, settings=SETTINGS, environment=ENVIRONMENT, **options):
    with CellStore(folder, settings, **options) as store:
        store.begin({"arms": ["none"]}, environment)
        for one in cells:
            store.add(one)
        store.finish()


def test_cells_are_in_the_file_at_once_and_come_back(tmp_path):
    with CellStore(tmp_path / "run", SETTINGS) as store:
        store.begin({"arms": ["none"]}, ENVIRONMENT)
        store.add(cell(ms_mean=1.5))
        assert read_cells(tmp_path / "run" / "cells.jsonl")[0] == [cell(ms_mean=1.5, environment=0)]
    assert not (tmp_path / "run" / "results.json").exists()
    with CellStore(tmp_path / "run", SETTINGS) as store:
        assert store.has(cell()["cell"]) and not store.has(cell("fa3")["cell"])


def test_failed_cells_are_kept_unless_they_are_to_be_retried(tmp_path):
    write(tmp_path, cell(), cell("fa3", "absent", reason="not installed"), cell("flash", "error", reason="no"))
    with CellStore(tmp_path, SETTINGS) as store:
        assert all(store.has(cell(arm)["cell"]) for arm in ("none", "fa3", "flash"))
    with CellStore(tmp_path, SETTINGS, retry=True) as store:
        assert [store.has(cell(arm)["cell"]) for arm in ("none", "fa3", "flash")] == [True, False, False]
    write(tmp_path, cell("flash", ms_mean=2.0), retry=True)
    cells, _ = read_cells(tmp_path / "cells.jsonl")
    assert {one["cell"]["arm"]: one["status"] for one in cells} == {"none": "ok", "fa3": "absent", "flash": "ok"}


def test_results_name_what_is_absent_and_how_to_repeat_the_run(tmp_path):
    write(tmp_path, cell(ms_mean=1.0), cell("fa3", "absent", reason="not installed"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["absent"] == {"fa3": "not installed"}
    assert results["command"] == "first" and results["measurement"] is True
    assert results["settings"] == {**SETTINGS, "arms": ["none"]}
    assert [one["cell"]["arm"] for one in results["cells"]] == ["none", "fa3"]


def test_each_cell_names_the_environment_it_was_measured_in(tmp_path):
    write(tmp_path, cell())
    write(tmp_path, cell("flash"), environment={"command": "again", "device": "gpu"})
    write(tmp_path, cell("math"), environment={"command": "first", "device": "gpu", "driver": "2"})
    cells, _ = read_cells(tmp_path / "cells.jsonl")
    assert [one["environment"] for one in cells] == [0, 0, 1]
    assert len(json.loads((tmp_path / "environments.json").read_text())) == 2


def test_an_unfinished_line_is_removed(tmp_path):
    write(tmp_path, cell(), cell("flash"))
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    write(tmp_path, cell("math"))
    assert [one["cell"]["arm"] for one in read_cells(path)[0]] == ["none", "math"]


@pytest.mark.parametrize("line", ["{]", "3", "{}", '{"cell": {}, "status": "good"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    write(tmp_path, cell())
    with open(tmp_path / "cells.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*cells.jsonl is not a cell"):
        CellStore(tmp_path, SETTINGS)
    write(tmp_path, overwrite=True)


def test_runs_with_other_settings_are_refused(tmp_path):
    write(tmp_path, cell())
    with pytest.raises(ValueError, match="run with other settings: seed is 0 there and 1 here"):
        CellStore(tmp_path, {**SETTINGS, "seed": 1})
    write(tmp_path, cell("flash"), settings={**SETTINGS, "seed": 1}, overwrite=True)
    assert [one["cell"]["arm"] for one in read_cells(tmp_path / "cells.jsonl")[0]] == ["flash"]


@pytest.mark.parametrize(
    ("files", "message"),
    (
        ({"cells.jsonl": ""}, "but no config.json to tell what made them"),
        ({"config.json": '{"benchmark": "ruler"}'}, "that no timing run wrote"),
        ({"config.json": "{"}, "is not JSON"),
    ),
)
def test_other_peoples_files_are_left_alone(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            CellStore(tmp_path, SETTINGS, overwrite=overwrite)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != ".lock"} == files


def test_two_runs_in_one_directory_are_refused(tmp_path):
    with CellStore(tmp_path, SETTINGS), pytest.raises(ValueError, match="another run is writing"):
        CellStore(tmp_path, SETTINGS)


def test_a_refused_command_leaves_no_directory(tmp_path):
    with CellStore(tmp_path / "run", SETTINGS):
        pass
    assert not (tmp_path / "run").exists()
