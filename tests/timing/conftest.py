"""Fixtures of the timing tests."""

import pytest
import torch

from locks_hf.timing.shapes import make_model, resolve_shape


@pytest.fixture(scope="session")
def tiny_shape():
    return resolve_shape("tiny")


@pytest.fixture(scope="session")
def tiny(tiny_shape):
    """A random model of the shape tiny on the CPU; leave it as it is."""
    return make_model(tiny_shape, torch.device("cpu"), torch.float32, seed=0)
