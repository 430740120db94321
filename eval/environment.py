"""What a run ran on."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("locks-hf", "torch", "transformers", "tokenizers", "triton", "wonderwords")


def describe(device: torch.device, command: str) -> dict:
    """Versions, device, source revision and command line, for ``results.json``.

    Args:
        device: Where the model ran.
        command: The command line.

    Returns:
        JSON types only. ``git`` is the revision of the checkout the package runs from, with ``-dirty`` behind
        it if files differ, or ``None``.
    """
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "command": command,
        "device": name,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "git": _git_revision(),
    }


def _git_revision() -> str | None:
    here = Path(__file__).resolve()
    try:
        # An installed copy may lie inside somebody else's checkout: only one that tracks this file counts.
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", here.name],
            cwd=here.parent,
            capture_output=True,
            check=True,
        )
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=here.parent,
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
