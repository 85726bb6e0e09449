"""The arena on a host and as a counter: whole pages, an address that never moves, faults where nothing is mapped."""

from __future__ import annotations

import faulthandler
import os
import signal

import pytest

from startup_fsm.devices.arena import CountedArena, HostArena
from startup_fsm.pages import MIB, DeviceMemory

BLOCK = 48 * 1024


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(256 * MIB)


def counted(memory, *, count=4, block_bytes=BLOCK, blocks=1000, refuse=lambda: None):
    return CountedArena(
        memory,
        count=count,
        block_bytes=block_bytes,
        blocks=blocks,
        base=1 << 49,
        refuse=refuse,
        full=MemoryError,
        buffer=lambda *given: given,
    )


def host(memory, *, count=2, blocks=1000):
    return HostArena(
        memory,
        count=count,
        block_bytes=BLOCK,
        blocks=blocks,
        refuse=lambda: None,
        full=MemoryError,
    )


class TestCounted:
    def test_reserved(self, memory):
        """A reservation takes no memory; every sub-range is whole pages."""
        arena = counted(memory)
        assert arena.reserved_bytes == 4 * 48 * MIB
        assert (arena.mapped_bytes, memory.used_bytes) == (0, 0)
        assert arena.granule_bytes == 8 * MIB

    def test_growth(self, memory):
        """Every sub-range grows by whole pages, and the device gives them."""
        arena = counted(memory)
        arena.map_blocks(1)
        assert arena.mapped_bytes == memory.held("arena") == 8 * MIB
        arena.map_blocks(100)
        assert arena.mapped_bytes == memory.held("arena") == 4 * 6 * MIB
        assert arena.mapped_bytes <= arena.reserved_bytes

    def test_never_shrinks(self, memory):
        """Asking for fewer blocks changes nothing."""
        arena = counted(memory)
        arena.map_blocks(100)
        arena.map_blocks(1)
        assert arena.mapped_bytes == 24 * MIB

    @pytest.mark.parametrize("blocks", [1, 42, 43, 85, 100, 1000])
    def test_blocks_within(self, memory, blocks):
        """What fits in the bytes of a mapping is at least what was mapped, and mapping it takes no more."""
        arena = counted(memory)
        arena.map_blocks(blocks)
        fits = arena.blocks_within(arena.mapped_bytes)
        assert blocks <= fits <= 1000
        before = arena.mapped_bytes
        arena.map_blocks(fits)
        assert arena.mapped_bytes == before
        assert arena.blocks_within(before - 1) < fits or fits == 1000

    def test_nothing_within(self, memory):
        """Less than one granule holds no block, and a negative budget none either."""
        arena = counted(memory)
        assert arena.blocks_within(8 * MIB - 1) == 0
        assert arena.blocks_within(-5) == 0

    def test_capacity(self, memory):
        """More than the capacity cannot be mapped."""
        with pytest.raises(ValueError, match="1000 blocks asked to map 1001"):
            counted(memory).map_blocks(1001)

    def test_full(self, memory):
        """A device without pages refuses, and nothing is mapped."""
        memory.take("neighbour:1", 250 * MIB)
        arena = counted(memory)
        with pytest.raises(MemoryError):
            arena.map_blocks(1)
        assert (arena.mapped_bytes, memory.held("arena")) == (0, 0)

    def test_refused(self, memory):
        """While a capture is open nothing is mapped."""
        with pytest.raises(RuntimeError, match="a capture is open"):
            counted(memory, refuse=lambda: "a capture is open").map_blocks(1)

    def test_close(self, memory):
        """Closing gives every page back, once; afterwards nothing works."""
        arena = counted(memory)
        arena.map_blocks(10)
        arena.close()
        arena.close()
        assert memory.used_bytes == 0
        with pytest.raises(RuntimeError, match="closed"):
            arena.map_blocks(1)

    def test_buffers(self, memory):
        """Sub-ranges follow each other at the stride of their capacity."""
        arena = counted(memory)
        assert arena.buffers() == [(arena.base + place * 48 * MIB, 1000 * BLOCK) for place in range(4)]

    def test_senseless(self, memory):
        """An arena has at least one sub-range."""
        with pytest.raises(ValueError, match="0 sub-ranges"):
            counted(memory, count=0)


class TestHost:
    def test_one_range(self, memory):
        """Buffers lie in one range at capacity stride, and keep their address through growth."""
        torch = pytest.importorskip("torch")
        arena = host(memory)
        first, second = arena.buffers()
        assert (first.dtype, first.numel()) == (torch.uint8, 1000 * BLOCK)
        assert first.data_ptr() == arena.base
        assert second.data_ptr() == arena.base + 48 * MIB
        arena.map_blocks(10)
        arena.map_blocks(500)
        assert arena.buffers()[0].data_ptr() == arena.base
        arena.close()

    def test_zero(self, memory):
        """Fresh pages are zero and keep what is written while the arena grows."""
        pytest.importorskip("torch")
        arena = host(memory)
        first, second = arena.buffers()
        arena.map_blocks(40)
        assert int(first[: 40 * BLOCK].sum()) == 0
        second[:BLOCK].fill_(7)
        arena.map_blocks(80)
        assert int(second[:BLOCK].min()) == 7
        assert int(second[BLOCK : 80 * BLOCK].sum()) == 0
        arena.close()

    @pytest.mark.parametrize("closed", [False, True])
    def test_fault(self, memory, closed):
        """Touching what is not mapped, or not any more, is a segmentation fault."""
        pytest.importorskip("torch")
        arena = host(memory)
        buffer = arena.buffers()[0]
        arena.map_blocks(10)
        offset = 0 if closed else 999 * BLOCK
        if closed:
            arena.close()
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            buffer[offset] = 1
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV

    def test_large(self):
        """A terabyte is reserved without a page of memory."""
        arena = HostArena(
            DeviceMemory(64 * MIB),
            count=64,
            block_bytes=MIB,
            blocks=16 * 1024,
            refuse=lambda: None,
            full=MemoryError,
        )
        assert arena.reserved_bytes == 1 << 40
        arena.close()
