"""
What an engine holds of a simulated device: pools, buffers, graphs. Each gives up its share when it dies, as in torch.

Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import attrs

from startup_fsm.pages import PoolId

if TYPE_CHECKING:
    from startup_fsm.devices.simulated import SimulatedDevice


def pool_name(key: PoolId) -> str:
    """The identity of a pool in snapshots, such as ``0.3``."""
    return f"{key[0]}.{key[1]}"


class SimulatedPool:
    """One reference to a pool of the allocator, as ``torch.cuda.MemPool`` is one."""

    def __init__(self, device: SimulatedDevice, key: PoolId, purpose: str) -> None:
        self.key = key
        self._device = device
        self._purpose = purpose
        device.allocator.create_or_incref_pool(key)
        self._released = False

    @property
    def id(self) -> str:
        """Identity in snapshots, such as ``0.3``."""
        return pool_name(self.key)

    @property
    def purpose(self) -> str:
        """What it was opened for."""
        return self._purpose

    def __enter__(self) -> Self:
        self._device.allocator.begin_allocate_to_pool(self.key)
        return self

    def __exit__(self, *error: object) -> None:
        self._device.allocator.end_allocate_to_pool(self.key)
        self._device.allocator.release_pool(self.key)

    def use_count(self) -> int:
        """References; 1 (ours) proves that no graph holds it, 0 that nobody does."""
        use = self._device.allocator.pools().get(self.key)
        return 0 if use is None else use.use_count

    def release(self) -> None:
        """Give up our reference; segments that nothing uses go back to the device. A second call does nothing."""
        if not self._released:
            self._released = True
            self._device.allocator.release_pool(self.key)
            self._device.allocator.empty_cache(self.key)

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            self._released = True
            self._device.abandon_pool(self.key)


class SimulatedBuffer:
    """Bytes of the device without a tensor; freed with its last reference."""

    def __init__(self, device: SimulatedDevice, nbytes: int) -> None:
        self._device: SimulatedDevice | None = None
        self.nbytes = nbytes
        self.address = device.malloc(nbytes)
        self._device = device

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        """Free it now; a second call does nothing."""
        device, self._device = self._device, None
        if device is not None:
            device.free(self.address)


@attrs.frozen
class ArenaBuffer:
    """A sub-range of an arena without a tensor: address and capacity in bytes."""

    address: int
    nbytes: int


class Recording:
    """What happens between the begin and the end of one capture."""

    def __init__(self, key: PoolId) -> None:
        self.key = key
        self.nodes = 0
        self.invalidated = False

    def replay(self) -> None:
        """Run the recorded work again; a count of bytes has none."""


class SimulatedGraph:
    """A captured step: one reference to its pool, driver memory by its nodes."""

    def __init__(
        self, device: SimulatedDevice, recording: Recording, *, size: int, output: Any, driver_bytes: int
    ) -> None:
        self._device = device
        self._recording: Recording | None = recording
        self._size = size
        self._output = output
        self._nodes = recording.nodes
        self._driver_bytes = driver_bytes
        self.replays = 0

    def __del__(self) -> None:
        self.reset()

    @property
    def size(self) -> int:
        """Rows of the batch it was captured for."""
        return self._size

    @property
    def nodes(self) -> int:
        """Kernels recorded."""
        return self._nodes

    @property
    def output(self) -> Any:
        """What the captured body returned; overwritten by every replay; None after ``reset``."""
        return self._output

    def replay(self) -> None:
        """
        Run it again on the same addresses.

        Raises:
            RuntimeError: The graph was reset, or memory that it uses has been freed.
        """
        if self._recording is None:
            raise RuntimeError(f"replay of the graph of size {self._size}, which was reset")
        self._recording.replay()
        self.replays += 1

    def reset(self) -> None:
        """Destroy it and give up its reference to the pool; a second call does nothing."""
        recording, self._recording = getattr(self, "_recording", None), None
        if recording is not None:
            self._output = None
            self._device.drop_graph(recording.key, self._driver_bytes)
