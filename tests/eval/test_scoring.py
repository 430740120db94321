from __future__ import annotations

import pytest

from locks_hf.eval.ruler import score_all


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        (" 1234567.", ["1234567"], 100.0),
        ("1234567 and 7654321", ["1234567", "7654321"], 100.0),
        ("1234567, 1, 2", ["1234567", "7654321", "3333333", "4444444"], 25.0),
        ("nothing of the kind", ["1234567"], 0.0),
        ("", ["1234567"], 0.0),
        ("ABC-def", ["abc-DEF"], 100.0),
        ("123456", ["12345"], 100.0),
        ("12\x003", ["123"], 0.0),
        ("a\tb", ["a\nb"], 100.0),
    ],
)
def test_share_of_references_found(prediction, references, score):
    assert score_all(prediction, references) == score


@pytest.mark.parametrize("references", ["12345", []])
def test_references_are_a_list(references):
    with pytest.raises(ValueError, match="non-empty list"):
        score_all("12345", references)
