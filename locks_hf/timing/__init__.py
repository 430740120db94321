"""Timing of decode steps, prefill and kernels without a serving engine: ``python -m locks_hf.timing``.

Data flows one way: a shape gives a model, a fill gives its caches a context, an arm attends it, the harness times the
step, the store keeps the cell, the report reads the store. README.md in this folder has the protocol.
"""
