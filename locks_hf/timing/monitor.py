"""Clocks, temperature and throttling of the GPU, read from NVML, else from nvidia-smi, else not at all."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import asdict, dataclass

import torch

# NVML's clock event reasons that say the GPU runs slower than it could: power cap, hardware slowdown, software thermal,
# hardware thermal, power brake.
_SLOWED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}
_QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
_OLD_QUERY = _QUERY.replace("clocks_event_reasons", "clocks_throttle_reasons")


@dataclass(frozen=True)
class Sample:
    """One reading.

    Attributes:
        source: ``"nvml"``, ``"nvidia-smi"`` or ``"unknown"``.
        sm_mhz: Clock of the multiprocessors.
        memory_mhz: Clock of the memory.
        celsius: Temperature.
        watts: Power drawn.
        slowed: Why the GPU runs slower than it could, comma-separated; empty if it does not; ``None``: unknown.
    """

    source: str = "unknown"
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    celsius: int | None = None
    watts: float | None = None
    slowed: str | None = None

    def asdict(self) -> dict:
        """As JSON types."""
        return asdict(self)


def slowed_by(reasons: int) -> str:
    """The reasons of a bit mask that mean throttling, comma-separated."""
    return ", ".join(name for bit, name in _SLOWED.items() if reasons & bit)


class Monitor:
    """Reads one device.

    Args:
        device: The device; anything but CUDA reads as unknown.
    """

    def __init__(self, device: torch.device):
        self._handle = self._nvml = self._smi = None
        self._query = _QUERY
        self.driver: str | None = None
        if device.type != "cuda":
            return
        uuid = _uuid(device)
        # A driver without NVML in reach, such as in some containers, must not stop a measurement.
        with contextlib.suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            if uuid:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)
            self._nvml = pynvml
            version = pynvml.nvmlSystemGetDriverVersion()
            self.driver = version.decode() if isinstance(version, bytes) else version
        if self._nvml is None:
            self._smi = uuid or str(device.index or 0)
            self.driver = (self._ask("driver_version") or [None])[0]
            if self._ask(self._query) is None:
                self._query = _OLD_QUERY

    def sample(self) -> Sample:
        """Read the device now; never raises."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                return self._from_nvml()
        elif self._smi is not None and (row := self._ask(self._query)):
            return parse_smi(row)
        return Sample()

    def _from_nvml(self) -> Sample:
        nvml, handle = self._nvml, self._handle
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return Sample(
            "nvml",
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            slowed_by(int(reasons(handle))),
        )

    def _ask(self, query: str) -> list[str] | None:
        command = ["nvidia-smi", f"--id={self._smi}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        lines = done.stdout.strip().splitlines()
        return [part.strip() for part in lines[0].split(",")] if lines else None


def parse_smi(row: list[str]) -> Sample:
    """A reading from the fields of one line of ``nvidia-smi``; what is not a number there is unknown."""

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    def whole(text: str) -> int | None:
        value = number(text)
        return None if value is None else int(value)

    try:
        sm, memory, celsius, watts, reasons = row
    except ValueError:
        return Sample()
    try:
        slowed = slowed_by(int(reasons, 16))
    except ValueError:
        slowed = None
    return Sample("nvidia-smi", whole(sm), whole(memory), whole(celsius), number(watts), slowed)


def _uuid(device: torch.device) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
