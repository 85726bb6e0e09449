"""NVML, when it is missing, tells nothing, shows pids of the host, or is asked about a slice of a device."""

from __future__ import annotations

import os
import sys
import types

import attrs
import pytest

from startup_fsm.devices.nvml import PROBE_BYTES, Nvml
from startup_fsm.memory import GIB, MIB

UUID = "6f1e8d0a-0000-1111-2222-333344445555"
OTHER = 4_242


class NVMLError(Exception):
    """What pynvml raises."""


@attrs.define
class Board:
    """
    A device as NVML shows it.

    Attributes:
        bytes: By pid; None where NVML does not tell.
        name: The only name that it has a handle for.
        has_v2: Whether this NVML knows the second version of its memory figures.
        broken: Names of calls that fail.
    """

    bytes: dict[int, int | None] = attrs.field(factory=dict)
    name: str = f"GPU-{UUID}"
    has_v2: bool = True
    broken: set[str] = attrs.field(factory=set)

    def module(self):
        """A pynvml for this board."""
        made = types.ModuleType("pynvml")
        made.NVMLError = NVMLError
        if self.has_v2:
            made.nvmlMemory_v2 = 2
        for call in ("nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"):
            setattr(made, call, self._checked(call))
        made.nvmlDeviceGetComputeRunningProcesses = self._checked("processes")
        return made

    def _checked(self, call):
        def run(*given, **named):
            if call in self.broken:
                raise NVMLError(f"{call} failed")
            return getattr(self, f"_{call}")(*given, **named)

        return run

    def _nvmlInit(self):  # noqa: N802 - named after the call
        return None

    def _nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802 - named after the call
        if name != self.name:
            raise NVMLError("Not Found")
        return "handle"

    def _nvmlDeviceGetMemoryInfo(self, handle, version=1):  # noqa: N802 - named after the call
        figures = types.SimpleNamespace(total=80 * GIB, used=3 * GIB, free=77 * GIB)
        if version == 2:
            figures.reserved = GIB
        return figures

    def _processes(self, handle):
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.bytes.items()]

    def allocates(self, *pids):
        """An `allocate` that lets these processes grow."""

        def allocate(size):
            for pid in pids:
                self.bytes[pid] += size

            def release():
                for pid in pids:
                    self.bytes[pid] -= size

            return release

        return allocate


@pytest.fixture
def board(monkeypatch):
    """Puts a board's pynvml in place and gives the Nvml that asks it."""

    def put(made):
        monkeypatch.setitem(sys.modules, "pynvml", made.module())
        return Nvml(UUID)

    return put


class TestMissing:
    def test_no_library(self, monkeypatch):
        """Without nvidia-ml-py there is nothing to ask, and it says so."""
        monkeypatch.setitem(sys.modules, "pynvml", None)
        nvml = Nvml(UUID)
        nvml.find_own(pytest.fail)
        assert nvml.trouble == nvml.own_source == "nvidia-ml-py is not installed"
        assert (nvml.memory(), nvml.processes(), nvml.own_pid) == (None, {}, None)

    def test_no_driver(self, board):
        """Without a driver that answers the same, with NVML's words."""
        nvml = board(Board(broken={"nvmlInit"}))
        assert nvml.trouble == "NVML: nvmlInit failed"
        assert (nvml.memory(), nvml.processes()) == (None, {})

    def test_no_such_device(self, board):
        """A device that NVML does not know is trouble, not an error."""
        assert board(Board(name="GPU-another")).trouble == "NVML: Not Found"


class TestMemory:
    def test_second_version(self, board):
        """What the driver reserves is apart where NVML tells it."""
        memory = board(Board()).memory()
        assert (memory.total, memory.used, memory.free, memory.reserved) == (80 * GIB, 3 * GIB, 77 * GIB, GIB)

    def test_first_version(self, board):
        """It is unknown where NVML does not."""
        assert board(Board(has_v2=False)).memory().reserved is None

    def test_refused(self, board):
        """A call that fails gives no figures and no processes."""
        nvml = board(Board(broken={"nvmlDeviceGetMemoryInfo", "processes"}))
        assert (nvml.memory(), nvml.processes()) == (None, {})


