from __future__ import annotations

import pytest

from locks_hf.eval.arms import Arm, make_arms
from locks_hf.selectors import SELECTORS


def test_settings_that_do_not_matter_collapse():
    arms = make_arms(["full", "oracle", "quest"], [64, 128], [8, 4, 2], [4, 8], [True, False])
    assert arms == [
        Arm("full"),
        Arm("oracle", budget=64),
        Arm("oracle", budget=128),
        Arm("quest", budget=64),
        Arm("quest", budget=128),
    ]


def test_budgets_of_the_same_pages_are_one_arm():
    for budgets in ([70, 80, 81], [81, 80, 70]):
        assert [arm.budget for arm in make_arms(["quest"], budgets, [8], [4], [True])] == [80, 81]


def test_locks_sweeps_everything():
    arms = make_arms(["locks", "locks"], [64, 64], [8, 4], [4, 16], [True, False])
    assert len(arms) == len(set(arms)) == 8
    assert {(arm.rank, arm.basis_bits, arm.refit, arm.budget) for arm in arms} == {
        (rank, bits, refit, 64) for rank in (8, 4) for bits in (4, 16) for refit in (True, False)
    }


def test_every_selector_makes_an_arm():
    arms = make_arms(list(SELECTORS), [64], [8], [4], [True])
    assert {arm.selector for arm in arms} == set(SELECTORS)
    assert arms[0] == Arm("full")
    assert arms[-1] == Arm("quest", budget=64)


def test_order_does_not_depend_on_the_command():
    one = make_arms(["quest", "locks", "full"], [128, 64], [4, 8], [4], [False, True])
    two = make_arms(["full", "quest", "locks"], [64, 128], [8, 4], [4], [True, False])
    assert one == two


def test_cache_settings_and_labels():
    assert Arm("full").cache_settings() == {"selector": "full"}
    assert Arm("quest", budget=64).cache_settings() == {"selector": "quest", "budget": 64}
    arm = Arm("locks", 8, 4, False, 64)
    assert arm.cache_settings() == {"selector": "locks", "rank": 8, "basis_bits": 4, "refit": False, "budget": 64}
    assert [a.label for a in (Arm("full"), arm, Arm("locks", 2, 16, True, 64))] == [
        "full",
        "locks r8i4",
        "locks r2i16 refit",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selectors": ["full", "best"]}, "unknown selector 'best'; there are: full, locks, oracle, quest"),
        ({"budgets": [64, 31]}, "at least two pages = 32 tokens.*got 31"),
        ({"selectors": ["full"], "budgets": [0]}, "got 0"),
        ({"ranks": [16]}, "rank must be from 1 to page_size - 1 = 15, got 16"),
        ({"basis_bits": [3]}, "basis_bits must be one of .* got 3"),
    ],
)
def test_bad_settings(changed, message):
    settings = {"selectors": ["locks"], "budgets": [64], "ranks": [8], "basis_bits": [4], "refits": [True]}
    with pytest.raises(ValueError, match=message):
        make_arms(**{**settings, **changed})
