"""The caching allocator: each rule a test, with the numbers of torch 2.11."""

from __future__ import annotations

import re

import pytest

from startup_fsm.allocator import Allocator
from startup_fsm.pages import (
    DEFAULT_POOL,
    GIB,
    MIB,
    DeviceMemory,
    DeviceOutOfMemoryError,
    InternalAssertError,
    format_size,
    round_size,
    segment_size,
)

POOL = (0, 1)
OTHER = (0, 2)


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(4 * GIB)


@pytest.fixture
def allocator(memory) -> Allocator:
    return Allocator(memory)


def segments(allocator, pool=None):
    return [s["total_size"] for s in allocator.snapshot() if pool is None or s["segment_pool_id"] == pool]


class TestDeviceMemory:
    def test_whole_pages(self, memory):
        """A holder takes whole pages of 2 MiB."""
        assert memory.take("driver", 1)
        assert memory.held("driver") == 2 * MIB
        assert memory.free_bytes == 4 * GIB - 2 * MIB

    def test_exact(self, memory):
        """A context may be measured to the byte."""
        assert memory.take("context", 648_859_648, exact=True)
        assert memory.held("context") == 648_859_648

    def test_refused(self, memory):
        """What does not fit takes nothing."""
        assert not memory.take("neighbour:7", 5 * GIB)
        assert memory.holders == {}
        assert memory.free_bytes == memory.total_bytes

    def test_give_back(self, memory):
        """What is given back is free, the peak stays."""
        assert memory.take("arena", 64 * MIB)
        memory.give_back("arena", 63 * MIB)
        assert memory.used_bytes == 0
        assert memory.used_peak_bytes == 64 * MIB

    def test_more_than_held(self, memory):
        """Nobody gives back what he does not hold."""
        with pytest.raises(ValueError, match="torch gives back 2097152 bytes and holds 0"):
            memory.give_back("torch", 2 * MIB)

    def test_too_small(self):
        """A device has at least one page."""
        with pytest.raises(ValueError, match="smaller than one page"):
            DeviceMemory(MIB)


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
    ],
)
def test_sizes(allocator, nbytes, block, segment):
    """Blocks are multiples of 512 bytes; segments 2 MiB, 20 MiB, or their own in steps of 2 MiB."""
    address = allocator.malloc(nbytes)
    assert round_size(nbytes) == block
    assert segment_size(block) == segment
    assert segments(allocator) == [segment]
    assert allocator.requested_bytes == nbytes
    assert allocator.size_of(address) == block


def test_nothing(allocator):
    """An empty tensor has no block."""
    with pytest.raises(ValueError, match="0 bytes"):
        allocator.malloc(0)


def test_rounded_zero():
    """The rounding of nothing is one unit."""
    assert round_size(0) == 512


