"""Which device a start runs on: by name, or the one at hand."""

from __future__ import annotations

import importlib.util
import os
from typing import Final

from startup_fsm.devices.base import Device
from startup_fsm.memory import GIB

#: Capacity in bytes of a simulated device that nobody described.
DEFAULT_TOTAL: Final = 80 * GIB


def choose(device: Device | str) -> Device:
    """
    A device as it is, or by name: ``sim`` (tensors followed where torch is installed), ``cuda``, ``auto``.

    Raises:
        ValueError: No such name.
        RuntimeError: ``cuda`` where torch sees no device.
    """
    if not isinstance(device, str):
        return device
    if device not in ("auto", "sim", "cuda"):
        msg = f"device: {device!r} is none of auto, sim, cuda"
        raise ValueError(msg)
    has_torch = importlib.util.find_spec("torch") is not None
    if device == "cuda" or (device == "auto" and has_torch and _sees_cuda()):
        from startup_fsm.devices.cuda import CudaDevice

        return CudaDevice(_index_of_rank())
    if not has_torch:
        from startup_fsm.devices.simulated import SimulatedDevice

        return SimulatedDevice(DEFAULT_TOTAL)
    from startup_fsm.devices.following import FollowingDevice

    return FollowingDevice(DEFAULT_TOTAL)


def _index_of_rank() -> int | None:
    """The device of this rank among those of its host; None for the one that is current."""
    import torch

    local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    # A launcher that shows each rank one device has chosen already; so has a program that set another than the first.
    if not local.isdecimal() or int(local) >= torch.cuda.device_count() or torch.cuda.current_device() != 0:
        return None
    return int(local)


def _sees_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
