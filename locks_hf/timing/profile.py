"""Where a step's time goes: the kernels of a few replays, by what they are for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from .clock import Clock
from .harness import Session

# The first that a kernel's name matches. Quest's score is a matrix product, which names cannot tell from a weight's.
_TERMS = (
    ("dense", r"(?i)flash|fmha|sdpa|batchdecode|batchprefill|persistent.*paged|mergestates"),
    ("attend", r"_attend_|\battend_kernel|_end_kernel"),
    ("score", r"\bscore_kernel|_score_kernel|_prepare_kernel"),
    (
        "select",
        r"\bcombine_kernel|_combine_kernel|_normalizer_kernel|_key_kernel|_top_pages_kernel|_search_pages_kernel",
    ),
    ("append", r"_append_kernel|_summarize_kernel"),
    ("weights", r"(?i)_linear_kernel|gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|_mm_|_mm\b"),
)
TERMS = (*(name for name, _ in _TERMS), "other", "gaps")
_TOP = 30  # kernels listed one by one

Event = tuple[str, float, float]


def term_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    return next((term for term, pattern in _TERMS if re.search(pattern, kernel)), "other")


def summarise_events(events: Sequence[Event], steps: int) -> dict | None:
    """Microseconds a step by term.

    Args:
        events: Name, start and duration in microseconds of each kernel, in any order.
        steps: Steps that they are of.

    Returns:
        ``span_us`` from the first start to the last end and ``kernels``, both a step; ``terms_us``, where of kernels
        that overlap the later one counts from the end of the other, with what no kernel filled under ``gaps``; ``top``,
        the kernels with the most time: name, launches and microseconds a step.
        ``None`` if there are no events.
    """
    if not events:
        return None
    span = max(start + duration for _, start, duration in events) - min(start for _, start, _ in events)
    by_name: dict[str, list[float]] = defaultdict(list)
    last = float("-inf")
    for name, start, duration in sorted(events, key=lambda event: event[1]):
        # A kernel may be launched while the one before it ends, and wait: it counts from there.
        end = max(last, start + duration)
        by_name[name].append(end - max(start, last))
        last = end
    terms = dict.fromkeys(TERMS, 0.0)
    for name, durations in by_name.items():
        terms[term_of(name)] += sum(durations) / steps
    busy = sum(terms.values())
    terms["gaps"] = max(0.0, span / steps - busy)
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:_TOP]
    return {
        "span_us": span / steps,
        "kernels": len(events) / steps,
        "terms_us": terms,
        "top": [[name[:160], len(durations) / steps, sum(durations) / steps] for name, durations in top],
    }


def profile_steps(session: Session, clock: Clock, steps: int = 3) -> dict | None:
    """Profile a few steps of a session; ``None`` where there is no GPU or its profiler gives nothing."""
    if clock.device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    session.rewind()
    session.step()
    clock.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            session.step()
        clock.wait()
    session.rewind()
    events = [
        (event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return summarise_events(events, steps)