class TestBlocks:
    def test_small_split(self, allocator):
        """A small segment is split as soon as 512 bytes remain: 2,048 blocks of 1 KiB fit in one."""
        for _ in range(2048):
            allocator.malloc(1024)
        assert segments(allocator) == [2 * MIB]
        assert allocator.allocated_bytes == 2 * MIB

    def test_large_split(self, allocator):
        """A large segment is split only when more than 1 MiB remains; else the block is larger than asked."""
        allocator.malloc(19 * MIB)
        allocator.malloc(19 * MIB - 512)
        assert segments(allocator) == [20 * MIB, 20 * MIB]
        first, second = allocator.snapshot()
        assert [b["size"] for b in first["blocks"]] == [20 * MIB]
        assert [b["size"] for b in second["blocks"]] == [19 * MIB - 512, MIB + 512]

    def test_large_split_from_twenty(self, allocator):
        """Blocks of 1 to 10 MiB share a segment of 20 MiB."""
        for _ in range(10):
            allocator.malloc(2 * MIB)
        assert segments(allocator) == [20 * MIB]
        allocator.malloc(2 * MIB)
        assert segments(allocator) == [20 * MIB, 20 * MIB]

    def test_best_fit(self, allocator):
        """The smallest free block that is large enough is taken."""
        wide, _, tight, _ = (allocator.malloc(n * MIB) for n in (64, 32, 40, 32))
        allocator.free(wide)
        allocator.free(tight)
        assert allocator.malloc(38 * MIB) == tight
        assert allocator.malloc(50 * MIB) == wide

    def test_lowest_address(self, allocator):
        """Of two equal blocks the lower address is taken."""
        low, high = allocator.malloc(32 * MIB), allocator.malloc(32 * MIB)
        allocator.free(high)
        allocator.free(low)
        assert allocator.malloc(32 * MIB) == low

    def test_streams_do_not_share(self, allocator):
        """A free block serves its own stream only."""
        allocator.free(allocator.malloc(32 * MIB, stream=1))
        allocator.malloc(32 * MIB, stream=2)
        assert segments(allocator) == [32 * MIB, 32 * MIB]

    def test_small_and_large_do_not_share(self, allocator):
        """A free large block never serves a small request."""
        allocator.free(allocator.malloc(20 * MIB))
        allocator.malloc(512)
        assert sorted(segments(allocator)) == [2 * MIB, 20 * MIB]

    def test_merge(self, allocator):
        """Freed neighbours become one block again, on both sides."""
        left, middle, right = (allocator.malloc(6 * MIB) for _ in range(3))
        allocator.free(left)
        allocator.free(right)
        assert [b["state"] for b in allocator.snapshot()[0]["blocks"]] == ["inactive", "active_allocated", "inactive"]
        allocator.free(middle)
        assert [(b["size"], b["state"]) for b in allocator.snapshot()[0]["blocks"]] == [(20 * MIB, "inactive")]

    def test_double_free(self, allocator):
        """A second free of one address is refused in torch's words."""
        address = allocator.malloc(512)
        allocator.free(address)
        with pytest.raises(ValueError, match="invalid device pointer"):
            allocator.free(address)

    def test_other_stream_defers(self, allocator):
        """A block that another stream used is active until the next allocation."""
        address = allocator.malloc(32 * MIB)
        allocator.record_stream(address, 5)
        allocator.free(address)
        assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 32 * MIB)
        assert allocator.snapshot()[0]["blocks"][0]["state"] == "active_pending_free"
        assert allocator.malloc(32 * MIB) == address

    def test_other_stream_defers_through_capture(self, allocator):
        """Within a capture such a block is not reused: its free is put off until the capture is over."""
        address = allocator.malloc(32 * MIB)
        allocator.record_stream(address, 5)
        allocator.begin_allocate_to_pool(POOL)
        allocator.free(address)
        allocator.malloc(512)
        assert allocator.active_bytes == 32 * MIB + 512
        allocator.end_allocate_to_pool(POOL)
        allocator.empty_cache()
        assert segments(allocator, DEFAULT_POOL) == []


class TestEmptyCache:
    def test_unsplit_only(self, allocator):
        """A segment with one live block stays; a wholly free one goes back to the device."""
        kept, gone = allocator.malloc(2 * MIB), allocator.malloc(64 * MIB)
        allocator.free(allocator.malloc(2 * MIB))
        allocator.free(gone)
        allocator.empty_cache()
        assert segments(allocator) == [20 * MIB]
        assert allocator.memory.held("torch") == 20 * MIB
        allocator.free(kept)
        allocator.empty_cache()
        assert allocator.memory.held("torch") == 0

    def test_live_pool_is_kept(self, allocator):
        """Free segments of a pool in use are not given back."""
        allocator.begin_allocate_to_pool(POOL)
        allocator.free(allocator.malloc(64 * MIB))
        allocator.end_allocate_to_pool(POOL)
        allocator.empty_cache()
        assert segments(allocator, POOL) == [64 * MIB]


