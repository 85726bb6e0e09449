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

#: What the probe allocates, one try after another, and how far NVML may be off it; all in bytes.
PROBE_BYTES: Final = (96 * MIB, 64 * MIB, 128 * MIB)
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
        self._listed: dict[int, int | None] = {}
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            self.trouble = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()  # type: ignore[no-untyped-call]
            self._handle = _handle(pynvml, uuid)
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
            # One reading that fails must not charge everybody's memory to us: the last one stands.
            return dict(self._listed)
        self._listed = {
            int(each.pid): None if each.usedGpuMemory is None else int(each.usedGpuMemory) for each in listed
        }
        return dict(self._listed)

    def find_own(self, allocate: Callable[[int], Callable[[], None]]) -> None:
        """
        Find this process in the list: by pid where that entry grows with us, else as the only one that does.

        Args:
            allocate: Takes that many bytes on the device and returns what gives them back.
        """
        if self._library is None:
            self.own_source = self.trouble or "no NVML"
            return
        moving: set[int] = set()
        listed: dict[int, int | None] = {}
        for size in PROBE_BYTES:
            before = self.processes()
            release = allocate(size)
            listed = self.processes()
            release()
            after = self.processes()
            grown = {
                pid
                for pid, held in listed.items()
                if _moved(held, before.get(pid), size) and _moved(held, after.get(pid), size)
            }
            moving = moving & grown or grown or moving
            if len(moving) == 1 or os.getpid() in moving or not any(listed.values()):
                break
        self._found(moving, listed)

    def _found(self, moving: set[int], listed: dict[int, int | None]) -> None:
        if os.getpid() in moving:
            self.own_pid, self.own_source = os.getpid(), "pid"
        elif len(moving) == 1:
            self.own_pid, self.own_source = moving.pop(), "probe"
        elif moving:
            self.own_source = "several processes moved at once"
        elif not listed:
            self.own_source = "NVML lists no process"
        elif all(held is None for held in listed.values()):
            self.own_source = "NVML does not tell a process's bytes"
        else:
            self.own_source = "no process moved with us"


def _handle(library: Any, uuid: str) -> Any:
    """Of a device, or of a slice of one: torch prints the same kind of UUID for both, and says not which it is."""
    if uuid.startswith(("GPU-", "MIG-")):
        return library.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except library.NVMLError:
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _moved(high: int | None, low: int | None, by: int) -> bool:
    return high is not None and low is not None and abs(high - low - by) <= _TOLERANCE
