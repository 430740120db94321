from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import asdict

import pytest

from locks_hf.eval.__main__ import main
from locks_hf.eval.arms import Arm
from locks_hf.eval.plot import plot_scores
from locks_hf.eval.report import average_tasks, make_rows, make_tables, read_rows

LOCKS = [Arm("locks", 8, 4, True, budget) for budget in (64, 128)]
ARMS = [Arm("full"), *LOCKS]
SCORES = {"niah_single_1": [100.0, 0.0, 100.0, 100.0], "niah_multivalue": [25.0, 50.0, 75.0, 50.0]}


def samples(arms=ARMS, lengths=(512, 1024), scores=SCORES, tokens=64.0):
    return [
        {
            "task": task,
            "length": length,
            "index": index,
            **asdict(arm),
            "prediction": "",
            "references": ["1"],
            "score": score,
            "tokens_attended": tokens,
            "bytes_read_per_step": None if tokens is None else 2048.0 * (index + 1),
        }
        for arm in arms
        for length in lengths
        for task, values in scores.items()
        for index, score in enumerate(values)
    ]


def test_rows_average_samples():
    rows = make_rows(samples())
    assert len(rows) == 3 * 2 * 2
    assert rows[0] == {
        "benchmark": "ruler",
        "task": "niah_single_1",
        "length": 512,
        "selector": "full",
        "rank": None,
        "basis_bits": None,
        "refit": None,
        "budget": None,
        "n": 4,
        "score": 75.0,
        "stderr": pytest.approx(50.0 / math.sqrt(4)),
        "tokens_attended": 64.0,
        "bytes_read_per_step": 5120.0,
    }


def test_rows_do_not_depend_on_the_order_of_the_samples():
    shuffled = samples()
    random.Random(0).shuffle(shuffled)
    assert json.dumps(make_rows(shuffled)) == json.dumps(make_rows(samples()))


def test_one_sample_has_no_standard_error():
    (row,) = make_rows(samples([Arm("full")], [512], {"niah_single_1": [100.0]}))
    assert (row["n"], row["score"], row["stderr"]) == (1, 100.0, None)


def test_samples_without_a_decode_step():
    (row,) = make_rows(samples([Arm("full")], [512], {"niah_single_1": [0.0, 0.0]}, tokens=None))
    assert row["tokens_attended"] is None
    assert row["bytes_read_per_step"] is None
    assert make_tables([row]).splitlines()[-1].endswith("| 0.0 ±0.0 |           - |        - |")


def test_average_over_tasks():
    rows = [row for row in make_rows(samples()) if row["length"] == 512 and row["selector"] == "full"]
    mean, stderr = average_tasks(rows, list(SCORES))
    assert mean == pytest.approx((75 + 50) / 2)
    assert stderr == pytest.approx(math.hypot(*(row["stderr"] for row in rows)) / 2)
    assert average_tasks(rows, [*SCORES, "niah_single_2"]) is None
    assert average_tasks([{**rows[0], "stderr": None}], ["niah_single_1"]) == (75.0, None)


def test_tables():
    text = make_tables(make_rows(samples(lengths=[512])))
    first, second = text.split("\n\n**")
    assert first.splitlines() == [
        "**RULER, length 512, budget 64, 4 records a cell, percent ± stderr**",
        "",
        "| selector         |         S1 |         MV |        Avg | tokens/step | KiB/step |",
        "| :--------------- | ---------: | ---------: | ---------: | ----------: | -------: |",
        "| full             | 75.0 ±25.0 | 50.0 ±10.2 | 62.5 ±13.5 |          64 |        5 |",
        "| locks r8i4 refit | 75.0 ±25.0 | 50.0 ±10.2 | 62.5 ±13.5 |          64 |        5 |",
    ]
    assert second.startswith("RULER, length 512, budget 128, 4 records")
    assert len(make_tables(make_rows(samples())).split("**RULER")) == 5


def test_tables_of_an_unfinished_run():
    unfinished = samples([Arm("full")], [512]) + samples(LOCKS[:1], [512], {"niah_single_1": [100.0, 0.0]})
    text = make_tables(make_rows(unfinished))
    assert "2 to 4 records a cell" in text
    assert "| locks r8i4 refit | 50.0 ±50.0 |          - |          - |" in text


def test_table_without_budgets():
    assert "**RULER, length 512, 4 records" in make_tables(make_rows(samples([Arm("full")], [512])))


@pytest.fixture
def run(tmp_path):
    lines = [json.dumps(one) + "\n" for one in samples()]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    return tmp_path


def test_report_command(run, capsys):
    assert main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == make_tables(make_rows(samples())) + "\n"
    assert err == ""


def test_report_reads_results_where_samples_were_not_kept(run, capsys):
    rows = make_rows(samples())
    (run / "results.json").write_text(json.dumps({"config": {}, "environment": {}, "rows": rows}))
    (run / "samples.jsonl").unlink()
    assert read_rows(run) == rows


def test_report_ignores_an_unfinished_line(run):
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"task": "niah')
    assert read_rows(run) == make_rows(samples())


