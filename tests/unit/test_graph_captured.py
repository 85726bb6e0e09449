"""What the event of a captured graph holds, by what the device can tell."""

from __future__ import annotations

import pytest

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.codec import CODEC
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.memory import GIB, MIB


class ToldApart:
    """A graph of a device that tells instantiation and upload apart, and times them without the warm-up."""

    def __init__(self, graph):
        self._graph = graph
        self.instantiate_bytes, self.upload_bytes, self.duration_ns = 4 * MIB, 0, 1_234

    def __getattr__(self, name):
        return getattr(self._graph, name)


class Telling(SimulatedDevice):
    def capture(self, *given, **named):
        return ToldApart(super().capture(*given, **named))


@pytest.fixture
def captures():
    def run(device):
        boot = Bootstrap(journal=None, device=device, discover=False, progress=False)
        boot.run(CountingEngine(device=device, sizes=(2, 1)))
        return [captured for _, captured in boot.history.last("capture_graphs").captures]

    return run


def test_told_apart(captures):
    """Where the graph has the figures, the event has them, and its time is without the warm-up."""
    for captured in captures(Telling(8 * GIB)):
        assert (captured.instantiate_bytes, captured.upload_bytes, captured.duration_ns) == (4 * MIB, 0, 1_234)


def test_not_told(captures):
    """Where it has not, they are unknown, never 0."""
    for captured in captures(SimulatedDevice(8 * GIB)):
        assert (captured.instantiate_bytes, captured.upload_bytes) == (None, None)
        assert captured.duration_ns > 0


def test_older_journals():
    """A journal that was written before they existed is read: they are unknown."""
    line = (
        b'{"v":0,"run":"r","process":"p","rank":0,"attempt":1,"seq":0,"t":1,"kind":"graph_captured",'
        b'"payload":{"state":"capture_graphs","size":1,"pool":"0.1"}}'
    )
    captured = CODEC.decode(line).event
    assert (captured.size, captured.instantiate_bytes, captured.upload_bytes) == (1, None, None)
