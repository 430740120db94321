import sys
import types

import pytest
import torch

from locks_hf.timing import monitor
from locks_hf.timing.monitor import Monitor, Sample, parse_smi, slowed_by


def test_the_cpu_is_unknown():
    assert Monitor(torch.device("cpu")).sample() == Sample()


@pytest.mark.parametrize(
    ("reasons", "text"),
    ((0x0, ""), (0x1, ""), (0x4, "power cap"), (0x64, "power cap, thermal (software), thermal (hardware)")),
)
def test_only_reasons_that_slow_the_gpu_count(reasons, text):
    assert slowed_by(reasons) == text


def test_a_line_of_nvidia_smi_is_read():
    row = ["1980", "3201", "45", "512.34", "0x0000000000000004"]
    assert parse_smi(row) == Sample("nvidia-smi", 1980, 3201, 45, 512.34, "power cap")


@pytest.mark.parametrize("row", ([], ["1"], ["[N/A]"] * 5), ids=str)
def test_lines_that_say_nothing_are_unknown(row):
    assert parse_smi(row).slowed is None


@pytest.fixture
def gpu(monkeypatch):
    properties = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda", 0)


def test_nvml_is_asked_for_the_device_by_its_uuid(gpu, monkeypatch):
    asked = []
    nvml = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or "handle",
        nvmlDeviceGetClockInfo=lambda handle, kind: 1000 * kind,
        nvmlDeviceGetTemperature=lambda handle, kind: 50,
        nvmlDeviceGetPowerUsage=lambda handle: 400_500,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x8,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = Monitor(gpu)
    assert asked == ["GPU-1234"] and reader.driver == "580.1"
    assert reader.sample() == Sample("nvml", 1000, 2000, 50, 400.5, "hardware slowdown")


def test_without_nvml_and_nvidia_smi_nothing_is_known(gpu, monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(monitor.subprocess, "run", missing)
    reader = Monitor(gpu)
    assert reader.driver is None and reader.sample() == Sample()


def test_nvidia_smi_of_older_drivers_is_asked_in_its_words(gpu, monkeypatch):
    def run(command, **kwargs):
        query = next(part for part in command if part.startswith("--query-gpu="))
        assert "--id=GPU-1234" in command
        if "event_reasons" in query:
            raise monitor.subprocess.CalledProcessError(1, command)
        line = "550.1" if "driver_version" in query else "1980, 3201, 45, 512.3, 0x0000000000000000"
        return types.SimpleNamespace(stdout=line + "\n")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(monitor.subprocess, "run", run)
    reader = Monitor(gpu)
    assert reader.driver == "550.1"
    assert reader.sample() == Sample("nvidia-smi", 1980, 3201, 45, 512.3, "")