@pytest.mark.parametrize("command", ["report", "plot"])
def test_nothing_to_show(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "holds neither samples.jsonl nor results.json" in capsys.readouterr().err
    (tmp_path / "results.json").write_text("[]")
    assert main([command, str(tmp_path)]) == 2
    assert "is not a file of a run: it holds no JSON object" in capsys.readouterr().err
    (tmp_path / "samples.jsonl").write_text("")
    assert main([command, str(tmp_path)]) == 2
    assert "no finished records" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "plot"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "results.json is not JSON"),
        ("[" * 100_000, "results.json is not JSON"),
        ('{"rows": {}}', "results.json is not the results file of a run: it has no list of rows"),
        ('{"rows": [1]}', "results.json is no object: 1"),
        ('{"rows": [{"task": "x"}]}', "results.json has no length"),
        (json.dumps({"rows": [make_rows(samples())[0], {**make_rows(samples())[0], "score": "x"}]}), "'x' for score"),
    ],
)
def test_results_that_are_not_those_of_a_run(tmp_path, capsys, command, content, message):
    (tmp_path / "results.json").write_text(content)
    assert main([command, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize("name", [None, "scores.svg"])
def test_plot_command(run, capsys, name):
    pytest.importorskip("matplotlib")
    options = [] if name is None else ["--output", str(run / name)]
    assert main(["plot", str(run), *options]) == 0
    path = run / (name or "plot.png")
    assert capsys.readouterr().out == f"{path}\n"
    assert path.stat().st_size > 5000


def test_plot_draws_lines_bands_and_the_dense_score(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    rows = make_rows(samples() + samples([Arm("quest", budget=64)], [512], {"niah_single_1": [0.0]}))
    plot_scores(rows, tmp_path / "plot.png")
    panels = kept[0].axes
    assert [panel.get_title() for panel in panels] == ["RULER, 512 tokens, 2 tasks", "RULER, 1024 tokens, 2 tasks"]
    # Quest lacks a task, so that it has no average and no line.
    assert [line.get_label() for line in panels[0].get_lines()] == ["full", "locks r8i4 refit"]
    full, locks = panels[0].get_lines()
    assert list(full.get_ydata()) == [62.5, 62.5]
    assert (list(locks.get_xdata()), list(locks.get_ydata())) == ([64, 128], [62.5, 62.5])
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["64", "128"]


def test_nothing_to_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows = make_rows(
        samples([Arm("full")], [512], {"niah_single_1": [1.0]}) + samples(LOCKS[:1], [512], {"niah_multivalue": [1.0]})
    )
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    assert main(["plot", str(tmp_path)]) == 2
    assert "there is nothing to plot" in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_plot_without_matplotlib(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(run)]) == 2
    assert "pip install 'matplotlib>=3.9'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere/plot.png", "plot.docx"])
def test_plot_that_cannot_be_written(run, capsys, name):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(run), "--output", str(run / name)]) == 2
    assert "error: " in capsys.readouterr().err


def test_several_runs_in_one_table(run, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    rows = read_rows(run)
    (other / "results.json").write_text(json.dumps({"rows": [{**row, "length": row["length"] + 9000} for row in rows]}))
    assert main(["report", str(run), str(other)]) == 0
    assert "length 9512" in capsys.readouterr().out
    assert main(["report", str(run), str(run)]) == 0  # the same directory twice is one run
    (other / "results.json").write_text(json.dumps({"rows": rows}))
    assert main(["report", str(run), str(other)]) == 2
    assert "show them one at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_identity": "two"}, "model_identity is 'one' in the first and 'two' in the second"),
        ({"dtype": "float32"}, "dtype is 'bfloat16' in the first and 'float32' in the second"),
        ({"seed": 7}, "seed is 42 in the first and 7 in the second"),
        ({"haystack": "noise"}, "haystack is 'essays' in the first"),
        ({"chat_template": "chat"}, "chat_template is 'none' in the first"),
        ({"model": "/elsewhere/tiny"}, None),  # another path to the same weights
        ({"model": "other", "model_identity": None}, "model is 'tiny' in the first and 'other' in the second"),
        ({"model_identity": None}, None),
        ({"batch_size": 8, "limit": 3, "lengths": [9512], "tasks": ["niah_single_1"], "arms": []}, None),
    ],
)
@pytest.mark.parametrize("kept", ["config.json", "results.json"])
def test_runs_of_other_settings_are_not_shown_together(tmp_path, capsys, kept, changes, message):
    config = {"model": "tiny", "model_identity": "one", "dtype": "bfloat16", "seed": 42, "haystack": "essays"}
    config |= {"chat_template": "none", "batch_size": 1, "limit": 4, "lengths": [512], "tasks": list(SCORES)}
    here = {name: value for name, value in {**config, **changes}.items() if value is not None}
    for name, settings, length in (("a", config, 512), ("b", here, 9512)):
        folder = tmp_path / name
        folder.mkdir()
        in_config = kept == "config.json"
        rows = make_rows(samples(lengths=[length]))
        (folder / "results.json").write_text(json.dumps({"config": 0 if in_config else settings, "rows": rows}))
        if in_config:
            (folder / "config.json").write_text(json.dumps(settings))
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == (2 if message else 0)
    if message:
        assert f"cannot be shown together: {message}" in capsys.readouterr().err


def test_one_record_a_cell():
    assert "4 records a cell" in make_tables(make_rows(samples(lengths=[512])))
    assert "1 record a cell" in make_tables(make_rows(samples(lengths=[512], scores={"niah_single_1": [0.0]})))
