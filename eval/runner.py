"""The loop over batches and arms: skip what is done, write as it goes, survive running out of GPU memory."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from tqdm import tqdm

from .arms import Arm
from .engine import Engine
from .ruler import Record, score_all
from .store import RunStore


def make_batches(tasks: Sequence[str], limit: int, batch_size: int) -> list[list[tuple[str, int]]]:
    """Batches of (task, record index) of one length.

    Tasks are mixed, record 0 of every task first, so that a batch can hold more than ``limit`` records. The
    composition follows from the arguments alone, whatever has been done before.
    """
    keys = [(task, index) for index in range(limit) for task in tasks]
    return [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]


def run_length(
    length: int,
    batches: Sequence[Sequence[tuple[str, int]]],
    arms: Sequence[Arm],
    make_record: Callable[[str, int], Record],
    engine: Engine,
    store: RunStore,
    progress: tqdm,
) -> int:
    """Answer all records of one length under all arms and store what is not stored yet.

    A batch of which anything is missing is computed whole, so that a resumed run computes what an
    uninterrupted one does; only the missing samples are written. A batch that does not fit into GPU memory is
    halved, and so are the ones after it.

    Args:
        length: Length of the records in tokens.
        batches: Batches of (task, record index).
        arms: Arms, in the order they are run in.
        make_record: Makes the record of a task and index.
        engine: Answers the prompts.
        store: Where samples go.
        progress: Bar that counts samples.

    Returns:
        Number of samples that could not be made because a record alone ran out of GPU memory; the store's
        ``errors.jsonl`` has them.
    """
    queue = deque(batches)
    largest = max(map(len, batches))
    failed = set()
    while queue:
        batch = queue.popleft()
        if len(batch) > largest:
            half = (len(batch) + 1) // 2
            queue.extendleft((batch[half:], batch[:half]))
            continue
        missing = {}
        for arm in arms:
            places = [(task, length, index, arm) for task, index in batch]
            rows = [row for row, place in enumerate(places) if place not in store.done and place not in failed]
            if rows:
                missing[arm] = rows
        if not missing:
            continue
        records = [make_record(task, index) for task, index in batch]
        prefill = arm = None
        try:
            prefill = engine.prefill([record.text for record in records])
            for arm, rows in sorted(missing.items(), key=lambda item: item[0].run_order):
                decoded = engine.decode(prefill, arm)
                for row in rows:
                    store.add(
                        {
                            "task": records[row].task,
                            "length": length,
                            "index": records[row].index,
                            **asdict(arm),
                            "prediction": decoded.texts[row],
                            "references": list(records[row].references),
                            "score": score_all(decoded.texts[row], records[row].references),
                            "tokens_attended": decoded.tokens_attended,
                            "bytes_read_per_step": decoded.bytes_read_per_step,
                        }
                    )
                    progress.update()
            continue
        except torch.OutOfMemoryError as error:
            if len(batch) > 1:
                largest = (len(batch) + 1) // 2
                progress.write(
                    f"{len(batch)} records of {length} tokens do not fit into GPU memory: halving the batch",
                    file=sys.stderr,
                )
            else:
                for lost in list(missing) if prefill is None else [arm]:
                    place = {"task": records[0].task, "length": length, "index": records[0].index}
                    store.add_error({**place, **asdict(lost), "error": str(error)})
                    failed.add((*place.values(), lost))
        # After the handler: while it runs, the exception keeps the tensors of its frames alive.
        queue.appendleft(batch)
        del prefill
        gc.collect()
        torch.cuda.empty_cache()
    return len(failed)
