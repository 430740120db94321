"""What a bug report needs to say about a machine: ``python -m locks_hf.env_report``.

Versions, devices and the state of the kernels, as text without paths or host names. Whatever is missing on
the machine is a line of the report, never an error.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

import torch
from packaging.requirements import Requirement

_DISTRIBUTION = "locks-hf"
_EXTRAS = ("eval", "plots")
_SWITCHES = ("LOCKS_KERNELS", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")


def report() -> str:
    """The whole report, in lines of at most about 110 characters."""
    packages, problems = _packages()
    sections = [
        ("Versions", [("python", f"{platform.python_version()} on {_platform()}"), *packages]),
        ("Devices", _devices()),
        ("Kernels", _kernels()),
    ]
    if switches := [(name, os.environ[name]) for name in _SWITCHES if name in os.environ]:
        sections.append(("Environment", switches))
    lines = []
    for title, rows in sections:
        width = max(len(name) for name, _ in rows)
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    if problems:
        lines += ["Problems", *(f"  {problem}" for problem in problems)]
    return "\n".join(lines)


def _packages() -> tuple[list[tuple[str, str]], list[str]]:
    """Rows (name, version) of this package and what it uses, and what is wrong with them."""
    rows = [(_DISTRIBUTION, _version(_DISTRIBUTION) or "not installed")]
    problems = []
    for text in _requirements():
        requirement = Requirement(text)
        extra = _extra_of(requirement)
        if extra is None:
            continue
        name, wanted = requirement.name, str(requirement.specifier)
        version = _version(name)
        target = f"'{name}{wanted}'"
        if version is None:
            rows.append((name, f"not installed{f' (extra {extra})' if extra else ''}"))
            if not extra:
                problems.append(f"{name} is missing: pip install {target}")
        elif requirement.specifier.contains(version, prereleases=True):
            rows.append((name, version))
        else:
            rows.append((name, f"{version}, outside the tested range {wanted}"))
            problems.append(f"{name} {version} is outside the tested range {wanted}: pip install {target}")
    return rows, problems


def _requirements() -> list[str]:
    try:
        return metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def _extra_of(requirement: Requirement) -> str | None:
    """The extra a requirement belongs to, ``""`` if it always applies, ``None`` if it is not reported."""
    if requirement.marker is None:
        return ""
    return next((e for e in ("", *_EXTRAS) if requirement.marker.evaluate({"extra": e})), None)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _platform() -> str:
    return f"{platform.system()} {platform.machine()}"


def _devices() -> list[tuple[str, str]]:
    """Rows (what, description): the CUDA that torch was built with, the driver, each device."""
    rows = [
        ("CUDA in torch", torch.version.cuda or ("none (ROCm build)" if torch.version.hip else "none")),
        ("driver", _driver() or "none found"),
    ]
    if not torch.cuda.is_available():
        return [*rows, ("cpu", f"{torch.get_num_threads()} threads; no CUDA device")]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = facts.total_memory / 2**30
        rows.append(
            (
                f"cuda:{index}",
                f"{facts.name}, compute capability {facts.major}.{facts.minor}, {memory:.0f} GiB",
            )
        )
    return rows


def _driver() -> str | None:
    """Version of the NVIDIA driver, as ``nvidia-smi`` says it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _kernels() -> list[tuple[str, str]]:
    """Rows (op, whether its kernel is usable and why)."""
    try:
        from locks_hf.kernels.backend import kernel_status

        status = kernel_status()
    except (ImportError, ValueError) as error:
        return [("all", f"not usable: {error}")]
    return [(op, f"{'usable' if usable else 'not usable'}: {reason}") for op, usable, reason in status]


if __name__ == "__main__":
    print(report())
