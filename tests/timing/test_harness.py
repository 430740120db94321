import pytest
import torch

from locks_hf.timing.clock import CpuClock, make_clock
from locks_hf.timing.harness import LEAD_IN, Compiler, Protocol, Session, check_finite, measure, settle, time_window
from locks_hf.timing.monitor import Sample

CPU = torch.device("cpu")
SHORT = Protocol(steps=4, windows=3, retries=2, settle_s=1.0, settle_steps=2)


class Ticking(CpuClock):
    """A clock whose steps take the milliseconds it is given, the last one for ever."""

    def __init__(self, *ms):
        super().__init__(CPU)
        self.now, self.pending = 0.0, list(ms)

    def step(self):
        self.now += self.pending.pop(0) if len(self.pending) > 1 else self.pending[0]

    def mark(self):
        return self.now

    def ms(self, start, end):
        return end - start


class Readings:
    """A monitor that says what it is given, the last for ever."""

    def __init__(self, *slowed):
        self.slowed = list(slowed)

    def sample(self):
        slowed = self.slowed.pop(0) if len(self.slowed) > 1 else self.slowed[0]
        return Sample("nvml", 1980, 3201, 40, 500.0, slowed)


def session_on(clock, logits=None):
    rewound = []
    return Session(clock.step, rewound.append, lambda: logits), rewound


def test_mean_and_sd_are_over_the_steps_of_all_windows():
    lead = (99.0,) * LEAD_IN
    # One step for the check, four to settle, then twelve in three windows.
    clock = Ticking(*(2.0,) * 5, *lead, *range(1, 5), *lead, *range(5, 9), *lead, *range(9, 13))
    session, rewound = session_on(clock)
    cell = measure(session, clock, Readings(""), SHORT)
    assert cell["ms_mean"] == pytest.approx(6.5)
    assert cell["ms_sd"] == pytest.approx(torch.arange(1.0, 13).std().item())
    assert cell["window_ms"] == [2.5, 6.5, 10.5]
    assert cell["steps"] == 12 and cell["dropped_windows"] == 0 and cell["throttled"] == ""
    assert cell["settled"] and cell["settle_ms"] == pytest.approx(8.0)
    assert cell["gpu"]["sm_mhz"] == 1980
    assert rewound == [1, 2, 2, *(4 + LEAD_IN,) * 3]  # after the check, each settling window and each timed one


def test_throttled_windows_are_dropped_and_repeated():
    clock = Ticking(1.0)
    session, _ = session_on(clock)
    cell = measure(session, clock, Readings("power cap", "", "power cap", "", ""), SHORT)
    assert cell["dropped_windows"] == 2 and cell["throttled"] == "" and cell["steps"] == 12


def test_windows_that_stay_throttled_are_kept_and_named():
    clock = Ticking(1.0)
    session, _ = session_on(clock)
    cell = measure(session, clock, Readings("thermal (hardware)"), SHORT)
    assert cell["dropped_windows"] == 2 and cell["throttled"] == "thermal (hardware)" and cell["steps"] == 12


def test_throttling_that_nobody_can_read_is_unknown():
    clock = Ticking(1.0)
    assert measure(session_on(clock)[0], clock, Readings(None), SHORT)["throttled"] is None


def test_clocks_settle_when_successive_windows_agree():
    clock = Ticking(3.0, 3.0, 2.0, 2.0, 1.99, 1.99)
    assert settle(session_on(clock)[0], clock, Readings(""), SHORT) == (True, pytest.approx(13.98))


def test_settling_gives_up_after_its_time():
    clock = Ticking(*(100.0, 200.0) * 20)
    clock.pending = [100.0 * (1 + i // 2 % 2) for i in range(40)]
    settled, spent = settle(session_on(clock)[0], clock, Readings(""), SHORT)
    assert not settled and 1000 <= spent < 1500


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_logits_that_are_not_finite_are_an_error_not_a_time(bad):
    clock = Ticking(1.0)
    session, _ = session_on(clock, torch.tensor([[0.0, bad]]))
    with pytest.raises(ValueError, match="logits are not finite"):
        measure(session, clock, Readings(""), SHORT)
    check_finite(session_on(clock, torch.zeros(1, 2))[0])


def test_a_window_times_each_step():
    clock = Ticking(*(99.0,) * LEAD_IN, 1.0, 2.0, 3.0, 4.0)
    times, sample = time_window(session_on(clock)[0], clock, Readings(""), 4)
    assert times == [1.0, 2.0, 3.0, 4.0] and sample.slowed == ""


@pytest.mark.parametrize("changes", ({"steps": 1}, {"windows": 0}, {"retries": -1}, {"settle_s": -1.0}), ids=str)
def test_protocols_without_a_window_are_refused(changes):
    with pytest.raises(ValueError, match="at least one window of two steps"):
        Protocol(**changes)


@pytest.mark.parametrize("mode", ("reduce-overhead", "max-autotune"))
def test_compile_modes_with_graphs_of_their_own_are_refused(mode):
    with pytest.raises(ValueError, match="captures CUDA graphs of its own"):
        Compiler("compiled", mode, CPU)


def test_devices_that_cannot_be_timed_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="need a CUDA device; on the CPU only --shape tiny runs"):
        make_clock("cpu", "glm-4-9b-1m")
    with pytest.raises(ValueError, match="no device 'gpu'"):
        make_clock("gpu", "tiny")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="there is no CUDA device"):
        make_clock("cuda", "tiny")


def test_gpus_older_than_ampere_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"Tesla T4 has compute capability 7\.5"):
        make_clock("cuda:0", "glm-4-9b-1m")
    with pytest.raises(ValueError, match="there is no device 'cuda:3': this machine has 1"):
        make_clock("cuda:3", "glm-4-9b-1m")
