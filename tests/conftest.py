"""Fixtures that several test folders share."""

import os
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_model


@pytest.fixture(scope="session")
def llama():
    """A two-layer Llama on "locks" with 4 query heads, 2 KV heads and head_dim 8; do not change it."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def dense_llama():
    """The weights of ``llama`` on "sdpa"."""
    return tiny_model("llama", "sdpa")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that nobody wrote reads as NaN, or as the largest integer."""

    def poisoning(allocate):
        def allocate_poison(*args, **kwargs):
            out = allocate(*args, **kwargs)
            if out.is_floating_point():
                return out.fill_(float("nan"))
            return out if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max)

        return allocate_poison

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real data for the evaluation harnesses: $LOCKS_TEST_DATA, or shared/data beside the checkout."""
    return Path(os.environ.get("LOCKS_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
