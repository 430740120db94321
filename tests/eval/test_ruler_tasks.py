from __future__ import annotations

import json
import random
import re
import sys

import pytest

from locks_hf.eval.haystack import Haystack
from locks_hf.eval.ruler import TASKS, NeedleGenerator
from locks_hf.eval.ruler.tasks import NEEDLE, NOISE_LINE
from locks_hf.eval.ruler.words import random_item, word_lists, words_identity
from locks_hf.eval.sentences import split_sentences

PATTERNS = {
    "words": r".+?-.+?",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


def needles_of(task, text):
    pattern = NEEDLE.format(kind=task.value, key=f"({PATTERNS[task.key]})", value=f"({PATTERNS[task.value]})")
    return re.findall(pattern.replace(").", r")\."), text)


def make(name, length, tokenizer, haystack, **options):
    return NeedleGenerator(TASKS[name], length, tokenizer, haystack=haystack, **options)


def fits(tokenizer, record, max_new_tokens=64):
    return len(tokenizer.tokenize(record.text)) + max_new_tokens == record.tokens <= record.length


@pytest.mark.parametrize("length", [1500, 4096, 9000])
@pytest.mark.parametrize("name", TASKS)
def test_records_fit_and_hold_their_answers(name, length, tokenizer, haystack):
    task = TASKS[name]
    generator = make(name, length, tokenizer, haystack)
    for record in map(generator.record, range(4)):
        assert fits(tokenizer, record)
        context, question = record.text.rsplit("\n", 1)
        planted = needles_of(task, context)
        asked = {key for key, _ in planted if key in question}
        assert len(asked) == task.queries
        assert len(record.references) == task.queries * task.values
        assert {value for key, value in planted if key in asked} == set(record.references)
        assert len(planted) > task.needles if task.haystack == "needle" else len(planted) == task.needles
        assert not any(reference in question for reference in record.references)


@pytest.mark.parametrize("name", TASKS)
def test_most_of_the_length_is_used(name, tokenizer, haystack):
    generator = make(name, 12000, tokenizer, haystack)
    tokens = [generator.record(index).tokens for index in range(6)]
    # A record that overflows gives up one step of haystack, 500 essay words or 25 lines.
    assert max(tokens) > 0.9 * 12000
    assert min(tokens) > 0.5 * 12000


def test_prompt_of_one_answer(words, haystack):
    record = make("niah_single_1", 600, words, haystack).record(0)
    key, value = needles_of(TASKS["niah_single_1"], record.text)[0]
    opening, *context, question = record.text.split("\n")
    assert opening == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert question == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    context.remove(f"One of the special magic numbers for {key} is: {value}.")
    assert set(context) == {NOISE_LINE}
    assert record.references == (value,)


def test_prompt_of_several_queries(words, haystack):
    record = make("niah_multiquery", 1000, words, haystack).record(0)
    keys = {value: key for key, value in needles_of(TASKS["niah_multiquery"], record.text)}
    one, two, three, four = (keys[value] for value in record.references)
    assert record.text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\n"
    )
    query = f"{one}, {two}, {three}, and {four}"
    assert record.text.endswith(
        f"\nWhat are all the special magic numbers for {query} mentioned in the provided text? "
        f"The special magic numbers for {query} mentioned in the provided text are"
    )


def test_records_depend_on_seed_task_length_and_index_alone(words, haystack, text_file):
    first = make("niah_multikey_1", 1000, words, haystack)
    later = [first.record(index) for index in range(3)]
    again = make("niah_multikey_1", 1000, words, Haystack(str(text_file)))
    random.seed(1)
    assert [again.record(index) for index in (2, 0, 1)] == [later[2], later[0], later[1]]
    assert len({record.references for record in later}) == 3
    other_seed = make("niah_multikey_1", 1000, words, haystack, seed=7)
    assert other_seed.record(0).references != later[0].references
    assert make("niah_multikey_1", 1001, words, haystack).record(0).references != later[0].references


