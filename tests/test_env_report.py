"""The environment report on machines of every kind, as far as a CPU can play them."""

import os
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from locks_hf import env_report

REQUIREMENTS = [
    "torch>=2.11",
    "transformers<5.25,>=5.17",
    "triton>=3.6; platform_system == 'Linux'",
    "datasets>=4.0; extra == 'eval'",
    "pytest>=8; extra == 'dev'",
]


@pytest.fixture
def installed(monkeypatch):
    """Versions that the report finds, by name; anything else is missing."""
    versions = {"locks-hf": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.24.0", "triton": "3.9.0"}
    versions["datasets"] = "5.2.0"
    monkeypatch.setattr(env_report, "_version", versions.get)
    monkeypatch.setattr(env_report, "_requirements", lambda: REQUIREMENTS)
    monkeypatch.setattr(env_report.platform, "system", lambda: "Linux")
    return versions


def rows(text):
    """The report without its problems, as {name: value}."""
    lines = text.split("Problems")[0].splitlines()
    return dict(line.strip().split("  ", 1) for line in map(squeeze, lines) if line.startswith("  "))


def squeeze(line):
    """Leave two spaces between name and value."""
    return re.sub(r"(?<=\S) {2,}", "  ", line)


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "locks_hf.env_report"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    for name in ("locks-hf", "torch", "transformers", "accelerate", "datasets", "evaluate"):
        assert found[name].startswith(env_report._version(name) or "not installed")
    assert {"summarize", "score", "select", "attend"} <= set(found)
    assert os.path.expanduser("~") not in done.stdout


def test_everything_in_order(installed):
    text = env_report.report()
    assert "Problems" not in text
    assert rows(text)["transformers"] == "5.24.0"
    assert "pytest" not in text


@pytest.mark.parametrize("version", ["5.16.2", "5.25.0", "6.0.0.dev0"])
def test_transformers_outside_the_tested_range(installed, version):
    installed["transformers"] = version
    text = env_report.report()
    assert rows(text)["transformers"] == f"{version}, outside the tested range <5.25,>=5.17"
    assert "pip install 'transformers<5.25,>=5.17'" in text.split("Problems")[1]


@pytest.mark.parametrize("version", ["5.17.0", "5.24.3"])
def test_both_ends_of_the_range(installed, version):
    installed["transformers"] = version
    assert "Problems" not in env_report.report()


def test_missing_packages(installed):
    del installed["datasets"], installed["triton"]
    text = env_report.report()
    assert rows(text)["datasets"] == "not installed (extra eval)"
    assert rows(text)["triton"] == "not installed"
    assert text.split("Problems")[1].strip() == "triton is missing: pip install 'triton>=3.6'"


def test_outdated_package_of_an_extra(installed):
    installed["datasets"] = "3.0"
    assert "pip install 'datasets>=4.0'" in env_report.report().split("Problems")[1]


def test_package_that_was_never_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(env_report.metadata, "requires", missing)
    monkeypatch.setattr(env_report.metadata, "version", missing)
    assert rows(env_report.report())["locks-hf"] == "not installed"


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ([("score", False, "the package triton is not installed")], "not usable: the package triton is not"),
        ([("score", True, "some device")], "usable: some device"),
    ],
)
def test_kernel_lines(monkeypatch, status, line):
    monkeypatch.setattr("locks_hf.kernels.backend.kernel_status", lambda: status)
    assert rows(env_report.report())["score"].startswith(line)


def test_kernel_status_that_cannot_be_had(monkeypatch):
    monkeypatch.setenv("LOCKS_KERNELS", "sometimes")
    text = env_report.report()
    assert "LOCKS_KERNELS must be one of" in rows(text)["all"]
    assert rows(text)["LOCKS_KERNELS"] == "sometimes"


def test_gpu_machine(monkeypatch):
    class Facts:
        name, major, minor, total_memory = "Some GPU", 9, 0, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Facts)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(env_report, "_kernels", lambda: [("score", "usable: Some GPU")])
    monkeypatch.setattr(env_report.shutil, "which", lambda name: f"/usr/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout="590.10\n590.10\n")
    monkeypatch.setattr(env_report.subprocess, "run", lambda *args, **options: answer)
    text = env_report.report()
    assert rows(text)["driver"] == "590.10"
    assert rows(text)["cuda:1"] == "Some GPU, compute capability 9.0, 140 GiB"


@pytest.mark.parametrize(
    "error", [OSError(), subprocess.TimeoutExpired("nvidia-smi", 20), subprocess.CalledProcessError(9, "x")]
)
def test_driver_that_does_not_answer(monkeypatch, error):
    def run(*args, **options):
        raise error

    monkeypatch.setattr(env_report.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(env_report.subprocess, "run", run)
    assert env_report._driver() is None
