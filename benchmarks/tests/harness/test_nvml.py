"""The management library on a stand-in that fills what it is given."""

import ctypes
import types

import pytest

from benchmarks.harness import nvml

UUID = "01234567-89ab-cdef-0123-456789abcdef"


class Library:
    """Knows one GPU, at 1512 MHz, that has used 123.456 J."""

    def __init__(self, failing=""):
        self.failing, self.asked = failing, []

    def __getattr__(self, name):
        def call(*arguments):
            self.asked.append((name, arguments[:-1]))
            if name == self.failing:
                return 6
            if name == "nvmlDeviceGetHandleByUUID":
                arguments[-1]._obj.value = 77
                return 0 if arguments[0] == f"GPU-{UUID}".encode() else 6
            if name != "nvmlInit_v2":
                assert arguments[0].value == 77
                values = {
                    "nvmlDeviceGetClockInfo": 1512,
                    "nvmlDeviceGetTotalEnergyConsumption": 123456,
                }
                arguments[-1]._obj.value = values[name]
            return 0

        return call


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
def test_the_gpu_of_a_uuid_is_read(library, uuid):
    meter = nvml.Meter(uuid)
    assert meter.sm_clock_mhz() == 1512
    assert meter.joules() == pytest.approx(123.456)
    asked = dict(library.asked)
    assert asked["nvmlDeviceGetClockInfo"][1] == 1  # NVML_CLOCK_SM


def test_the_gpu_is_the_first_that_torch_sees(library, monkeypatch):
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda number: types.SimpleNamespace(uuid=UUID if number == 0 else "another"),
    )
    assert nvml.current().sm_clock_mhz() == 1512


@pytest.mark.parametrize(
    "failing",
    [
        "nvmlInit_v2",
        "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetClockInfo",
    ],
)
def test_what_the_library_refuses_is_named(monkeypatch, failing):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(failing))
    with pytest.raises(nvml.Unreachable, match=f"{failing}: error 6"):
        nvml.Meter(UUID)


def test_a_card_that_counts_no_energy_has_a_clock(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library("nvmlDeviceGetTotalEnergyConsumption"))
    meter = nvml.Meter(UUID)
    assert (meter.sm_clock_mhz(), meter.joules()) == (1512, None)


def test_another_gpu_is_not_taken_for_it(library):
    with pytest.raises(nvml.Unreachable, match="nvmlDeviceGetHandleByUUID"):
        nvml.Meter("ffffffff")


def test_a_machine_without_the_library(monkeypatch):
    def absent(name):
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(nvml.Unreachable, match=r"libnvidia-ml.so.1: cannot open"):
        nvml.Meter(UUID)