def test_depth_is_spread(words, haystack):
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_2"):
        generator = make(name, 2500, words, haystack)
        depths = []
        for record in map(generator.record, range(60)):
            depths.append(record.text.index(record.references[0]) / len(record.text))
        quarters = [sum(low <= depth < low + 0.25 for depth in depths) for low in (0, 0.25, 0.5, 0.75)]
        assert min(quarters) >= 4, (name, quarters)


def test_noise_replaces_the_essays(words):
    record = make("niah_multivalue", 1000, words, Haystack("noise")).record(0)
    assert NOISE_LINE in record.text
    assert fits(words, record)
    assert len(needles_of(TASKS["niah_multivalue"], record.text)) == 4


def test_haystack_repeats_where_it_is_short(words, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("Only nine words stand here. They come\nback again.")
    record = make("niah_single_2", 1500, words, Haystack(str(path))).record(0)
    assert record.text.count("Only nine words stand here.") > 50
    assert fits(words, record)


@pytest.mark.parametrize("name", TASKS)
def test_a_length_that_is_too_short_names_the_shortest(name, words, haystack):
    with pytest.raises(ValueError, match=rf"{name} does not fit a length of 70 tokens.*64 new tokens") as caught:
        make(name, 70, words, haystack)
    minimum = int(re.search(r"at least (\d+)", str(caught.value))[1])
    # Samples differ by a few tokens, so a little more than that has to work.
    assert fits(words, make(name, minimum + 40, words, haystack).record(0))


def test_a_record_that_cannot_fit_ends(words, haystack):
    generator = make("niah_multikey_3", 500, words, haystack)
    generator.length = 80
    with pytest.raises(ValueError, match=r"record 5 of niah_multikey_3 does not fit a length of 80 tokens"):
        generator.record(5)


def test_new_tokens_leave_room(words, haystack):
    few = make("niah_single_1", 800, words, haystack, max_new_tokens=8)
    many = make("niah_single_1", 800, words, haystack, max_new_tokens=300)
    assert few.units > many.units
    assert fits(words, few.record(0), 8)
    assert fits(words, many.record(0), 300)


def test_chat_template_wraps_and_the_prefix_stays_last(tokenizer, haystack):
    raw = make("niah_single_1", 2000, tokenizer, haystack).record(0)
    chat = make("niah_single_1", 2000, tokenizer, haystack, chat_template="chat").record(0)
    assert chat.text.startswith("<|user|>A special magic number")
    assert chat.text.count("<|end|><|assistant|> The special magic number for ") == 1
    assert chat.text.endswith("mentioned in the provided text is")
    assert raw.text.endswith("mentioned in the provided text is")
    assert fits(tokenizer, chat)


def test_chat_template_has_to_exist(haystack, words, monkeypatch):
    monkeypatch.setattr(words, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template; use --chat-template none"):
        make("niah_single_1", 600, words, haystack, chat_template="chat")
    with pytest.raises(ValueError, match="got 'llama'"):
        make("niah_single_1", 600, words, haystack, chat_template="llama")


@pytest.mark.parametrize("date", ["date_string", "strftime_now('%d %b %Y')"])
def test_chat_templates_print_the_same_date(haystack, words, monkeypatch, date):
    monkeypatch.setattr(words, "chat_template", f"Today is {{{{ {date} }}}}. {{{{ messages[0].content }}}}\n")
    record = make("niah_single_1", 600, words, haystack, chat_template="chat").record(0)
    assert record.text.startswith("Today is 26 Jul 2024. A special magic number")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in %}", "Expected an expression"),
        ("{{ raise_exception('give a system message') }}", "give a system message"),
        ("{{ messages + 1 }}", "can only concatenate list"),
    ],
)
def test_chat_templates_that_fail(haystack, words, monkeypatch, template, message):
    monkeypatch.setattr(words, "chat_template", template)
    with pytest.raises(ValueError, match=rf"chat template does not take .*{message}.*use --chat-template none"):
        make("niah_single_1", 600, words, haystack, chat_template="chat")


