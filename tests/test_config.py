"""Configuration values: what is refused, and that the message names the value and the fix."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from locks_hf import LocksCache, LocksConfig
from locks_hf.config import BASIS_BITS, COMBINE_RULES
from locks_hf.kernels import backend
from tests.helpers import feed, random_tokens, small_cache, tiny_model

BAD = (
    ({"rank": 0}, "rank must be from 1 to page_size - 1 = 15, got 0"),
    ({"rank": 16}, "rank must be from 1 to page_size - 1 = 15, got 16"),
    ({"rank": -3}, "rank must be from 1 to page_size - 1 = 15, got -3"),
    ({"rank": 4, "page_size": 4}, "rank must be from 1 to page_size - 1 = 3, got 4"),
    ({"rank": 8.0}, "rank must be an int, got 8.0"),
    ({"rank": True}, "rank must be an int, got True"),
    ({"rank": "8"}, "rank must be an int, got '8'"),
    ({"rank": None}, "rank must be an int, got None"),
    ({"budget": 31}, "budget must be at least two pages = 32 tokens"),
    ({"budget": 0}, "always attended), got 0"),
    ({"budget": -64}, "budget must be at least two pages = 32 tokens"),
    ({"budget": 127, "page_size": 64}, "budget must be at least two pages = 128 tokens"),
    ({"budget": 64.0}, "budget must be an int, got 64.0"),
    ({"budget": 0.5}, "budget must be an int, got 0.5"),
    ({"budget": "64"}, "budget must be an int, got '64'"),
    ({"page_size": 12}, "page_size must be a power of two from 4 to 64, got 12"),
    ({"page_size": 2, "rank": 1}, "page_size must be a power of two from 4 to 64, got 2"),
    ({"page_size": 256}, "page_size must be a power of two from 4 to 64, got 256"),
    ({"page_size": 0}, "page_size must be a power of two from 4 to 64, got 0"),
    ({"page_size": -16}, "page_size must be a power of two from 4 to 64, got -16"),
    ({"page_size": 16.0}, "page_size must be an int, got 16.0"),
    ({"basis_bits": 3}, "basis_bits must be one of (2, 4, 8, 16), got 3"),
    ({"basis_bits": "int4"}, "basis_bits must be an int, got 'int4'"),
    ({"refit": 1}, "refit must be True or False, got 1"),
    ({"refit": None}, "refit must be True or False, got None"),
    ({"combine": "mean"}, "combine must be one of ('share', 'max', 'mass'), got 'mean'"),
    ({"combine": None}, "combine must be one of ('share', 'max', 'mass'), got None"),
    ({"combine": ["share"]}, "combine must be one of ('share', 'max', 'mass'), got ['share']"),
    ({"max_cache_len": 0}, "max_cache_len must be at least 1 token, got 0"),
    ({"max_cache_len": -1}, "max_cache_len must be at least 1 token, got -1"),
    ({"max_cache_len": 1.5}, "max_cache_len must be an int or None, got 1.5"),
    ({"max_cache_len": True}, "max_cache_len must be an int or None, got True"),
)


def name_of(value):
    return "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None


@pytest.mark.parametrize(("values", "message"), BAD, ids=name_of)
def test_bad_values_are_refused_wherever_they_are_given(values, message):
    for make in (LocksConfig, LocksCache, LocksCache().fork):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**values)


def test_the_defaults_are_the_papers_setting():
    config = LocksConfig()
    assert (config.rank, config.page_size, config.basis_bits, config.combine) == (8, 16, 4, "share")
    assert LocksCache().locks_config == config


@pytest.mark.parametrize(
    "values",
    (
        {"rank": 1},
        {"rank": 15},
        {"rank": 31, "page_size": 32},
        {"budget": 32},
        {"budget": 10**9},
        {"page_size": 4, "rank": 3, "budget": 8},
        {"page_size": 64, "budget": 128},
        *({"basis_bits": bits} for bits in BASIS_BITS),
        *({"combine": rule} for rule in COMBINE_RULES),
        {"refit": False},
        {"max_cache_len": 1},
    ),
    ids=name_of,
)
def test_the_ends_of_the_ranges_are_accepted(values):
    assert {**vars(LocksConfig()), **values} == vars(LocksCache(**values).locks_config)


@pytest.mark.parametrize(("budget", "slots"), ((32, 2), (33, 3), (47, 3), (48, 3), (64, 4), (2048, 128)))
def test_budgets_round_up_to_whole_pages(budget, slots):
    assert LocksConfig(budget=budget).page_slots == slots


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LocksCache().locks_config.rank = 3


def test_positional_arguments_are_rank_and_budget_alone():
    config = LocksCache(4, 64).locks_config
    assert (config.rank, config.budget) == (4, 64)
    with pytest.raises(TypeError):
        LocksCache(4, 64, 16)


# Fork and reconfigure


def test_fork_names_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"fork does not know \['bits', 'heads'\]; it can change .*'basis_bits'"):
        LocksCache().fork(bits=4, heads=2)


def test_a_fork_into_too_small_a_capacity_is_refused(llama):
    cache = small_cache()
    feed(llama, cache, random_tokens(1, 40))
    with pytest.raises(ValueError, match="max_cache_len is 39 tokens, but a row needs 40"):
        cache.fork(max_cache_len=39)


@pytest.mark.parametrize(("values", "message"), [bad for bad in BAD if set(bad[0]) <= {"budget"}], ids=name_of)
def test_bad_values_are_refused_by_reconfigure_and_change_nothing(values, message):
    cache = LocksCache(budget=64)
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.reconfigure(**values)
    assert cache.locks_config == LocksConfig(budget=64)


def test_reconfigure_changes_what_later_steps_read(llama):
    ids, first, second = random_tokens(2, 40), random_tokens(2, 3, seed=1), random_tokens(2, 3, seed=2)
    cache, fork = small_cache(), small_cache()
    for each in (cache, fork):
        feed(llama, each, ids, *first.split(1, dim=1))
    fork = fork.fork(budget=20, combine="mass")
    cache.reconfigure(budget=20, combine="mass")
    cache.reset_stats()
    assert torch.equal(
        feed(llama, cache, *second.split(1, dim=1)),
        feed(llama, fork, *second.split(1, dim=1)),
    )
    assert cache.stats().tokens_attended == fork.stats().tokens_attended > 12


def test_reconfigure_before_the_first_token(llama):
    ids = random_tokens(1, 40)
    cache = small_cache()
    cache.reconfigure(budget=20)
    chunks = (ids, *random_tokens(1, 3).split(1, dim=1))
    assert torch.equal(feed(llama, cache, *chunks), feed(llama, small_cache(budget=20), *chunks))


# Selector, config and the model that turns up


@pytest.mark.parametrize("selector", ("snapkv", "", None, 3, LocksCache))
def test_unknown_selectors_are_refused(selector):
    expected = rf"selector must be one of \['full', 'locks', 'oracle', 'quest'.*\].*got {re.escape(repr(selector))}"
    for make in (lambda: LocksCache(selector=selector), lambda: LocksCache().fork(selector=selector or "")):
        with pytest.raises(ValueError, match=expected if selector is not None else r"selector must be one of"):
            make()


@pytest.mark.parametrize("config", ("llama", {"model_type": "llama"}, 3))
def test_a_config_that_is_none_is_refused(config):
    with pytest.raises(ValueError, match=r"as in config=model\.config, got"):
        LocksCache(config=config)


def test_the_model_in_place_of_its_config_is_refused(llama):
    with pytest.raises(ValueError, match=r"as in config=model\.config, got LlamaForCausalLM"):
        LocksCache(config=llama)


def test_a_rank_above_head_dim_is_refused():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="rank 9 exceeds head_dim 8: use a rank of at most 8"):
        feed(model, LocksCache(rank=9, budget=64), random_tokens(1, 5))


@pytest.mark.parametrize("head_dim", (12, 4, 264))
def test_a_head_dim_without_a_kernel_is_refused(head_dim):
    model = tiny_model("llama", head_dim=head_dim)
    with pytest.raises(ValueError, match=rf"head_dim {head_dim} has no kernel: Locks supports multiples of 8 from 8"):
        feed(model, small_cache(), random_tokens(1, 5))


def test_a_dtype_without_a_kernel_is_refused():
    model = tiny_model("llama").double()
    with pytest.raises(ValueError, match=r"torch\.float64 have no kernel: load the model in one of float32, bfloat16"):
        feed(model, small_cache(), random_tokens(1, 5))


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch):
    monkeypatch.setenv("LOCKS_KERNELS", "cutlass")
    with pytest.raises(ValueError, match=r"LOCKS_KERNELS must be one of \('auto', 'reference'\), got 'cutlass'"):
        backend.use_triton(torch.device("cpu"))


def test_numbers_of_numpy_are_named_as_such():
    with pytest.raises(ValueError, match=r"rank must be an int, got np\.int64\(8\)"):
        LocksCache(rank=np.int64(8))


def test_a_models_configuration_goes_by_name():
    config = tiny_model("llama").config
    with pytest.raises(ValueError, match=r"by name: LocksCache\(config=model\.config\)"):
        LocksCache(config)
