"""The allocator under any order of calls, against a recomputation from what was asked of it."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from startup_fsm.allocator import Allocator
from startup_fsm.pages import DEFAULT_POOL, MIB, DeviceMemory, DeviceOutOfMemoryError, InternalAssertError, round_size

CAPACITY = 256 * MIB
POOLS = [(0, 1), (0, 2), (3, 0)]
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(1, 40 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB, 19 * MIB, 64 * MIB]),
)


class AllocatorMachine(RuleBasedStateMachine):
    """What a caller can do; the model is the list of what lives and who uses which pool."""

    blocks = Bundle("blocks")

    def __init__(self):
        super().__init__()
        self.memory = DeviceMemory(CAPACITY)
        self.trace = []
        self.allocator = Allocator(self.memory, trace=self.trace.append)
        self.live = {}
        self.uses = {}
        self.open = []
        self.neighbour = 0
        self.peak_reserved = 0

    @rule(target=blocks, nbytes=SIZES, stream=st.integers(0, 2))
    def malloc(self, nbytes, stream):
        """An allocation lands in the pool of the last open scope that takes its stream."""
        expected = next(
            (pool for pool, streams in reversed(self.open) if streams is None or stream in streams), DEFAULT_POOL
        )
        flush_possible = not self.open
        reserved = self.allocator.reserved_bytes
        refused = None
        try:
            address = self.allocator.malloc(nbytes, stream)
        except DeviceOutOfMemoryError as error:
            refused = error
        if refused is not None:
            assert refused.tried_bytes > refused.free_bytes == self.memory.free_bytes
            assert flush_possible or self.allocator.reserved_bytes == reserved
            return None
        assert self.allocator.pool_of(address) == expected
        self.live[address] = (nbytes, stream, expected)
        return address

    @rule(address=consumes(blocks))
    def free(self, address):
        """A freed block is nobody's."""
        if address is not None:
            self.allocator.free(address)
            del self.live[address]

    @rule(address=blocks, stream=st.integers(0, 2))
    def record_stream(self, address, stream):
        """Use by another stream defers the free, nothing else."""
        if address is not None:
            self.allocator.record_stream(address, stream)

    @rule(pool=st.sampled_from(POOLS), streams=st.sampled_from([None, frozenset({0}), frozenset({1, 2})]))
    def begin(self, pool, streams):
        """A scope opens unless its pool is a zombie or open already."""
        if any(pool == other for other, _ in self.open):
            return
        if pool in self.allocator.zombies:
            with pytest.raises(InternalAssertError, match="use_count > 0"):
                self.allocator.begin_allocate_to_pool(pool, streams)
            return
        self.allocator.begin_allocate_to_pool(pool, streams)
        self.open.append((pool, streams))
        self.uses[pool] = self.uses.get(pool, 0) + 1

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        """Scopes end in any order; uses stay."""
        place = data.draw(st.integers(0, len(self.open) - 1))
        pool, _ = self.open.pop(place)
        self.allocator.end_allocate_to_pool(pool)

    @precondition(lambda self: any(self.uses.values()))
    @rule(data=st.data())
    def release(self, data):
        """A use is given up; the pool's segments stay until the cache is emptied."""
        pool = data.draw(st.sampled_from(sorted(pool for pool, count in self.uses.items() if count)))
        if self.uses[pool] == 1 and any(pool == other for other, _ in self.open):
            return
        reserved = self.allocator.reserved_bytes
        self.allocator.release_pool(pool)
        self.uses[pool] -= 1
        assert self.allocator.reserved_bytes == reserved

    @rule()
    def empty_cache(self):
        """Only segments without a live block go, those of the default pool only outside scopes."""
        before = self.allocator.pools()
        self.allocator.empty_cache()
        after = self.allocator.pools()
        for pool, use in before.items():
            in_use = pool != DEFAULT_POOL and self.uses.get(pool, 0)
            if in_use or (pool == DEFAULT_POOL and self.open):
                assert after[pool].reserved_bytes == use.reserved_bytes
        if not self.open:
            for segment in self.allocator.snapshot():
                if segment["segment_pool_id"] == DEFAULT_POOL:
                    assert segment["allocated_size"] > 0

    @rule(nbytes=st.integers(0, 64 * MIB))
    def neighbour_takes(self, nbytes):
        """Another process takes memory."""
        if self.memory.take("neighbour:9", nbytes, exact=True):
            self.neighbour += nbytes

    @precondition(lambda self: self.neighbour)
    @rule()
    def neighbour_leaves(self):
        """And gives it back."""
        self.memory.give_back("neighbour:9", self.neighbour, exact=True)
        self.neighbour = 0

    @rule()
    def reset_peaks(self):
        """Peaks start again from now."""
        self.allocator.reset_peaks()
        assert self.allocator.reserved_bytes_peak == self.allocator.reserved_bytes

    @invariant()
    def conserved(self):
        """Reserved is the sum of segments, is what torch holds of the device, and fits."""
        snapshot = self.allocator.snapshot()
        total = sum(segment["total_size"] for segment in snapshot)
        assert total == self.allocator.reserved_bytes == self.memory.held("torch")
        assert total == sum(use.reserved_bytes for use in self.allocator.pools().values())
        assert total + self.neighbour + self.memory.free_bytes == CAPACITY
        assert self.memory.free_bytes >= 0

    @invariant()
    def laid_out(self):
        """Blocks tile their segment, never overlap, and no two free neighbours stand side by side."""
        end = 0
        for segment in self.allocator.snapshot():
            assert segment["address"] >= end
            end = segment["address"]
            states = [block["state"] for block in segment["blocks"]]
            assert ("inactive", "inactive") not in list(pairwise(states))
            for block in segment["blocks"]:
                assert block["address"] == end
                assert block["size"] % 512 == 0
                assert block["size"] > 0
                end += block["size"]
            assert end == segment["address"] + segment["total_size"]

    @invariant()
    def recomputed(self):
        """Statistics equal what follows from the calls alone."""
        found = {}
        for segment in self.allocator.snapshot():
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found[block["address"]] = (block["requested_size"], segment["stream"], segment["segment_pool_id"])
                    slack = block["size"] - round_size(block["requested_size"])
                    assert 0 <= slack <= (MIB if segment["segment_type"] == "large" else 0)
        assert found == self.live
        snapshot = self.allocator.snapshot()
        assert self.allocator.allocated_bytes == sum(segment["allocated_size"] for segment in snapshot)
        assert self.allocator.active_bytes == sum(segment["active_size"] for segment in snapshot)
        assert self.allocator.requested_bytes == sum(segment["requested_size"] for segment in snapshot)
        for pool, use in self.allocator.pools().items():
            mine = [segment for segment in snapshot if segment["segment_pool_id"] == pool]
            assert use.active_bytes == sum(segment["active_size"] for segment in mine)
            assert use.requested_bytes == sum(segment["requested_size"] for segment in mine)
            assert use.segments == len(mine)
            assert use.use_count == (1 if pool == DEFAULT_POOL else self.uses[pool])

    @invariant()
    def traced(self):
        """The segment events of the history sum up to what is reserved."""
        signs = {"segment_alloc": 1, "segment_free": -1}
        assert self.allocator.reserved_bytes == sum(signs.get(e.action, 0) * e.size for e in self.trace)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