class TestPools:
    def capture(self, allocator, nbytes=64 * MIB):
        allocator.begin_allocate_to_pool(POOL)
        address = allocator.malloc(nbytes)
        allocator.end_allocate_to_pool(POOL)
        return address

    def test_counts(self, allocator):
        """A pool object is one user and every capture one more; 1 proves that the graphs are gone."""
        allocator.create_or_incref_pool(POOL)
        self.capture(allocator)
        self.capture(allocator)
        assert allocator.pool_use_count(POOL) == 3
        allocator.release_pool(POOL)
        allocator.release_pool(POOL)
        assert allocator.pool_use_count(POOL) == 1
        assert allocator.zombies == ()

    def test_own_memory(self, allocator):
        """A pool reuses nothing of the default pool, nor the other way round."""
        allocator.free(allocator.malloc(64 * MIB))
        allocator.free(self.capture(allocator))
        use = allocator.pools()
        assert use[DEFAULT_POOL].reserved_bytes == use[POOL].reserved_bytes == 64 * MIB
        allocator.malloc(64 * MIB)
        assert allocator.reserved_bytes == 128 * MIB

    def test_release_frees_nothing(self, allocator):
        """Releasing a pool gives nothing back; emptying the cache does, and erases it."""
        allocator.free(self.capture(allocator))
        allocator.release_pool(POOL)
        assert allocator.zombies == (POOL,)
        assert allocator.reserved_bytes == 64 * MIB
        allocator.empty_cache()
        assert allocator.zombies == ()
        assert POOL not in allocator.pools()
        assert allocator.reserved_bytes == 0

    def test_zombie(self, allocator):
        """A released pool that a live tensor keeps from being erased cannot be opened again: torch asserts."""
        output = self.capture(allocator)
        allocator.release_pool(POOL)
        allocator.empty_cache()
        assert allocator.zombies == (POOL,)
        expected = (
            r'it->second->use_count > 0 INTERNAL ASSERT FAILED at ".*CUDACachingAllocator.cpp":\d+, please report'
        )
        with pytest.raises(InternalAssertError, match=expected):
            allocator.begin_allocate_to_pool(POOL)
        assert allocator.captures_underway == ()
        allocator.free(output)
        allocator.empty_cache()
        allocator.begin_allocate_to_pool(POOL)
        assert allocator.pool_use_count(POOL) == 1

    def test_zombie_by_split(self, allocator):
        """A split segment of which one block lives keeps the whole pool."""
        allocator.begin_allocate_to_pool(POOL)
        kept, gone = allocator.malloc(2 * MIB), allocator.malloc(64 * MIB)
        allocator.end_allocate_to_pool(POOL)
        allocator.free(gone)
        allocator.release_pool(POOL)
        allocator.empty_cache()
        assert segments(allocator, POOL) == [20 * MIB]
        assert allocator.pools()[POOL].use_count == 0
        allocator.free(kept)

    def test_erased_then_reopened(self, allocator):
        """An id whose pool was erased silently makes a new pool."""
        allocator.free(self.capture(allocator))
        allocator.release_pool(POOL)
        allocator.empty_cache()
        self.capture(allocator)
        assert allocator.pool_use_count(POOL) == 1

    def test_too_many_releases(self, allocator):
        """A count below zero is an assertion."""
        self.capture(allocator)
        allocator.release_pool(POOL)
        with pytest.raises(InternalAssertError, match="uc >= 0"):
            allocator.release_pool(POOL)

    def test_unknown(self, allocator):
        """The count of a pool that is not known is an assertion, in torch too."""
        with pytest.raises(InternalAssertError, match=r"graph_pools\.end"):
            allocator.pool_use_count(POOL)

    def test_empty_one_pool(self, allocator):
        """The end of a pool object empties that pool and no other."""
        default = allocator.malloc(32 * MIB)
        allocator.free(default)
        allocator.free(self.capture(allocator))
        allocator.release_pool(POOL)
        allocator.empty_cache(POOL)
        assert POOL not in allocator.pools()
        assert segments(allocator) == [32 * MIB]

    def test_empty_while_capturing(self, allocator):
        """A released pool cannot be emptied while a capture is open, but the plain call passes over it alone."""
        allocator.free(self.capture(allocator))
        allocator.release_pool(POOL)
        allocator.begin_allocate_to_pool(OTHER)
        with pytest.raises(InternalAssertError, match=r"captures_underway\.empty"):
            allocator.empty_cache(POOL)