class TestHandle:
    @pytest.mark.parametrize("given", [UUID, f"GPU-{UUID}"])
    def test_device(self, monkeypatch, given):
        """A whole device is found with or without the prefix."""
        monkeypatch.setitem(sys.modules, "pynvml", Board().module())
        assert Nvml(given).trouble is None

    @pytest.mark.parametrize("given", [UUID, f"MIG-{UUID}"])
    def test_slice(self, monkeypatch, given):
        """A MIG slice, whose UUID torch prints like that of a device, is found as a slice."""
        monkeypatch.setitem(sys.modules, "pynvml", Board(name=f"MIG-{UUID}").module())
        assert Nvml(given).trouble is None


class TestOwn:
    def test_by_pid(self, board):
        """Where the list has our own pid and it grows with us, that is us, whoever else moves."""
        made = Board({os.getpid(): 600 * MIB, OTHER: GIB})
        nvml = board(made)
        nvml.find_own(made.allocates(os.getpid(), OTHER))
        assert (nvml.own_pid, nvml.own_source) == (os.getpid(), "pid")

    def test_by_probe(self, board):
        """Where the list has pids of the host, the one that grows with us is us."""
        made = Board({7: 600 * MIB, OTHER: GIB})
        nvml = board(made)
        nvml.find_own(made.allocates(7))
        assert (nvml.own_pid, nvml.own_source) == (7, "probe")
        assert made.bytes == {7: 600 * MIB, OTHER: GIB}

    def test_same_number_elsewhere(self, board):
        """A process of the host that has our number by chance, and stands still, is not us."""
        made = Board({os.getpid(): GIB, OTHER: 600 * MIB})
        nvml = board(made)
        nvml.find_own(made.allocates(OTHER))
        assert nvml.own_pid == OTHER

    def test_not_told(self, board):
        """Where NVML tells no bytes, nobody is us."""
        made = Board({os.getpid(): None, OTHER: None})
        nvml = board(made)
        nvml.find_own(lambda _: lambda: None)
        assert (nvml.own_pid, nvml.own_source) == (None, "NVML does not tell a process's bytes")
        assert nvml.processes() == {os.getpid(): None, OTHER: None}

    def test_empty_list(self, board):
        """Where the list is empty, nobody is us."""
        nvml = board(Board())
        nvml.find_own(lambda _: lambda: None)
        assert (nvml.own_pid, nvml.own_source) == (None, "NVML lists no process")

    def test_two_always(self, board):
        """Two that move together each time cannot be told apart."""
        made = Board({7: 600 * MIB, OTHER: GIB})
        nvml = board(made)
        nvml.find_own(made.allocates(7, OTHER))
        assert (nvml.own_pid, nvml.own_source) == (None, "several processes moved at once")

    def test_two_once(self, board):
        """One that moved with us by chance does not do so again."""
        made = Board({7: 600 * MIB, OTHER: GIB})
        nvml = board(made)
        tries = [made.allocates(7, OTHER), made.allocates(7)]

        def allocate(size):
            return tries.pop(0)(size)

        nvml.find_own(allocate)
        assert (nvml.own_pid, nvml.own_source) == (7, "probe")

    def test_one_that_stays_grown(self, board):
        """A neighbour that grows by as much and does not give it back is not us."""
        made = Board({7: 600 * MIB, OTHER: GIB})
        nvml = board(made)

        def allocate(size):
            release = made.allocates(7)(size)
            made.bytes[OTHER] += size
            return release

        nvml.find_own(allocate)
        assert nvml.own_pid == 7

    def test_nobody_moves(self, board):
        """A list of others in which nobody moves with us says so."""
        made = Board({OTHER: GIB})
        nvml = board(made)
        nvml.find_own(lambda _: lambda: None)
        assert (nvml.own_pid, nvml.own_source) == (None, "no process moved with us")

    def test_late_once(self, board):
        """A list that was late once is asked again, with another size."""
        made, asked = Board({7: 600 * MIB}), []
        nvml = board(made)

        def allocate(size):
            asked.append(size)
            return made.allocates(7)(size) if len(asked) > 1 else lambda: None

        nvml.find_own(allocate)
        assert nvml.own_pid == 7
        assert asked == list(PROBE_BYTES[:2])
