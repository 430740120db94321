from __future__ import annotations

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from locks_hf.eval.haystack import Haystack

TEXT = (
    "The old mill stood by the river. Nobody remembered who had built it! Was it the miller's father? "
    'Dr. Stone said "it was the monks." They kept bees, e.g. in the orchard, and sold honey at the fair. '
    "In 1820 the roof fell in. The village rebuilt it within a year. Since then it has ground no flour.\n\n"
) * 40
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: decoding gives the text back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=CHAT
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, digit or mark; words outside the sample text are unknown."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|[^\W\d]+|[^\w\s]"), "removed", invert=True)
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for word in [*map(str, range(10)), *"abcdef-:.,", *words]:
        vocab.setdefault(word, len(vocab))
    tokenizer.model = models.WordLevel(vocab, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )


TOKENIZERS = {"bytes": byte_tokenizer, "words": word_tokenizer}


@pytest.fixture(scope="session", params=list(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="session")
def words():
    return word_tokenizer()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("haystack") / "mill.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def haystack(text_file):
    return Haystack(str(text_file))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a random two-layer Llama (head_dim 16, 4 query and 2 KV heads) with the word tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
