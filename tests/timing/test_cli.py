"""Every subcommand end to end on the CPU, with the tiny shape. No time is ever asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from locks_hf import linears
from locks_hf.timing import arms, decode, fill, run
from locks_hf.timing.__main__ import main
from locks_hf.timing.harness import Compiler, many_arms
from locks_hf.timing.run import NOT_A_MEASUREMENT, show_tokens, tokens
from locks_hf.timing.store import read_cells

TINY = ("--shape", "tiny", "--device", "cpu", "--budget", "64")
QUICK = (*TINY, "--step", "eager", "--window", "2", "--windows", "1", "--settle", "0")


def cells_of(folder, **what):
    cells, _ = read_cells(folder / "cells.jsonl")
    return [cell for cell in cells if all(cell["cell"].get(name) == value for name, value in what.items())]


def decode_run(folder, *more, quick=QUICK):
    return main(["decode", *quick, "--output", str(folder), *more])


def test_decode_times_every_arm_at_every_context_and_batch(tmp_path, capsys):
    assert decode_run(tmp_path, "--contexts", "32", "200", "--batch", "1", "3") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"**{NOT_A_MEASUREMENT}**") and NOT_A_MEASUREMENT in err
    cells = cells_of(tmp_path)
    assert len(cells) == 2 * 2 * len(arms.CPU_GROUPS["default"])
    assert {cell["status"] for cell in cells} == {"ok"}
    for cell in cells:
        assert cell["steps"] == 2 and cell["ms_mean"] > 0
        assert cell["tokens_per_s"] == pytest.approx(cell["cell"]["batch"] * 1e3 / cell["ms_mean"])
    dense = {cell["cell"]["context"] for cell in cells if cell.get("dense_step")}
    assert dense == {32}  # within the budget, for the Locks arms alone
    assert "dense step: context within the budget" in out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["measurement"] is False
    assert results["command"].startswith("python -m locks_hf.timing decode --shape tiny")
    assert {"git", "packages", "device", "driver"} <= set(results["environments"][0])


def test_cells_are_profiled_when_all_are_timed_and_keep_their_times(tmp_path, monkeypatch, capsys):
    order, failures = [], [None, AttributeError("no profiler here"), None]
    real = decode.measure
    monkeypatch.setattr(decode, "measure", lambda *rest: (order.append("timed"), real(*rest))[1])

    def profile_steps(session, clock):
        order.append("profiled")
        if failures and (failure := failures.pop(0)):
            raise failure
        return {"span_us": 1.0, "kernels": 1.0, "terms_us": {}, "top": []}

    monkeypatch.setattr(decode, "profile_steps", profile_steps)
    monkeypatch.setattr(decode, "profile_table", lambda cells: "")
    arguments = ("--contexts", "100", "--arms", "none", "math", "locks-r4i4")
    assert decode_run(tmp_path, *arguments) == 0
    before = cells_of(tmp_path)
    monkeypatch.setattr(run, "describe", lambda device, command: {"packages": {}, "device": "another", "command": ""})
    assert decode_run(tmp_path, *arguments, "--profile") == 0
    assert "timed on another machine" in capsys.readouterr().err
    assert cells_of(tmp_path) == before and order == ["timed"] * 3 + ["profiled"] * 3
    monkeypatch.undo()
    monkeypatch.setattr(decode, "profile_steps", profile_steps)
    monkeypatch.setattr(decode, "profile_table", lambda cells: "")
    failures[:] = [None, AttributeError("no profiler here"), None]
    assert decode_run(tmp_path, *arguments, "--profile") == 0
    assert "no profile of math, 100 tokens, batch 1: AttributeError: no profiler here" in capsys.readouterr().err
    known = {cell["cell"]["arm"]: cell for cell in cells_of(tmp_path)}
    assert {arm: "profile" in cell for arm, cell in known.items()} == {"none": True, "math": False, "locks-r4i4": True}
    assert decode_run(tmp_path, *arguments, "--profile") == 0  # what is missing
    known = {cell["cell"]["arm"]: cell for cell in cells_of(tmp_path)}
    for cell in before:
        assert {name: x for name, x in known[cell["cell"]["arm"]].items() if name != "profile"} == cell
        assert known[cell["cell"]["arm"]]["profile"]["kernels"] == 1.0
    assert len(order) == 3 + 3 + 3 + 1


@pytest.mark.parametrize("command", ["decode", "longgen", "generate"])
def test_linear_layers_may_be_fast_in_every_arm(tmp_path, monkeypatch, command):
    fast = []
    real = linears.linear
    monkeypatch.setattr(linears, "linear", lambda *args: (fast.append(1), real(*args))[1])
    more = {
        "decode": ("--contexts", "100", "--arms", "none", "math", "locks-r4i4", "dynamic"),
        "longgen": ("--prompt", "64", "--new", "12", "--arms", "math", "locks-r4i4"),
        "generate": ("--contexts", "100", "--new", "6", "--skip", "2"),
    }[command]
    quick = TINY if command == "generate" else (*TINY, "--step", "eager")
    for linear in ("torch", "fast"):
        folder = tmp_path / linear
        assert main([command, *quick, "--output", str(folder), "--linear", linear, *more]) == 0
        assert bool(fast) is (linear == "fast")
        assert {cell["status"] for cell in cells_of(folder)} == {"ok"}


def test_an_interrupted_sweep_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    real, measured = decode.measure, []

    def measure(session, *rest):
        measured.append(session)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return real(session, *rest)

    monkeypatch.setattr(decode, "measure", measure)
    assert decode_run(tmp_path, "--contexts", "100") == 130
    assert len(cells_of(tmp_path)) == 2 and not (tmp_path / "results.json").exists()
    assert decode_run(tmp_path, "--contexts", "100", "200") == 0
    assert len(cells_of(tmp_path)) == 2 * len(arms.CPU_GROUPS["default"])
    assert len(measured) == 3 + 2 * len(arms.CPU_GROUPS["default"]) - 2
    before = len(measured)
    monkeypatch.setattr(run, "make_model", None)  # nothing is missing: not even a model is made
    assert decode_run(tmp_path, "--contexts", "100", "200") == 0
    assert len(measured) == before


def test_one_compilation_serves_the_held_arms_and_one_each_the_locks_arms(tmp_path, monkeypatch):
    compilers = []

    class Counted(Compiler):
        def __init__(self, *args):
            super().__init__(*args)
            compilers.append(self)

    monkeypatch.setattr(run, "Compiler", Counted)
    torch._dynamo.reset()
    compiled = [word if word != "eager" else "compiled" for word in QUICK]
    more = ("--contexts", "100", "333", "--arms", "none", "math", "flash", "quest", "locks-r4i4", "locks-r8i4")
    assert decode_run(tmp_path, *more, quick=compiled) == 0
    assert {cell["status"] for cell in cells_of(tmp_path)} == {"ok"}
    assert compilers[0].traces == 3
    torch._dynamo.reset()


def test_compiled_and_eager_steps_give_the_same_tokens(tiny, tiny_shape):
    from locks_hf.timing.clock import CpuClock
    from locks_hf.timing.harness import Protocol

    clock, found = CpuClock(torch.device("cpu")), {}
    torch._dynamo.reset()
    with many_arms():
        for kind in ("eager", "compiled"):
            compiler = Compiler(kind, "default", clock.device)
            protocol = Protocol(steps=8)
            bench = arms.Bench(tiny_shape, tiny, clock, compiler, protocol, torch.float32, budget=64)
            for name in ("math", "quest", "locks-r4i4", "dynamic"):
                arm = arms.parse_arm(name)
                shared = arms.HeldContext(bench, 150, 2)
                with arms.open_session(bench, arm, 150, 2, shared) as session:
                    logits = []
                    for _ in range(2):  # a rewound session does the same again
                        for _ in range(6):
                            session.step()
                        logits.append(session.logits().clone())
                        session.rewind()
                    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
                    found[kind, name] = logits[0]
    torch._dynamo.reset()
    for name in ("math", "quest", "locks-r4i4", "dynamic"):
        torch.testing.assert_close(found["compiled", name], found["eager", name], rtol=1e-3, atol=1e-3)


def test_contexts_can_be_filled_by_a_real_prefill(tmp_path):
    more = ("--contexts", "100", "--fill", "prefill", "--chunk", "32", "--arms", "math", "locks-r4i4", "dynamic")
    assert decode_run(tmp_path, *more) == 0
    assert {cell["status"] for cell in cells_of(tmp_path)} == {"ok"}


def test_what_transformers_does_by_default_is_timed_beside(tmp_path):
    assert decode_run(tmp_path, "--contexts", "100", "--arms", "math", "dynamic", "static") == 0
    for cell in cells_of(tmp_path):
        assert cell["status"] == "ok"
        assert ("not in the harness's graph" in cell.get("note", "")) == (cell["cell"]["arm"] != "math")


def test_prefill_tells_the_build_apart(tmp_path, capsys):
    command = ["prefill", *TINY, "--contexts", "100", "37", "--repeats", "2", "--output", str(tmp_path)]
    assert main(command) == 0
    assert main([*command, "--chunk", "40"]) == 0
    for chunk in (None, 40):
        assert len(cells_of(tmp_path, chunk=chunk)) == 8
    for cell in cells_of(tmp_path):
        assert cell["status"] == "ok" and len(cell["ttft_s"]) == 2
        builds = cell["cell"]["arm"].startswith("locks-r")
        assert ("build_ms" in cell) == builds
        assert not builds or 0 < cell["build_ms_mean"] < 1e3 * cell["ttft_s_mean"]
    assert "TTFT against no build" in capsys.readouterr().out


def test_longgen_grows_the_cache_and_counts_every_token(tmp_path):
    command = ["longgen", *TINY, "--step", "eager", "--prompt", "60", "--new", "1015", "--bucket", "400"]
    command += ["--arms", "math", "locks-r4i4"]
    assert main([*command, "--output", str(tmp_path)]) == 0
    cells = {cell["cell"]["arm"]: cell for cell in cells_of(tmp_path)}
    assert set(cells) == {"math", "locks-r4i4"}
    for name, cell in cells.items():
        assert cell["status"] == "ok" and len(cell["itl_ms"]) == 102  # the last interval has five tokens
        assert cell["captures"] == (2 if name.startswith("locks") else 3)
        assert cell["growths"] == (1 if name.startswith("locks") else 0)
        assert cell["itl_ms_mean"] == pytest.approx(1e3 * cell["wall_s"] / 1015)


def test_kernels_times_every_op_beside_the_ceiling(tmp_path, capsys):
    command = ["kernels", *TINY, "--contexts", "512", "--batch", "1", "2", "--repeats", "2", "--output", str(tmp_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert {cell["cell"]["op"] for cell in cells_of(tmp_path)} == {
        *("read", "copy", "summarize", "score", "select", "attend", "step", "linear")
    }
    assert {cell["status"] for cell in cells_of(tmp_path)} == {"ok"}
    score = cells_of(tmp_path, op="score", arm="locks-r4i4", batch=2)[0]
    # 32 pages of 2 KV heads and 2 rows at r4i4 and head_dim 16, and 4 bytes for each of 4 query heads.
    per_page = 4 * 8 + 16 * 4 + 16 + 2 * (16 + 1 + 4)
    assert score["bytes"] == 2 * 2 * 32 * per_page + 4 * 2 * 4 * 32
    assert score["gb_per_s"] == pytest.approx(score["bytes"] / score["us_mean"] / 1e3)
    # Of 3 layers: queries, keys, values and outputs, gate and up, down; then the head.
    torch_linear, fast_linear = cells_of(tmp_path, op="linear", batch=1)
    sizes = 3 * (64 * (64 + 32 + 32 + 64) + 64 * 192 + 96 * 64) + 64 * 128
    assert torch_linear["bytes"] == fast_linear["bytes"] == 4 * sizes
    attend = cells_of(tmp_path, op="attend", arm="locks-r4i4", batch=1)[0]
    assert attend["bytes"] == 2 * 64 * 2 * 16 * 4  # KV heads, budget, keys and values, channels, fp32
    assert "of read ceiling" in out


def test_generate_itself_is_timed_with_its_start_apart(tmp_path, capsys):
    command = ["generate", *TINY, "--contexts", "200", "--new", "12", "--skip", "4", "--output", str(tmp_path)]
    assert main(command) == 0
    compiled, recorded, dynamic = cells_of(tmp_path)
    assert [cell["cell"]["how"] for cell in (compiled, recorded, dynamic)] == ["compile", "graphs", "eager"]
    for cell in (compiled, recorded):
        assert (cell["sparse_steps"], cell["dense_steps"]) == (12, 0)
    for cell in (compiled, recorded, dynamic):
        assert cell["status"] == "ok" and cell["ms_per_token"] > 0 and cell["first_token_s"] > 0
    assert "against DynamicCache" in capsys.readouterr().out


# Bad input


@pytest.mark.parametrize(
    ("more", "message"),
    (
        (("--arms", "fa4"), "unknown arm 'fa4'; there are: cudnn, flash, fa3, flashinfer, math, quest, none"),
        (("--arms", "locks-r0i4"), "rank must be from 1"),
        (("--arms", "math", "fa3"), "the backend fa3 is not available here: FlashAttention-3 needs a CUDA device"),
        (("--shape", "glm-5"), "timings of glm-5 need a CUDA device"),
        (("--device", "cuda"), "there is no CUDA device"),
        (("--budget", "16"), "budget must be at least two pages"),
        (("--memory-limit", "0"), "--memory-limit is in GiB"),
        (("--window", "1"), "at least one window of two steps"),
        (("--step", "compiled", "--compile-mode", "reduce-overhead"), "captures CUDA graphs of its own"),
        (("--checkpoint",), "tiny is a shape without weights"),
    ),
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="refusals of a machine without a GPU")
def test_bad_options_are_refused_before_anything_is_measured(tmp_path, capsys, more, message):
    assert decode_run(tmp_path / "run", "--contexts", "64", *more) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "cells.jsonl").exists() or not cells_of(tmp_path / "run")


@pytest.mark.parametrize("text", ("0", "16G", "1.5", "K", "-4"))
def test_odd_numbers_of_tokens_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["decode", *TINY, "--contexts", text])
    assert "write 4096, 16K or 1M" in capsys.readouterr().err or text == "-4"


@pytest.mark.parametrize(
    ("option", "text"),
    (
        ("--memory-limit", "inf"),
        ("--memory-limit", "nan"),
        ("--settle", "nan"),
        ("--settle", "soon"),
        ("--seed", "99999999999999999999999"),
        ("--seed", "1.5"),
        ("--compile-mode", "bogus"),
    ),
)
def test_odd_values_are_refused_before_there_is_a_directory(tmp_path, capsys, option, text):
    with pytest.raises(SystemExit):
        decode_run(tmp_path / "run", "--contexts", "64", option, text)
    assert repr(text) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tokens_are_read_and_shown_in_binary_units():
    assert [tokens(text) for text in ("16K", "1M", "0.5k", "4000")] == [16384, 1 << 20, 512, 4000]
    assert [show_tokens(count) for count in (16384, 1 << 20, 512, 4000)] == ["16K", "1M", "512", "4000"]


def test_a_context_that_does_not_fit_is_refused_with_its_bytes(tmp_path, capsys):
    more = ("--arms", "math", "--memory-limit", "0.01", "--contexts")
    assert decode_run(tmp_path, *more, "64K") == 2
    err = capsys.readouterr().err
    assert "context 64K, batch 1, math needs 0." in err and "0.01 GiB are free" in err
    assert decode_run(tmp_path, *more, "64", "64K") == 0
    assert cells_of(tmp_path, context=64)[0]["status"] == "ok"
    lost = cells_of(tmp_path, context=64 << 10)[0]
    assert lost["status"] == "does not fit" and "GiB are free" in lost["reason"]
    assert "does not fit" in capsys.readouterr().out


def test_backends_that_are_absent_are_named_not_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(arms.CPU_GROUPS, "default", ("math", "fa3", "flashinfer"))
    assert decode_run(tmp_path, "--contexts", "64") == 0
    out, err = capsys.readouterr()
    assert "absent: FA3: FlashAttention-3 needs a CUDA device" in err
    assert out.count("absent") == 2
    assert set(json.loads((tmp_path / "results.json").read_text())["absent"]) == {"fa3", "flashinfer"}


def test_a_backend_that_fails_is_an_error_cell_and_the_others_go_on(tmp_path, capsys, monkeypatch):
    from locks_hf.timing.backends import SdpaBackend

    real = SdpaBackend.attend

    def attend(self, *args):
        if self.name == "flash":
            raise RuntimeError("No available kernel.\nMore of it")
        return real(self, *args)

    monkeypatch.setattr(SdpaBackend, "attend", attend)
    assert decode_run(tmp_path, "--contexts", "64", "--arms", "flash", "math") == 0
    flash, math = cells_of(tmp_path)
    assert flash["status"] == "error" and flash["reason"] == "RuntimeError: No available kernel."
    assert math["status"] == "ok"
    assert "flash: error: RuntimeError: No available kernel." in capsys.readouterr().err


@pytest.mark.parametrize("arm", ("math", "quest", "locks-r4i4"))
def test_nan_in_the_cache_is_an_error_cell_not_a_time(tmp_path, monkeypatch, arm):
    real = fill.synthetic_states

    def with_nan(*args):
        keys, values = real(*args)
        keys[:, :, 20] = float("nan")
        return keys, values

    monkeypatch.setattr(fill, "synthetic_states", with_nan)
    assert decode_run(tmp_path, "--contexts", "200", "--arms", arm) == 0
    (cell,) = cells_of(tmp_path)
    assert cell["status"] == "error" and "not finite" in cell["reason"] and "ms_mean" not in cell


@pytest.mark.parametrize(
    ("module", "name", "command"),
    (
        ("prefill", "time_prefill", ["prefill", "--contexts", "64", "--arms", "sdpa"]),
        ("longgen", "_grow", ["longgen", "--prompt", "64", "--new", "20", "--arms", "locks-r4i4"]),
        ("kernels", "_time", ["kernels", "--contexts", "64", "--arms", "locks-r4i4"]),
        ("generate", "time_generate", ["generate", "--contexts", "64", "--arms", "dynamic"]),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_table_shows_what_failed(tmp_path, capsys, monkeypatch, module, name, command):
    def fail(*args):
        raise KeyError("of its own kind")

    monkeypatch.setattr(f"locks_hf.timing.{module}.{name}", fail)
    assert main([*command, *TINY, "--output", str(tmp_path)]) == 0
    assert "error" in capsys.readouterr().out
    failed = [cell for cell in cells_of(tmp_path) if cell["status"] == "error"]
    assert failed and all("of its own kind" in cell["reason"] and "fail" in cell["traceback"] for cell in failed)


def test_a_directory_of_other_settings_is_refused(tmp_path, capsys):
    more = ("--contexts", "64", "--arms", "none")
    assert decode_run(tmp_path, *more) == 0
    assert decode_run(tmp_path, *more, "--seed", "1") == 2
    assert "seed is 0 there and 1 here" in capsys.readouterr().err
    assert decode_run(tmp_path, *more, "--seed", "1", "--overwrite") == 0


@pytest.mark.parametrize(
    ("command", "message"),
    (
        (["prefill", "--arms", "cudnn"], "prefill has no arm 'cudnn'"),
        (["longgen", "--arms", "dynamic"], "which dynamic does not"),
        (["longgen", "--new", "5"], "--new 5 is less than --every 10"),
        (["kernels", "--arms", "quest"], "which quest is not"),
        (["kernels", "--contexts", "8"], "at least one page of 16 tokens"),
        (["generate", "--arms", "math"], "generate compares"),
        (["generate", "--new", "8", "--skip", "8"], "leaves nothing of --new 8"),
        (["report", "nowhere"], "nowhere holds no timing run"),
    ),
    ids=" ".join,
)
def test_other_subcommands_refuse_what_they_cannot_do(tmp_path, capsys, command, message):
    common = [] if command[0] == "report" else [*TINY, "--output", str(tmp_path / "run")]
    assert main([command[0], *common, *command[1:]]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_runs_every_part_and_goes_on_after_a_failure(tmp_path):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHON": sys.executable, "DEVICE": "cpu", "SHAPE": "tiny", "STEP": "eager"}
    environment |= {"SHORT": "1", "STAGES": "decode kernels"}
    command = ["bash", str(root / "scripts" / "gh200.sh"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Table C.22" in (tmp_path / "report.md").read_text()
    (tmp_path / "decode" / "config.json").write_text('{"benchmark": "ruler"}')
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "failed: decode" in done.stderr