class TestCapturesUnderway:
    def test_last_wins(self, allocator):
        """Of two open scopes the last begun gets the allocation."""
        allocator.begin_allocate_to_pool(POOL)
        allocator.begin_allocate_to_pool(OTHER)
        assert allocator.pool_of(allocator.malloc(512)) == OTHER
        allocator.end_allocate_to_pool(OTHER)
        assert allocator.pool_of(allocator.malloc(512)) == POOL

    def test_filter(self, allocator):
        """A capture takes its own streams only."""
        allocator.begin_allocate_to_pool(POOL, frozenset({7}))
        assert allocator.pool_of(allocator.malloc(512, stream=7)) == POOL
        assert allocator.pool_of(allocator.malloc(512, stream=0)) == DEFAULT_POOL

    def test_twice(self, allocator):
        """One pool is recorded to once at a time."""
        allocator.begin_allocate_to_pool(POOL)
        with pytest.raises(RuntimeError, match="already recording to mempool_id"):
            allocator.begin_allocate_to_pool(POOL)

    def test_end_of_nothing(self, allocator):
        """What was not begun cannot be ended."""
        with pytest.raises(RuntimeError, match="not currently recording"):
            allocator.end_allocate_to_pool(POOL)

    def test_empty_cache_skips_default(self, allocator):
        """While a capture is open, or was left open by a failure, the default pool keeps its cache."""
        allocator.free(allocator.malloc(64 * MIB))
        allocator.begin_allocate_to_pool(POOL)
        allocator.empty_cache()
        assert segments(allocator, DEFAULT_POOL) == [64 * MIB]
        allocator.end_allocate_to_pool(POOL)
        allocator.empty_cache()
        assert segments(allocator, DEFAULT_POOL) == []

    def test_no_retry(self, allocator):
        """A capture runs out of memory although the default cache holds enough."""
        allocator.free(allocator.malloc(3 * GIB))
        allocator.begin_allocate_to_pool(POOL)
        with pytest.raises(DeviceOutOfMemoryError):
            allocator.malloc(2 * GIB)
        assert allocator.num_alloc_retries == 0
        assert allocator.num_ooms == 1

    def test_repair(self, allocator):
        """Ending and releasing a pool by hand repairs the allocator after a failed capture."""
        allocator.create_or_incref_pool(POOL)
        allocator.begin_allocate_to_pool(POOL)
        leftover = allocator.malloc(64 * MIB)
        # Here the capture fails: nobody ends it.
        allocator.free(leftover)
        allocator.end_allocate_to_pool(POOL)
        allocator.release_pool(POOL)
        assert allocator.pool_use_count(POOL) == 1
        allocator.release_pool(POOL)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 0


class TestOutOfMemory:
    def test_flush_and_retry(self, allocator):
        """Outside captures the cache is flushed and the segment asked for again; that counts as a retry."""
        allocator.free(allocator.malloc(2 * GIB))
        allocator.malloc(3 * GIB)
        assert segments(allocator) == [3 * GIB]
        assert allocator.num_alloc_retries == 1
        assert allocator.num_ooms == 0

    def test_flush_takes_released_pools(self, allocator):
        """The flush frees released pools as well."""
        allocator.begin_allocate_to_pool(POOL)
        address = allocator.malloc(3 * GIB)
        allocator.end_allocate_to_pool(POOL)
        allocator.free(address)
        allocator.release_pool(POOL)
        allocator.malloc(2 * GIB)
        assert POOL not in allocator.pools()

    def test_segment_is_what_is_tried(self, allocator):
        """The sentence names the segment, so 3 MiB more than a full device says 20 MiB."""
        allocator.malloc(4 * GIB)
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            allocator.malloc(3 * MIB)
        assert caught.value.tried_bytes == 20 * MIB
        assert caught.value.free_bytes == 0

    def test_sentence(self):
        """The sentence is torch's, with the units of c10."""
        memory = DeviceMemory(32 * GIB)
        memory.take("context", 618 * MIB)
        memory.take("neighbour:16335", 2 * GIB)
        allocator = Allocator(memory)
        allocator.malloc(28 * GIB)
        allocator.begin_allocate_to_pool(POOL)
        allocator.malloc(2 * MIB)
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            allocator.malloc(2 * GIB)
        expected = (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 32.00 GiB of which 1.38 GiB is free. "
            "Process 16335 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has 28.62 GiB memory in use. "
            "Of the allocated memory 28.02 GiB is allocated by PyTorch, with 18.00 MiB allocated in private pools (e.g., CUDA "
            "Graphs), and 0 bytes is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )
        assert str(caught.value) == expected
        assert caught.value.private_pool_bytes == 18 * MIB
        assert caught.value.process_bytes == 28 * GIB + 618 * MIB + 20 * MIB
        assert caught.value.torch_allocated_bytes == 28 * GIB + 20 * MIB
        assert caught.value.torch_reserved_unallocated_bytes == 0

    def test_limit(self, memory):
        """A process's own limit refuses what the device would give, and is named."""
        allocator = Allocator(memory, limit_bytes=GIB)
        allocator.malloc(GIB)
        with pytest.raises(DeviceOutOfMemoryError, match=re.escape("1024.00 MiB allowed; ")):
            allocator.malloc(512)

    def test_goes_on(self, allocator):
        """After the error the allocator works and holds what it held."""
        kept = allocator.malloc(3 * GIB)
        with pytest.raises(DeviceOutOfMemoryError):
            allocator.malloc(2 * GIB)
        assert allocator.allocated_bytes == 3 * GIB
        allocator.free(kept)
        allocator.malloc(2 * GIB)
        assert allocator.allocated_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (20 * MIB, "20.00 MiB"),
        (GIB, "1024.00 MiB"),
        (150_110_011_392, "139.80 GiB"),
    ],
)
def test_format_size(nbytes, text):
    """c10 changes the unit only above its limit."""
    assert format_size(nbytes) == text


