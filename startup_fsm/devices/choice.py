"""Which device a start runs on: by name, or the one at hand."""

from __future__ import annotations

import importlib.util
from typing import Final

from startup_fsm.devices.base import Device
from startup_fsm.memory import GIB

#: Capacity in bytes of a simulated device that nobody described.
DEFAULT_TOTAL: Final = 80 * GIB


def choose(device: Device | str) -> Device:
    """
    A device as it is, or by name: ``sim`` (tensors followed where torch is installed), ``cuda``, ``auto``.

    Raises:
        ValueError: No such name, or no such device here.
    """
    if not isinstance(device, str):
        return device
    if device not in ("auto", "sim", "cuda"):
        msg = f"device: {device!r} is none of auto, sim, cuda"
        raise ValueError(msg)
    if device == "cuda":
        msg = "device: CUDA is planned for the next release\nhint: use the device sim"
        raise ValueError(msg)
    if importlib.util.find_spec("torch") is None:
        from startup_fsm.devices.simulated import SimulatedDevice

        return SimulatedDevice(DEFAULT_TOTAL)
    from startup_fsm.devices.following import FollowingDevice

    return FollowingDevice(DEFAULT_TOTAL)
