"""Factories of the command line: what they may ask for, and which device wins."""

from __future__ import annotations

import pytest

from startup_fsm import launch
from startup_fsm.budget import Knobs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import EngineImportError
from startup_fsm.memory import GIB

FACTORIES = """
import functools
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine

def asks(device):
    return CountingEngine(device=device)

def wraps(device):
    other = SimulatedDevice(device.snapshot().total_bytes // 2)
    return CountingEngine(device=other), {"device": other}

def brings():
    device = SimulatedDevice(4 << 30)
    return CountingEngine(device=device), {"device": device, "engine": "mine"}

def has_one(device="cuda"):
    assert device == "cuda"
    return plain()

bound = functools.partial(asks, device=SimulatedDevice(4 << 30))

def supplied(function):
    @functools.wraps(function)
    def call():
        return function(device=SimulatedDevice(4 << 30))
    return call

@supplied
def decorated(device):
    return CountingEngine(device=device)

def by_place(*device, **more):
    assert not device and not more
    return plain()

def may(device=None):
    return CountingEngine(device=device)

def plain():
    return CountingEngine(device=SimulatedDevice(4 << 30))
"""


@pytest.fixture(autouse=True)
def factories(tmp_path, monkeypatch):
    """A module of factories in the working directory."""
    (tmp_path / "some_factories.py").write_text(FACTORIES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_factory_that_asks_gets_the_device_of_the_start():
    """It is the one that the start then uses."""
    engine, options = launch.made("some_factories:asks", "sim")

    assert options["device"] is engine.device
    assert engine.device.kind == "simulated"


def test_a_factory_may_put_its_own_in_place_of_what_it_got():
    """What it returns wins: it has seen the other."""
    engine, options = launch.made("some_factories:wraps", "sim")

    assert options["device"] is engine.device
    assert engine.device.snapshot().total_bytes == 40 * GIB


def test_a_device_by_name_wins_over_one_that_a_factory_brings():
    """It was typed; without it the factory decides."""
    engine, options = launch.made("some_factories:brings")
    assert isinstance(options["device"], SimulatedDevice)
    assert options["device"] is engine.device

    _, options = launch.made("some_factories:brings", "sim")
    assert options == {"device": "sim", "engine": "mine"}


def test_a_factory_that_asks_for_nothing_gets_nothing():
    """As before."""
    engine, options = launch.made("some_factories:plain")

    assert isinstance(engine, CountingEngine)
    assert options == {}


@pytest.mark.parametrize("name", ["has_one", "bound", "decorated", "by_place"])
def test_a_factory_with_a_device_of_its_own_keeps_it(name):
    """A default, a bound argument, a decorator that supplies it, or a name for any number of things ask for nothing."""
    engine, options = launch.made(f"some_factories:{name}")

    assert options == {}
    assert engine.device.snapshot().total_bytes == 4 * GIB


def test_a_factory_that_may_have_it_gets_it():
    """None as the default is no device."""
    engine, options = launch.made("some_factories:may", "sim")

    assert options["device"] is engine.device


def test_a_device_that_is_not_there_is_said_before_the_factory_runs():
    """One sentence, with what to do."""
    with pytest.raises(EngineImportError, match="torch sees no CUDA device here") as caught:
        launch.made("some_factories:asks", "cuda")

    assert caught.value.hint == "use the device sim"


def test_a_share_that_was_typed_wins_over_bytes_of_the_factory():
    """Else it would be taken and change nothing."""
    options = {"knobs": Knobs(requested_bytes=GIB, retries=2), "device": SimulatedDevice(4 * GIB), "journal": None}
    boot = launch.bootstrap_for("m:f", options, journal="runs", mirror=False, utilization=0.5)

    assert boot.knobs == Knobs(utilization=0.5, retries=2)
    boot = launch.bootstrap_for("m:f", options, journal="runs", mirror=False, kv_cache_memory_bytes=5)
    assert boot.knobs == Knobs(requested_bytes=GIB, retries=2, kv_cache_memory_bytes=5)