class TestStatistics:
    def test_peaks(self, allocator):
        """Peaks stay until they are reset, and are then the current values."""
        allocator.free(allocator.malloc(64 * MIB))
        allocator.malloc(32 * MIB)
        stats = allocator.stats()
        assert stats["allocated_bytes.all.peak"] == 64 * MIB
        assert stats["allocated_bytes.all.current"] == 64 * MIB - 32 * MIB
        allocator.reset_peaks()
        assert allocator.stats()["allocated_bytes.all.peak"] == 32 * MIB
        assert allocator.reserved_bytes_peak == 64 * MIB

    def test_counts(self, allocator):
        """Calls of the driver are counted."""
        allocator.free(allocator.malloc(64 * MIB))
        allocator.empty_cache()
        stats = allocator.stats()
        assert (stats["num_device_alloc"], stats["num_device_free"]) == (1, 1)

    def test_pool_bytes(self, allocator):
        """Every pool knows its reserved, active and requested bytes."""
        allocator.begin_allocate_to_pool(POOL)
        allocator.malloc(3 * MIB + 1)
        use = allocator.pools()[POOL]
        assert (use.reserved_bytes, use.active_bytes, use.requested_bytes) == (20 * MIB, 3 * MIB + 512, 3 * MIB + 1)
        assert (use.segments, use.use_count) == (1, 1)

    def test_snapshot_keys(self, allocator):
        """A snapshot has the keys of `torch.cuda.memory_snapshot`."""
        address = allocator.malloc(1000, stream=3)
        (segment,) = allocator.snapshot()
        assert segment["segment_type"] == "small"
        assert segment["stream"] == 3
        assert segment["segment_pool_id"] == (0, 0)
        assert (segment["total_size"], segment["allocated_size"], segment["active_size"]) == (2 * MIB, 1024, 1024)
        assert segment["requested_size"] == 1000
        assert segment["blocks"] == [
            {"address": address, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []},
            {"address": address + 1024, "size": 2 * MIB - 1024, "requested_size": 0, "state": "inactive", "frames": []},
        ]


class TestTrace:
    def test_sequence(self, memory):
        """The history has torch's actions in torch's order."""
        entries = []
        allocator = Allocator(memory, trace=entries.append)
        address = allocator.malloc(1000)
        allocator.free(address)
        allocator.empty_cache()
        assert [e.action for e in entries] == [
            "segment_alloc",
            "alloc",
            "free_requested",
            "free_completed",
            "segment_free",
        ]
        assert [e.size for e in entries] == [2 * MIB, 1000, 1000, 1000, 2 * MIB]
        assert {e.addr for e in entries} == {address}

    def test_oom_entry(self, memory):
        """Running out of memory is an entry with the free bytes of the device."""
        entries = []
        allocator = Allocator(memory, trace=entries.append)
        with pytest.raises(DeviceOutOfMemoryError):
            allocator.malloc(5 * GIB)
        assert [(e.action, e.addr, e.size) for e in entries] == [("oom", 4 * GIB, 5 * GIB)]

    def test_given_addresses(self, memory):
        """A recorded history can give the addresses, so that ties fall as they fell on the device."""
        recorded = iter([0x2000_0000, 0x1000_0000])
        allocator = Allocator(memory, place=lambda _: next(recorded))
        first, second = allocator.malloc(32 * MIB), allocator.malloc(32 * MIB)
        assert (first, second) == (0x2000_0000, 0x1000_0000)
        allocator.free(first)
        allocator.free(second)
        assert allocator.malloc(32 * MIB) == second

    def test_release_by_pool(self, allocator):
        """A replay releases the segments of one pool without knowing who used it."""
        allocator.begin_allocate_to_pool(POOL)
        allocator.free(allocator.malloc(64 * MIB))
        allocator.release_unsplit(POOL)
        assert allocator.reserved_bytes == 0
