"""How steps are captured and timed: CUDA graphs and events, or plain calls and the host's clock.

The CPU clock exists so that every command can be tried and tested without a GPU; what it reads measures nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Runs of a step before it is captured: kernels are compiled and libraries pick their algorithms in them.
WARM_UP = 3


class CpuClock:
    """Plain calls and ``perf_counter``."""

    is_measurement = False

    def __init__(self, device: torch.device):
        self.device = device

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Run the step ``WARM_UP`` times and return it."""
        for _ in range(WARM_UP):
            step()
        return step

    def mark(self) -> float:
        """A point in time."""
        return time.perf_counter()

    def ms(self, start: float, end: float) -> float:
        """Milliseconds between two marks."""
        return (end - start) * 1e3

    def wait(self) -> None:
        """Wait for everything that was started."""

    def reset_peak(self) -> None:
        """Start to watch the memory."""

    def peak_bytes(self) -> int | None:
        """The most bytes allocated since :meth:`reset_peak`, where it is known."""
        return None

    def release(self) -> None:
        """Give memory that is not in use back to the device."""


class CudaClock:
    """CUDA graphs and CUDA events on one device."""

    is_measurement = True

    def __init__(self, device: torch.device):
        self.device = device
        # One for all cells: once three streams have been used beside the default one, every graph of the process takes
        # 3 to 4 % longer, those captured before as well (H200, driver 580).
        self._stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Run the step ``WARM_UP`` times and capture one more into a graph, which does not run it.

        Returns:
            The graph's replay.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        return graph.replay

    def mark(self) -> torch.cuda.Event:
        """A point in the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds between two marks that have been reached."""
        return start.elapsed_time(end)

    def wait(self) -> None:
        """Wait for everything that was started."""
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Start to watch the memory."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """The most bytes allocated since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def release(self) -> None:
        """Give memory that is not in use back to the device."""
        torch.cuda.empty_cache()


Clock = CpuClock | CudaClock


def make_clock(name: str, shape_name: str) -> Clock:
    """The clock of a device.

    Args:
        name: ``"cuda"``, ``"cuda:<index>"`` or ``"cpu"``.
        shape_name: The CPU is for the shape ``tiny`` alone.

    Raises:
        ValueError: If there is no CUDA device, it is older than sm_80, or the CPU is asked for with another shape.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no device {name!r}: use cuda, cuda:1 or cpu") from error
    if device.type == "cpu":
        if shape_name != "tiny":
            raise ValueError(
                f"timings of {shape_name} need a CUDA device; on the CPU only --shape tiny runs, to try a command out"
            )
        return CpuClock(device)
    if device.type != "cuda":
        raise ValueError(f"timings run on cuda or, to try them out, on cpu, not on {name!r}")
    if not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA device that this torch can use (python -m locks_hf.env_report says more); "
            "--device cpu --shape tiny tries the commands out, without measuring anything"
        )
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(device)
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}: timings "
            "need 8.0 or later, as the kernels do"
        )
    return CudaClock(device)
