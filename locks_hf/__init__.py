"""Locks for Hugging Face Transformers: long-context decoding that reads the right few pages of the KV cache."""

from . import attention  # noqa: F401  registers the attention implementation "locks"
from .cache import LocksCache
from .config import LocksConfig
from .patching import patch, unpatch
from .stats import CacheStats

__all__ = ["CacheStats", "LocksCache", "LocksConfig", "patch", "unpatch"]
__version__ = "0.1.0"
