"""A run's directory: configuration, one line per record as it is made, results at the end.

Files: ``config.json`` (written at the start), ``environments.json`` (what the samples were made on, with the
first of them), ``samples.jsonl`` (one object a record and arm, appended and flushed at once),
``errors.jsonl`` (records of the last run that could not be made; absent if there were none), and
``results.json`` (at the end).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from types import NoneType

from filelock import FileLock, Timeout

from .arms import Arm

ARM_KEYS = ("selector", "rank", "basis_bits", "refit", "budget")
SAMPLE_KEYS = (
    "task",
    "length",
    "index",
    *ARM_KEYS,
    "prediction",
    "references",
    "score",
    "tokens_attended",
    "bytes_read_per_step",
)
SAMPLE_KINDS = {
    "task": str,
    "length": int,
    "index": int,
    "selector": str,
    "rank": (int, NoneType),
    "basis_bits": (int, NoneType),
    "refit": (bool, NoneType),
    "budget": (int, NoneType),
    "prediction": str,
    "references": list,
    "score": (int, float),
    "tokens_attended": (int, float, NoneType),
    "bytes_read_per_step": (int, float, NoneType),
}
_FILES = ("config.json", "environments.json", "samples.jsonl", "errors.jsonl", "results.json")


def settings_hash(settings: dict) -> str:
    """Short hash of the settings that decide a record's content; names the default output directory."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def write_json(path: Path, content: dict | list) -> None:
    """Write a JSON file in one step: a reader sees the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _same_environment(one: dict, other: dict) -> bool:
    """Whether two environments differ in the command line at most."""
    return {**one, "command": None} == {**other, "command": None}


def sample_key(sample: dict) -> tuple:
    """What a sample is the result of: ``(task, length, index, arm)``."""
    return (sample["task"], sample["length"], sample["index"], sample_arm(sample))


def sample_arm(sample: dict) -> Arm:
    """The arm of a sample or of a result row."""
    return Arm(*(sample[name] for name in ARM_KEYS))


def read_samples(path: Path) -> tuple[list[dict], int]:
    """Read the whole lines of a samples file.

    Args:
        path: The file; it need not exist.

    Returns:
        The samples, the first one where a key repeats, and the length in bytes of the whole lines: what
        follows is the start of a line whose writing was cut off.

    Raises:
        ValueError: If a whole line is not a sample; the message names the file and the line.
    """
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    samples = {}
    for number, line in enumerate(data[:end].splitlines(), 1):
        try:
            sample = json.loads(line)
            if not isinstance(sample, dict) or set(sample) != set(SAMPLE_KEYS):
                raise ValueError(f"the keys of a sample are {', '.join(SAMPLE_KEYS)}")
            for name, kinds in SAMPLE_KINDS.items():
                if not isinstance(sample[name], kinds):
                    raise ValueError(f"{name} is {sample[name]!r}")
            samples.setdefault(sample_key(sample), sample)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"line {number} of {path} is not a sample ({error}); remove the line, or start anew with --overwrite"
            ) from error
    return list(samples.values()), end


class RunStore:
    """The directory of one run.

    Making the object claims the directory (a second run in it is refused until this one is closed) and sees that the
    run can go on there; nothing is changed before :meth:`begin`.

    Args:
        directory: Directory of the run, made if it is not there.
        settings: What decides a record's content; JSON types only.
        overwrite: Replace the run that is in the directory, whatever its settings.

    Attributes:
        samples: Samples in the file, in the order they were made.
        done: ``sample_key`` of each of them.
        cut_bytes: Bytes of an unfinished line that :meth:`begin` removed.
        environments: What the samples were made on, in the order it came up.

    Raises:
        ValueError: If the directory cannot be written or another run is at work in it, or if it holds damaged files
            or a run with other settings (the message names the settings that differ).
    """

    def __init__(self, directory: Path, settings: dict, *, overwrite: bool = False):
        self.directory = directory
        self.config = dict(settings)
        self._found: dict = {}  # the config.json that was there
        self.samples: list[dict] = []
        self.done: set[tuple] = set()
        self.cut_bytes = 0
        self.environments: list[dict] = []
        self._environment: dict = {}
        self._overwrite = overwrite
        self._file = None
        lock = self._path(".lock")
        self._made = [path for path in (lock, directory, *directory.parents) if not path.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            self._lock = FileLock(lock, blocking=False)
            self._lock.acquire()
        except Timeout as error:
            raise ValueError(
                f"another run is writing to {directory}: wait for it or choose another --output"
            ) from error
        except OSError as error:
            raise ValueError(f"cannot write to the output directory {directory}: {error}") from error
        try:
            self._check_owner()
            if not overwrite:
                self._check()
        except ValueError:
            self.close()
            raise

    def settle(self, settings: dict) -> None:
        """Add settings that are known only after the directory is claimed, such as what the model turned out to be.

        A run from before a setting was written down goes on without the comparison.

        Raises:
            ValueError: If the run in the directory has other ones; the message names both.
        """
        if not self._overwrite:
            self._compare({name: value for name, value in settings.items() if name in self._found})
        self.config.update(settings)

    def begin(self, sweep: dict, environment: dict) -> None:
        """Open the samples file for appending and write ``config.json``.

        A samples file that ends inside a line (the process was killed while writing) is cut back to its last whole
        line.

        Args:
            sweep: What may grow from one run to the next in the same directory (tasks, lengths, limit, arms).
            environment: What new samples are made on; kept once there is one.
        """
        self.config.update(sweep)
        if self._overwrite:
            for name in _FILES[1:]:  # config.json, which says that the others are ours, is replaced last
                self._path(name).unlink(missing_ok=True)
        self._path("errors.jsonl").unlink(missing_ok=True)
        write_json(self._path("config.json"), self.config)
        self._environment = environment
        self.samples, whole = read_samples(self._path("samples.jsonl"))
        self.done = {sample_key(sample) for sample in self.samples}
        # Unbuffered: once write() returns, a killed process has lost nothing.
        self._file = open(self._path("samples.jsonl"), "ab", buffering=0)  # noqa: SIM115
        self.cut_bytes = self._file.tell() - whole
        self._file.truncate(whole)

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Close the samples file and let go of the directory; if nothing was begun, leave no trace of it."""
        if self._file is not None:
            self._file.close()
        else:
            with contextlib.suppress(OSError):  # not empty: somebody else's now
                for path in self._made:
                    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        self._lock.release()

    def add(self, sample: dict) -> None:
        """Append one sample to the file, and what it was made on where that is new."""
        if not any(_same_environment(self._environment, known) for known in self.environments):
            self.environments.append(self._environment)
            write_json(self._path("environments.json"), self.environments)
        line = json.dumps({key: sample[key] for key in SAMPLE_KEYS}) + "\n"
        rest = line.encode("ascii")
        while rest:
            rest = rest[self._file.write(rest) :]
        self.samples.append(sample)
        self.done.add(sample_key(sample))

    def add_error(self, error: dict) -> None:
        """Append one record that could not be made."""
        with open(self._path("errors.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(error) + "\n")

    def write_results(self, rows: list[dict]) -> Path:
        """Write ``results.json`` and return its path."""
        path = self._path("results.json")
        # A run that made no sample, and knows of none that were made, has its own environment to tell of.
        first, *later = self.environments or [self._environment]
        content = {"config": self.config, "environment": first, "rows": rows}
        write_json(path, {**content, "later_environments": later} if later else content)
        return path

    def _read_environments(self) -> list[dict]:
        """What the samples in the directory were made on, as far as it is known."""
        path, results = self._path("environments.json"), self._path("results.json")
        try:
            if path.exists():
                environments = json.loads(path.read_text(encoding="utf-8"))
            elif results.exists():  # of a run from before the environments had their own file
                path, environments = results, [json.loads(results.read_text(encoding="utf-8"))["environment"]]
            else:
                return []
            if isinstance(environments, list) and all(isinstance(one, dict) for one in environments):
                return environments
            raise ValueError("it holds no environments")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): remove it, or start anew with --overwrite") from error

    def _path(self, name: str) -> Path:
        return self.directory / name

    def _check_owner(self) -> None:
        """Refuse a directory with files of the names of a run's that no evaluation wrote."""
        there = [name for name in _FILES if self._path(name).exists()]
        for path in map(self._path, there):
            if not path.is_file():
                raise ValueError(f"{path} is not a file: choose another --output")
        if not there:
            return
        path = self._path("config.json")
        if not path.exists():
            raise ValueError(
                f"{self.directory} holds {', '.join(there)} but no config.json to tell what made them: choose another "
                "--output"
            )
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): choose another --output, or remove it") from error
        if not isinstance(stored, dict) or "benchmark" not in stored:
            raise ValueError(f"{path} was not written by an evaluation: choose another --output")
        self._found = stored

    def _check(self) -> None:
        read_samples(self._path("samples.jsonl"))
        self.environments = self._read_environments()
        if self._found:
            self._compare(self.config)

    def _compare(self, settings: dict) -> None:
        differing = [
            f"{name} is {self._found.get(name)!r} there and {value!r} here"
            for name, value in settings.items()
            if self._found.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"{self.directory} holds a run with other settings: {'; '.join(differing)}. Choose another --output, "
                "or start anew with --overwrite"
            )
