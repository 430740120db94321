from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from transformers import LlamaForCausalLM

from locks_hf.eval.__main__ import main, restart_with_patient_threads
from locks_hf.eval.ruler import TASKS, command
from locks_hf.eval.store import SAMPLE_KEYS, read_samples

ROW_KEYS = [
    *("benchmark", "task", "length", "selector", "rank", "basis_bits", "refit", "budget"),
    *("n", "score", "stderr", "tokens_attended", "bytes_read_per_step"),
]


@pytest.fixture
def arguments(tiny_model, text_file, tmp_path):
    """A small run on the tiny model; later options win."""
    return [
        *("ruler", "--model", str(tiny_model), "--device", "cpu", "--haystack", str(text_file)),
        *("--tasks", "niah_single_1", "niah_multivalue", "--lengths", "500", "--limit", "2", "--budget", "64"),
        *("--max-new-tokens", "8", "--output", str(tmp_path / "run")),
    ]


def rows_of(folder):
    return json.loads((folder / "results.json").read_text())["rows"]


def test_a_whole_run(arguments, tmp_path, capsys):
    assert main([*arguments, "--lengths", "500", "600", "--selector", "full", "oracle", "locks", "quest"]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "run"
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == {"config", "environment", "rows"}
    assert len(results["rows"]) == 2 * 2 * 4
    assert all(list(row) == ROW_KEYS and row["n"] == 2 for row in results["rows"])
    assert results["config"] == json.loads((folder / "config.json").read_text())
    assert results["config"]["dtype"] == "float32"
    assert results["environment"]["command"].startswith("python -m locks_hf.eval ruler --model")
    assert results["environment"]["packages"]["torch"]
    samples, _ = read_samples(folder / "samples.jsonl")
    assert len(samples) == 2 * 2 * 2 * 4
    assert set(samples[0]) == set(SAMPLE_KEYS)
    for one in samples:
        if one["selector"] == "full":
            assert one["budget"] is one["rank"] is None
            assert one["tokens_attended"] is None or one["tokens_attended"] > 300
        else:
            assert one["budget"] == 64
            assert one["tokens_attended"] is None or one["tokens_attended"] <= 128
    assert len({tuple(one["references"]) for one in samples}) == 2 * 2 * 2
    assert out.count("**RULER, length ") == 2
    assert "| locks r8i4 refit |" in out
    assert f"output: {folder}" in err
    assert "sample" not in out


def test_going_on_and_adding_arms(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    before = (tmp_path / "run" / "samples.jsonl").read_bytes()
    assert main(arguments) == 0
    assert (tmp_path / "run" / "samples.jsonl").read_bytes() == before
    assert main([*arguments, "--limit", "3", "--rank", "4", "2", "--refit", "on", "off"]) == 0
    assert (tmp_path / "run" / "samples.jsonl").read_bytes().startswith(before)
    rows = rows_of(tmp_path / "run")
    counts = {(row["rank"], row["refit"]): row["n"] for row in rows}
    assert counts == {
        **{(rank, refit): 3 for rank in (4, 2) for refit in (True, False)},
        (None, None): 3,
        (8, True): 2,
    }


def test_an_interrupted_run_ends_like_an_uninterrupted_one(arguments, tmp_path):
    whole = [*arguments, "--output", str(tmp_path / "whole"), "--batch-size", "3"]
    assert main(whole) == 0
    assert main([*arguments, "--batch-size", "3"]) == 0
    path = tmp_path / "run" / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    (tmp_path / "run" / "results.json").unlink()
    assert main([*arguments, "--batch-size", "3"]) == 0
    assert json.dumps(rows_of(tmp_path / "run")) == json.dumps(rows_of(tmp_path / "whole"))
    assert path.read_bytes() == (tmp_path / "whole" / "samples.jsonl").read_bytes()


def test_other_settings_need_overwrite(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    assert main([*arguments, "--seed", "7", "--max-new-tokens", "9"]) == 2
    assert "seed is 42 there and 7 here; max_new_tokens is 8 there and 9 here" in capsys.readouterr().err
    assert main([*arguments, "--seed", "7", "--overwrite"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 7
    assert len(read_samples(tmp_path / "run" / "samples.jsonl")[0]) == 2 * 2 * 2


def test_another_model_at_the_same_path(arguments, tiny_model, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    arguments = [*arguments, "--model", str(folder)]
    assert main(arguments) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model_identity"].startswith("directory sha256:")
    model = LlamaForCausalLM.from_pretrained(folder)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    model.save_pretrained(folder)
    assert main([*arguments, "--limit", "3"]) == 2
    assert f"model_identity is '{config['model_identity']}' there and 'directory sha256:" in capsys.readouterr().err
    del config["model_identity"]  # as a run from before the field existed
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert main(arguments) == 0
    assert main([*arguments, "--overwrite"]) == 0


def test_a_failed_start_keeps_what_is_to_be_overwritten(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    assert main([*arguments, "--lengths", "2000", "--overwrite"]) == 2
    assert len(read_samples(tmp_path / "run" / "samples.jsonl")[0]) == 2 * 2 * 2


def test_the_default_directory_is_named_after_the_settings(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [*arguments[: arguments.index("--output")], "--limit", "1"]
    assert main(arguments) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("ruler-")
    assert f"output: runs/{folder.name}" in capsys.readouterr().err
    assert main([*arguments, "--budget", "96"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert main([*arguments, "--seed", "1"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_chat_template(arguments, tmp_path):
    assert main([*arguments, "--chat-template", "chat", "--limit", "1"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["chat_template"] == "chat"


def test_defaults_without_a_gpu_are_said(arguments, capsys, monkeypatch):
    def stop(*args, **kwargs):
        raise ValueError("stop here")

    monkeypatch.setattr(command, "load", stop)
    assert main([*arguments[: arguments.index("--lengths")], *arguments[arguments.index("--budget") :]]) == 2
    line = "without a GPU the defaults are reduced to --lengths 2048 --limit 2, from --lengths 4096 --limit 50"
    assert line in capsys.readouterr().err
    assert main([*arguments[: arguments.index("--limit")], *arguments[arguments.index("--limit") + 2 :]]) == 2
    assert "the defaults are reduced to --limit 2, from --limit 50\n" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "without a GPU" not in capsys.readouterr().err


def test_a_budget_that_covers_the_prompts_is_said(arguments, capsys, monkeypatch):
    def stop(*args, **kwargs):
        raise ValueError("stop here")

    monkeypatch.setattr(command, "load", stop)
    assert main([*arguments, "--lengths", "500", "600", "--budget", "64", "700", "593"]) == 2
    line = "--budget 593 700: records of 600 tokens fit, so that all steps with it are dense; a smaller budget"
    assert line in capsys.readouterr().err  # 593 is 608 in whole pages
    assert main([*arguments, "--lengths", "500", "600", "--budget", "585", "592"]) == 2
    assert "--budget 585: as many whole pages as a larger budget, so not run apart" in capsys.readouterr().err
    assert main([*arguments, "--lengths", "500", "600", "--budget", "592"]) == 2
    assert "are dense" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "niah_single_9"], f"unknown task 'niah_single_9'; there are: {', '.join(TASKS)}"),
        (["--selector", "best"], "unknown selector 'best'; there are: full, locks, oracle, quest"),
        (["--budget", "16"], "budget must be at least two pages = 32 tokens"),
        (["--rank", "0"], "rank must be from 1"),
        (["--basis-bits", "5"], "basis_bits must be one of"),
        (["--lengths", "500", "-3"], "--lengths must be at least 1, got -3"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be 'auto' or a whole number from 1, got '0'"),
        (["--batch-size", "many"], "got 'many'"),
        (["--haystack", "no/such/file.txt"], "cannot read the haystack 'no/such/file.txt'"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--output", os.devnull], "cannot write to the output directory"),
    ],
)
def test_bad_options_before_the_model_is_loaded(arguments, capsys, monkeypatch, options, message):
    monkeypatch.setattr(command, "load", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    assert main([*arguments, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "500", "2000"], "--lengths 2000 is beyond the window of"),
        (["--lengths", "60"], "niah_single_1 does not fit a length of 60 tokens"),
        (["--model", "./no-such-model"], "no-such-model"),
    ],
)
def test_bad_options_that_need_the_model(arguments, capsys, options, message):
    assert main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--dtype", "int8"], ["--refit", "maybe"], ["--budget", "x"], ["--refit", "--no-refit"]]
)
def test_options_that_do_not_parse(arguments, capsys, options):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, *options])
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "refits"),
    [([], [True]), (["--refit"], [True]), (["--no-refit"], [False]), (["--refit", "on", "off"], [True, False])],
)
def test_refit_options(arguments, tmp_path, monkeypatch, options, refits):
    def stop(*args, **kwargs):
        raise ValueError("stop here")

    seen = []
    make_arms = command.make_arms
    monkeypatch.setattr(command, "make_arms", lambda *values: seen.append(values[-1]) or make_arms(*values))
    monkeypatch.setattr(command, "load", stop)
    assert main([*arguments, *options]) == 2
    assert seen == [refits]


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_process_loses_nothing(arguments, tmp_path, kind):
    arguments = [*arguments, "--limit", "40", "--max-new-tokens", "64", "--lengths", "600"]
    path = tmp_path / "run" / "samples.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "locks_hf.eval", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in a shell's background inherits an ignored SIGINT, and would pass that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while not (path.exists() and path.read_bytes().count(b"\n") >= 5) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(kind)
    out, err = process.communicate(timeout=60)
    kept, _ = read_samples(path)
    assert 5 <= len(kept) < 160
    assert out == ""
    if kind == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert f"interrupted: {len(kept)} samples are kept" in err
    assert not (tmp_path / "run" / "results.json").exists()


def test_cpu_threads_wait_patiently(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append((*command, os.environ.get("OMP_WAIT_POLICY"))))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-W", "ignore", "-m", "locks_hf.eval", "ruler"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that what the function sets is undone as well
    monkeypatch.delenv("OMP_WAIT_POLICY")
    restart_with_patient_threads()
    assert started == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    restart_with_patient_threads()
    command = [sys.executable, "-W", "ignore", "-m", "locks_hf.eval", "ruler"]
    assert started == [(sys.executable, command, "PASSIVE")]
    restart_with_patient_threads()
    assert len(started) == 1


@pytest.mark.slow
def test_the_default_model_finds_the_needle(tmp_path):
    arguments = ["ruler", "--tasks", "niah_single_1", "--lengths", "1024", "--limit", "1", "--max-new-tokens", "16"]
    assert main([*arguments, "--budget", "128", "--output", str(tmp_path)]) == 0
    full, locks = rows_of(tmp_path)
    assert (full["selector"], full["score"]) == ("full", 100.0)
    assert (locks["selector"], locks["score"]) == ("locks", 100.0)
    assert full["tokens_attended"] > 900
    assert locks["tokens_attended"] <= 128
