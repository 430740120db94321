"""Evaluation harnesses: ``python -m locks_hf.eval``."""
