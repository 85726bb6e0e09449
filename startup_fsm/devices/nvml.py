"""
NVML beside torch: the device's own figures, and who holds how much. The only module that imports ``pynvml``.

Everything works when NVML is missing, tells nothing a process (WSL, vGPU, micro-VMs), shows host pids (containers), or
the device is a MIG slice. The own process is found by what grows with it where pids do not help.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import attrs

from startup_fsm.memory import MIB

#: What the probe allocates, and how far NVML may be off it; both in bytes.
PROBE_BYTES: Final = 96 * MIB
_TOLERANCE: Final = 4 * MIB


@attrs.frozen(kw_only=True)
class NvmlMemory:
    """Device memory by NVML, in bytes; ``total`` is CUDA's total plus ``reserved``."""

    total: int
    used: int
    free: int
    reserved: int | None


class Nvml:
    """
    One device by its UUID.

    Args:
        uuid: As torch gives it, with or without ``GPU-``.

    Attributes:
        trouble: Why there is nothing to ask; None where there is.
        own_pid: The pid under which NVML lists this process; None where it cannot be told.
        own_source: How that was found: ``pid``, ``probe``, or why not.
    """

    def __init__(self, uuid: str) -> None:
        self.trouble: str | None = None
        self.own_pid: int | None = None
        self.own_source = "not looked for"
        self._library: Any = None
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            self.trouble = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()  # type: ignore[no-untyped-call]
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        except pynvml.NVMLError as error:
            self.trouble = f"NVML: {error}"
            return
        self._library = pynvml

    def memory(self) -> NvmlMemory | None:
        """The device now; None where NVML does not tell."""
        library = self._library
        if library is None:
            return None
        try:
            version = getattr(library, "nvmlMemory_v2", None)
            if version is not None:
                read = library.nvmlDeviceGetMemoryInfo(self._handle, version=version)
                return NvmlMemory(total=read.total, used=read.used, free=read.free, reserved=read.reserved)
            read = library.nvmlDeviceGetMemoryInfo(self._handle)
        except library.NVMLError:
            return None
        return NvmlMemory(total=read.total, used=read.used, free=read.free, reserved=None)

    def processes(self) -> dict[int, int | None]:
        """Compute processes by pid, with their bytes; None for a process that NVML does not tell."""
        library = self._library
        if library is None:
            return {}
        try:
            listed = library.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except library.NVMLError:
            return {}
        return {int(each.pid): None if each.usedGpuMemory is None else int(each.usedGpuMemory) for each in listed}

    def find_own(self, allocate: Callable[[int], Callable[[], None]]) -> None:
        """
        Find this process in the list: by pid where that entry grows with us, else as the only one that does.

        Args:
            allocate: Takes that many bytes on the device and returns what gives them back.
        """
        if self._library is None:
            self.own_source = self.trouble or "no NVML"
            return
        before = self.processes()
        release = allocate(PROBE_BYTES)
        during = self.processes()
        release()
        after = self.processes()
        grown = [
            pid
            for pid, size in during.items()
            if _moved(size, before.get(pid), PROBE_BYTES) and _moved(size, after.get(pid), PROBE_BYTES)
        ]
        if os.getpid() in grown:
            self.own_pid, self.own_source = os.getpid(), "pid"
        elif len(grown) == 1:
            self.own_pid, self.own_source = grown[0], "probe"
        else:
            listed = "lists no process" if not during else "does not tell a process's bytes"
            self.own_source = f"NVML {listed}" if not grown else "several processes moved at once"


def _moved(high: int | None, low: int | None, by: int) -> bool:
    return high is not None and low is not None and abs(high - low - by) <= _TOLERANCE
