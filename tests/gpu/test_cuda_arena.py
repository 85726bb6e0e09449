"""The KV arena on a card: addresses that never move, memory behind a prefix of them, and graphs across growth."""

from __future__ import annotations

import pytest
import torch

from startup_fsm.memory import GIB, MIB

pytestmark = pytest.mark.gpu

BLOCK = 192 * 1024


@pytest.fixture
def arena(device):
    made = device.reserve(4, BLOCK, 4_096)
    yield made
    made.close()


def free():
    return torch.cuda.mem_get_info()[0]


class TestGrowth:
    def test_reserved(self, device, arena):
        """A reservation takes no memory, and growth is one page in every sub-range."""
        assert arena.reserved_bytes == 4 * 768 * MIB
        assert arena.mapped_bytes == 0
        assert arena.granule_bytes == 8 * MIB

    def test_base_unchanged(self, arena):
        """The base and the addresses of all buffers are the same after growth; mapped stays within reserved."""
        arena.map_blocks(8)
        before = [buffer.data_ptr() for buffer in arena.buffers()]
        base = arena.base
        arena.map_blocks(4_096)
        assert arena.base == base == before[0]
        assert [buffer.data_ptr() for buffer in arena.buffers()] == before
        assert arena.mapped_bytes == arena.reserved_bytes

    def test_takes_what_it_says(self, device, arena):
        """What is mapped is what the device has less, and blocks_within says beforehand what fits."""
        before = free()
        blocks = arena.blocks_within(100 * MIB)
        arena.map_blocks(blocks)
        assert before - free() == arena.mapped_bytes <= 100 * MIB
        assert arena.mapped_bytes + arena.granule_bytes > 100 * MIB

    def test_zeroed(self, device):
        """Fresh pages are zero, also where another tensor left its bytes a moment ago."""
        dirty = torch.full((GIB,), 255, dtype=torch.uint8, device="cuda")
        del dirty
        device.settle()
        arena = device.reserve(2, MIB, 512)
        arena.map_blocks(512)
        with torch.cuda.stream(torch.cuda.Stream()):
            assert [int(buffer.count_nonzero()) for buffer in arena.buffers()] == [0, 0]
        arena.close()

    def test_never_shrinks(self, arena):
        """Mapping fewer blocks than are mapped does nothing, and nothing that was written is lost."""
        arena.map_blocks(100)
        mapped = arena.mapped_bytes
        arena.buffers()[3][: 100 * BLOCK].fill_(5)
        arena.map_blocks(1)
        arena.map_blocks(200)
        assert arena.mapped_bytes > mapped
        assert bool((arena.buffers()[3][: 100 * BLOCK] == 5).all())
        assert int(arena.buffers()[3][100 * BLOCK : 200 * BLOCK].count_nonzero()) == 0

    def test_too_much(self, device):
        """A device that has not that much says so as running out of memory; all sub-ranges grow or none does."""
        total = torch.cuda.mem_get_info()[1]
        arena = device.reserve(2, GIB, total // GIB)
        arena.map_blocks(1)
        before, mapped = free(), arena.mapped_bytes
        with pytest.raises(torch.OutOfMemoryError) as raised:
            arena.map_blocks(total // GIB)
        assert device.category(raised.value) == "oom"
        assert device.out_of_memory(raised.value).tried_bytes == pytest.approx(2 * (total // GIB - 1) * GIB, rel=0.01)
        assert (free(), arena.mapped_bytes) == (before, mapped)
        arena.close()

    def test_beyond_the_capacity(self, arena):
        """More blocks than were reserved are refused."""
        with pytest.raises(ValueError, match="asked to map 4097"):
            arena.map_blocks(4_097)

    def test_unmapped_is_a_fault(self, child):
        """A copy from what is not mapped is refused and the device goes on; a kernel that reads it is a fault."""
        found = child("unmapped")
        assert found["inside"] == 0
        assert "invalid argument" in found["copied"]
        assert found["goes_on"] == 4
        assert "illegal memory access" in found["read"]


class TestGraphs:
    def test_refused_inside_a_capture(self, device, arena):
        """Nothing is mapped while a capture is open; the capture itself is not harmed by the refusal."""
        arena.map_blocks(1)
        values, refused = torch.ones(16, device="cuda"), []
        pool = device.open_pool("graphs")

        def body():
            try:
                arena.map_blocks(4_096)
            except RuntimeError as error:
                refused.append(str(error))
            return values * 2

        mapped = arena.mapped_bytes
        graph = device.capture(body, pool, size=1, warmups=0)
        graph.replay()
        assert "while a capture is open" in refused[0]
        assert arena.mapped_bytes == mapped
        assert bool((graph.output == 2).all())
        graph.reset()
        pool.release()

    def test_nodes_over_unmapped(self, child):
        """A kernel may be captured over what is mapped later; a memset cannot be instantiated, a copy not captured."""
        found = child("nodes_over_unmapped")
        assert (found["kernel"], found["kernel_instantiated"], found["kernel_right"]) == (None, None, True)
        assert found["memset"] is None
        assert "invalid argument" in found["memset_instantiated"]
        assert "cudaErrorInvalidValue" in found["copy"]

    def test_replays_into_blocks_mapped_later(self, device, arena):
        """A graph captured against a small mapping writes and reads blocks that were mapped later, as eager does."""
        arena.map_blocks(8)
        pages = [buffer.view(torch.bfloat16).view(4_096, -1) for buffer in arena.buffers()]
        width = pages[0].shape[1]
        places = torch.arange(4, device="cuda")
        rows = torch.randn(4, width, device="cuda", dtype=torch.bfloat16)

        def step():
            total = torch.zeros_like(rows)
            for page in pages:
                page.index_copy_(0, places, rows + total)
                total = total + page.index_select(0, places).sin()
            return total

        pool = device.open_pool("graphs")
        graph = device.capture(step, pool, size=4)
        arena.map_blocks(4_096)
        places.copy_(torch.tensor([4_095, 9, 2_000, 4_000], device="cuda"))
        rows.normal_()
        eager = step()
        written = [page.index_select(0, places) for page in pages]
        for page in pages:
            page.index_fill_(0, places, 0)
        graph.replay()
        assert torch.equal(graph.output, eager)
        assert all(torch.equal(page.index_select(0, places), one) for page, one in zip(pages, written, strict=True))
        assert int(pages[0][:4].count_nonzero()) > 0
        graph.reset()
        pool.release()


class TestClose:
    def test_all_comes_back(self, device):
        """Closing gives every page back; a second time is harmless; nothing is mapped afterwards."""
        before = free()
        arena = device.reserve(3, MIB, 1_000)
        arena.map_blocks(1_000)
        assert before - free() == arena.mapped_bytes == 3_000 * MIB
        arena.close()
        arena.close()
        assert free() == before
        assert device.snapshot().arena_mapped_bytes == 0
        with pytest.raises(ValueError, match="after it was closed"):
            arena.map_blocks(1)