def test_layout_equals_that_of_an_upstream_file(test_data):
    path = test_data / "ruler" / "golden_niah_multikey_3_4096_first10.jsonl"
    if not path.exists():
        pytest.skip(f"no reference file {path}")
    task = TASKS["niah_multikey_3"]
    for line in path.read_text().splitlines():
        golden = json.loads(line)
        lines = golden["input"].split("\n")
        pairs = needles_of(task, golden["input"])
        (key,) = [key for key, value in pairs if [value] == golden["outputs"]]
        # Rebuilt from its keys and values with our wording, the prompt is the same to the letter.
        context = "\n".join(NEEDLE.format(kind="uuids", key=k, value=v) for k, v in pairs)
        assert "".join(task.prompt(context, [key])) == golden["input"]
        assert len(lines) == len(pairs) + 2


@pytest.mark.parametrize("kind", PATTERNS)
def test_random_items(kind):
    rng = random.Random(3)
    items = [random_item(kind, rng) for _ in range(300)]
    assert all(re.fullmatch(PATTERNS[kind], item) for item in items)
    assert len(set(items)) == 300


def test_word_lists():
    adjectives, nouns = word_lists()
    assert (len(adjectives), len(nouns)) == (len(set(adjectives)), len(set(nouns)))
    assert len(adjectives) > 900
    assert len(nouns) > 6700
    assert re.fullmatch("[0-9a-f]{16}", words_identity())


def test_missing_word_lists_name_the_command(monkeypatch):
    word_lists.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    monkeypatch.setitem(sys.modules, "wonderwords.assets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install wonderwords==3.0.1"):
        word_lists()


def test_unknown_kind_of_item():
    with pytest.raises(ValueError, match="got 'colours'"):
        random_item("colours", random.Random(0))


def test_sentences():
    text = 'He met Dr. Stone. "Is it true?" he asked. J. R. Smith nodded! It cost 3.5 marks, e.g. in May. Really'
    assert split_sentences(text) == [
        "He met Dr. Stone.",
        '"Is it true?" he asked.',
        "J. R. Smith nodded!",
        "It cost 3.5 marks, e.g. in May.",
        "Really",
    ]
    assert split_sentences("") == []


@pytest.mark.parametrize(
    "sentences",
    [
        ["Всё смешалось в доме Облонских.", "«Жена узнала!»", "А. П. Чехов молчал.", "Ёлка стоит."],
        ["Écoute la pluie.", "Être ou ne pas être ?", "Ça va."],
        ["من أين جئت؟", "جئت من البيت.", "حسنا۔"],
        ["वह घर गया।", "क्या हुआ?", "सब ठीक है॥", "अच्छा।"],
        ["今日 は 雨 です。", "「本当 です か？」", "はい！", "終わり"],
        ["დილა მშვიდობისა.", "როგორ ხარ?", "კარგად."],
    ],
    ids=["Russian", "French", "Arabic", "Hindi", "Japanese", "Georgian"],
)
def test_sentences_of_other_scripts(sentences):
    assert split_sentences(" ".join(sentences)) == sentences


def test_no_sentence_begins_with_a_small_letter():
    for text in ("He left. and then", "Он ушёл. и всё", "Il part. éteins"):
        assert split_sentences(text) == [text]


def test_depth_is_spread_in_other_scripts(words, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Всё смешалось в доме. Жена узнала! А муж молчал? «Ах» и «ох». " * 40, encoding="utf-8")
    generator = make("niah_single_2", 1500, words, Haystack(str(path)))
    depths = []
    for record in map(generator.record, range(40)):
        depths.append(record.text.index(record.references[0]) / len(record.text))
    quarters = [sum(low <= depth < low + 0.25 for depth in depths) for low in (0, 0.25, 0.5, 0.75)]
    assert min(quarters) >= 4, quarters


def test_text_without_sentences_is_refused(words, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the fox sleeps. it is late! " * 300)
    with pytest.raises(ValueError, match="too few sentences for needles to be spread"):
        make("niah_single_2", 1500, words, Haystack(str(path)))
    assert fits(words, make("niah_single_1", 1500, words, Haystack(str(path))).record(0))


def test_sentences_give_the_text_back(haystack):
    for words_wanted in (1, 17, 400, 5000):
        text = " ".join(haystack.sentences(words_wanted))
        assert len(text.split(" ")) == words_wanted
        assert " ".join(split_sentences(text)) == text
