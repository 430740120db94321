"""A timing run's directory: settings, one line a measured cell as it is measured, results at the end.

Files: ``config.json`` (settings, written at the start), ``environments.json`` (what the cells were measured on),
``cells.jsonl`` (one object a cell, appended and flushed at once) and ``results.json`` (at the end). A cell is an object
with ``cell`` (what was measured: context, batch, arm), ``status`` and, if that is ``ok``, the values.

Statuses: ``ok``; ``absent`` (a backend that is not installed or does not run on this GPU); ``does not fit``; ``error``.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from locks_hf.eval.store import settings_hash, write_json

STATUSES = ("ok", "absent", "does not fit", "error")
_FILES = ("config.json", "environments.json", "cells.jsonl", "results.json")


def cell_key(cell: dict) -> str:
    """What a cell is the result of, as a string."""
    return json.dumps(cell, sort_keys=True)


def read_cells(path: Path) -> tuple[list[dict], int]:
    """Read the whole lines of a cells file.

    Returns:
        The cells, the last one where several are of the same, in the order they first came up; and the length in bytes
        of the whole lines: what follows is the start of a line whose writing was cut off.

    Raises:
        ValueError: If a whole line is not a cell; the message names the file and the line.
    """
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    cells: dict[str, dict] = {}
    for number, line in enumerate(data[:end].splitlines(), 1):
        try:
            cell = json.loads(line)
            if not isinstance(cell, dict) or not isinstance(cell.get("cell"), dict):
                raise ValueError("it has no object under 'cell'")
            if cell.get("status") not in STATUSES:
                raise ValueError(f"its status is {cell.get('status')!r}")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path} is not a cell ({error}); remove the line, or start anew with --overwrite"
            ) from error
        cells[cell_key(cell["cell"])] = cell
    return list(cells.values()), end


class CellStore:
    """The directory of one timing run.

    Making the object claims the directory: a second run in it is refused until this one is closed.

    Args:
        directory: Made if it is not there; ``None`` is ``runs/timing-<command>-<hash of the settings>``.
        settings: What decides a cell's content; JSON types, ``timing`` (the subcommand) among them.
        overwrite: Replace the run that is in the directory, whatever its settings.
        retry: Measure cells again that are not ``ok``.

    Attributes:
        directory: Where the run is.
        cells: The cells there, :meth:`add` included.

    Raises:
        ValueError: If the directory cannot be written, another run is at work in it, or it holds something else or a
            run with other settings; the message names them.
    """

    def __init__(self, directory: Path | None, settings: dict, *, overwrite: bool = False, retry: bool = False):
        name = f"timing-{settings['timing']}-{settings_hash(settings)}"
        self.directory = Path("runs") / name if directory is None else directory
        self.settings = settings
        self._retry = retry
        self._file = None
        self._environments: list[dict] = []
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
            self._lock = FileLock(self.directory / ".lock", blocking=False)
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another run is writing to {self.directory}: wait for it or choose another --output"
            ) from error
        except OSError as error:
            raise ValueError(f"cannot write to the output directory {self.directory}: {error}") from error
        try:
            found = self._check_owner()
            if not overwrite and found:
                self._compare(found)
            self.cells, self._whole = ([], 0) if overwrite else read_cells(self._path("cells.jsonl"))
            self._environments = [] if overwrite else self._read_environments()
        except ValueError:
            self._lock.release()
            raise
        self._overwrite = overwrite

    def _path(self, name: str) -> Path:
        return self.directory / name

    def begin(self, sweep: dict, environment: dict) -> None:
        """Open the cells for appending.

        Args:
            sweep: What may grow from one run to the next in this directory: contexts, batches, arms.
            environment: What new cells are measured on.
        """
        if self._overwrite:
            for name in _FILES[1:]:
                self._path(name).unlink(missing_ok=True)
        write_json(self._path("config.json"), {**self.settings, **sweep})
        self.sweep = sweep
        self._environment = environment
        self._file = open(self._path("cells.jsonl"), "ab", buffering=0)  # noqa: SIM115
        self._file.truncate(self._whole)

    def __enter__(self) -> CellStore:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the directory; if nothing was begun, leave no trace of one that was empty."""
        if self._file is not None:
            self._file.close()
        self._lock.release()
        if self._file is None:
            with contextlib.suppress(OSError):
                self._path(".lock").unlink(missing_ok=True)
                self.directory.rmdir()

    def has(self, cell: dict) -> bool:
        """Whether a cell need not be measured (again)."""
        known = self.get(cell)
        return known is not None and (known["status"] == "ok" or not self._retry)

    def get(self, cell: dict) -> dict | None:
        """What is known of a cell."""
        return next((known for known in self.cells if cell_key(known["cell"]) == cell_key(cell)), None)

    def add(self, cell: dict) -> None:
        """Append one cell and, where it is new, what it was measured on.

        Raises:
            ValueError: If it is not a cell.
        """
        if cell.get("status") not in STATUSES or "cell" not in cell:
            raise ValueError(f"not a cell: {cell!r:.80}")
        stripped = {**self._environment, "command": None}
        known = [{**one, "command": None} for one in self._environments]
        if stripped not in known:
            self._environments.append(self._environment)
            write_json(self._path("environments.json"), self._environments)
            known.append(stripped)
        self._append({**cell, "environment": known.index(stripped)})

    def _append(self, cell: dict) -> None:
        rest = (json.dumps(cell) + "\n").encode("ascii")
        while rest:
            rest = rest[self._file.write(rest) :]
        key = cell_key(cell["cell"])
        self.cells = [one for one in self.cells if cell_key(one["cell"]) != key] + [cell]

    def amend(self, cell: dict, **more) -> bool:
        """Append a cell that was measured before with more to it, on what it was measured on.

        Returns:
            Whether that is what this run is on: a cell of another environment is left as it is.
        """
        here = {**self._environment, "command": None}
        if {**self._environments[cell["environment"]], "command": None} != here:
            return False
        self._append({**cell, **more})
        return True

    def finish(self, **more) -> Path:
        """Write ``results.json``: settings, environments, absent backends, the command to repeat it, the cells."""
        absent = {cell["cell"].get("arm"): cell["reason"] for cell in self.cells if cell["status"] == "absent"}
        content = {
            "timing": self.settings["timing"],
            "measurement": self.settings["measurement"],
            "settings": {**self.settings, **self.sweep},
            "environments": self._environments or [self._environment],
            "command": self._environment["command"],
            "absent": absent,
            **more,
            "cells": self.cells,
        }
        write_json(self._path("results.json"), content)
        return self._path("results.json")

    def _check_owner(self) -> dict:
        there = [name for name in _FILES if self._path(name).exists()]
        if not there:
            return {}
        if "config.json" not in there:
            raise ValueError(
                f"{self.directory} holds {', '.join(there)} but no config.json to tell what made them: choose another "
                "--output"
            )
        found = read_object(self._path("config.json"))
        if "timing" not in found:
            raise ValueError(f"{self.directory} holds files that no timing run wrote: choose another --output")
        return found

    def _compare(self, found: dict) -> None:
        differing = [
            f"{name} is {found.get(name)!r} there and {value!r} here"
            for name, value in self.settings.items()
            if found.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"{self.directory} holds a run with other settings: {'; '.join(differing)}. Choose another --output, "
                "or start anew with --overwrite"
            )

    def _read_environments(self) -> list[dict]:
        path = self._path("environments.json")
        if not path.exists():
            return []
        try:
            environments = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(environments, list) and all(isinstance(one, dict) for one in environments):
                return environments
            raise ValueError("it holds no environments")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, or start anew with --overwrite") from error


def read_object(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
        ValueError: If it is not there or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
