"""The simulated device without torch: what a start takes, and what comes back."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from startup_fsm.devices.costs import Costs
from startup_fsm.devices.simulated import CAPTURE_STREAM, SimulatedBuffer, SimulatedDevice
from startup_fsm.pages import GIB, MIB, DeviceOutOfMemoryError, InternalAssertError

H200_BYTES = 150_110_011_392


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(8 * GIB, costs=Costs.none())


def decode(device, *, size=3 * MIB, nodes=100):
    """A step: scratch, kernels, an output."""
    scratch = SimulatedBuffer(device, 40 * MIB)
    device.launch(nodes, gemm=True)
    scratch.free()
    return SimulatedBuffer(device, size)


def forbidden(device):
    device.launch(3)
    device.forbid_in_capture()


def test_no_torch():
    """The module imports no torch."""
    code = "import sys, startup_fsm.devices.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestStart:
    def test_context(self):
        """A fresh process takes 618.8 MiB outside torch, as measured on an H200."""
        snapshot = SimulatedDevice(H200_BYTES).snapshot()
        assert round(snapshot.outside_bytes / MIB, 1) == 618.8
        assert snapshot.process_bytes == snapshot.used_bytes
        assert snapshot.unexplained_bytes == 0

    def test_no_room(self):
        """A device that neighbours hold whole gives no context, in CUDA's words."""
        with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
            SimulatedDevice(4 * GIB, neighbours={"4711": 4 * GIB - 64 * MIB})

    def test_name(self, device):
        """The name says what it is."""
        assert (device.name, device.kind, device.has_values) == ("simulated 8 GiB", "simulated", False)


class TestOutsideTorch:
    def test_modules(self):
        """The first matrix product loads 74 MiB of code, once."""
        device = SimulatedDevice(H200_BYTES)
        before = device.snapshot().outside_bytes
        device.launch()
        assert device.snapshot().outside_bytes == before
        device.launch(gemm=True)
        device.launch(gemm=True)
        assert device.snapshot().outside_bytes - before == 74 * MIB

    def test_graphs(self):
        """51 graphs of 482 nodes and the first capture take the 150 MiB of the H200, and their memory is used again."""
        device = SimulatedDevice(H200_BYTES)
        decode(device).free()
        before = device.snapshot().outside_bytes
        for _ in range(2):
            pool = device.open_pool("throwaway")
            graphs = [device.capture(lambda: decode(device, nodes=482), pool, size=size) for size in range(51)]
            assert abs(device.snapshot().outside_bytes - before - 150 * MIB) <= 4 * MIB
            for graph in graphs:
                graph.reset()
            pool.release()
        device.settle()
        assert abs(device.snapshot().outside_bytes - before - 150 * MIB) <= 4 * MIB

    def test_graphs_return(self):
        """A driver that gives graph memory back does so while settling, and that is told as late."""
        device = SimulatedDevice(8 * GIB, costs=Costs(graphs_return=True, capture_bytes=0))
        decode(device).free()
        before = device.snapshot().outside_bytes
        pool = device.open_pool("throwaway")
        device.capture(lambda: decode(device, nodes=10_000), pool, size=1).reset()
        held = device.snapshot().outside_bytes - before
        assert held >= 30 * MIB
        assert device.settle().late_return_bytes == held
        assert device.snapshot().outside_bytes == before

    def test_driver_full(self, device):
        """A graph that the driver has no memory for is not made, and its pool reference is given up."""
        device.costs = Costs(node_bytes=GIB, modules_bytes=0, capture_bytes=0)
        pool = device.open_pool("throwaway")
        with pytest.raises(RuntimeError, match="CUDA error: out of memory") as caught:
            device.capture(lambda: decode(device), pool, size=1)
        assert pool.use_count() == 1
        assert device.category(caught.value) == "oom"


class TestWorkspaces:
    def test_one_a_stream(self):
        """Each stream takes 32 MiB at its first matrix product."""
        device = SimulatedDevice(H200_BYTES)
        device.launch(gemm=True)
        device.launch(gemm=True)
        assert device.snapshot().allocated_bytes == 32 * MIB
        with device.on_stream(CAPTURE_STREAM):
            device.launch(gemm=True)
        assert device.snapshot().allocated_bytes == 64 * MIB

    def test_cleared_on_request_only(self):
        """Settling keeps workspaces unless it is told to clear them."""
        device = SimulatedDevice(H200_BYTES)
        device.launch(gemm=True)
        assert not device.settle().workspaces_cleared
        assert device.snapshot().reserved_bytes == 32 * MIB
        assert device.settle(clear_workspaces=True).workspaces_cleared
        assert device.snapshot().reserved_bytes == 0

    def test_pins_a_pool(self):
        """First used inside a capture, a workspace holds the throwaway pool until it is cleared."""
        device = SimulatedDevice(H200_BYTES)
        pool = device.open_pool("throwaway")
        graph = device.capture(lambda: device.launch(gemm=True), pool, size=1, warmups=0)
        graph.reset()
        pool.release()
        device.settle()
        held = device.snapshot().pool(pool.id)
        assert (held.reserved_bytes, held.use_count) == (32 * MIB, 0)
        device.settle(clear_workspaces=True)
        assert device.snapshot().pool(pool.id) is None


class TestPools:
    def test_scope(self, device):
        """Inside a pool's scope allocations go to it; its end releases what nothing uses."""
        pool = device.open_pool("kv")
        with pool:
            kv = device.buffers(4, 64 * MIB)
        usage = device.snapshot().pool(pool.id)
        assert (usage.purpose, usage.active_bytes, usage.use_count) == ("kv", 256 * MIB, 1)
        del kv
        pool.release()
        pool.release()
        assert device.snapshot().pool(pool.id) is None
        assert pool.use_count() == 0

    def test_names_the_leak(self, device):
        """A pool that is released while a buffer lives stays, and the holder test finds that buffer."""
        pool = device.open_pool("kv")
        with pool:
            (kept,) = device.buffers(1, 64 * MIB)
        (other,) = device.buffers(1, 64 * MIB)
        test = device.holder_test(pool.id)
        pool.release()
        device.settle()
        assert device.snapshot().pool(pool.id).reserved_bytes == 64 * MIB
        assert [test(buffer) for buffer in (kept, other, "text")] == [True, False, False]
        assert device.address(kept) == kept.address

    def test_reopened(self, device):
        """Capturing into a pool whose last user is gone is torch's assertion, category pool."""
        pool = device.open_pool("throwaway")
        graph = device.capture(lambda: decode(device), pool, size=1)
        kept = graph.output
        graph.reset()
        pool.release()
        with pytest.raises(InternalAssertError, match="use_count > 0") as caught:
            device.capture(lambda: decode(device), pool, size=1)
        assert device.category(caught.value) == "pool"
        kept.free()

    def test_dies_unreleased(self, device):
        """A pool object that dies releases its pool."""
        pool = device.open_pool("kv")
        with pool:
            device.buffers(1, 64 * MIB)
        del pool
        gc.collect()
        assert device.snapshot().reserved_bytes == 0


class TestCapture:
    def test_counts(self, device):
        """A graph knows its size, its nodes and its output, and holds the pool once."""
        pool = device.open_pool("throwaway")
        graph = device.capture(lambda: decode(device, nodes=7), pool, size=16, warmups=2)
        assert (graph.size, graph.nodes) == (16, 7)
        assert isinstance(graph.output, SimulatedBuffer)
        assert pool.use_count() == 2
        assert device.snapshot().pool(pool.id).active_bytes == 3 * MIB
        graph.replay()
        assert graph.replays == 1
        graph.reset()
        graph.reset()
        assert pool.use_count() == 1
        with pytest.raises(RuntimeError, match="reset"):
            graph.replay()

    def test_shares(self, device):
        """Graphs of one pool reuse each other's scratch: three segments of 40 MiB for 20 of them, outputs within."""
        pool = device.open_pool("throwaway")
        graphs = [device.capture(lambda: decode(device), pool, size=size) for size in range(20)]
        assert device.snapshot().pool(pool.id).reserved_bytes == 120 * MIB
        assert len(graphs) == 20

    def test_own_error(self, device):
        """An error of the engine's own ends the capture cleanly."""
        pool = device.open_pool("throwaway")
        with pytest.raises(ZeroDivisionError):
            device.capture(lambda: 1 // 0, pool, size=1)
        assert (pool.use_count(), device.capturing) == (1, False)
        assert device.allocator.captures_underway == ()

    def test_out_of_memory(self, device):
        """Out of memory in a capture is read with its figures and the largest blocks, and the pool can be dropped."""
        pool = device.open_pool("throwaway")
        kept = SimulatedBuffer(device, 6 * GIB)
        with pytest.raises(DeviceOutOfMemoryError) as caught:
            device.capture(lambda: SimulatedBuffer(device, 3 * GIB), pool, size=1, warmups=0)
        facts = device.out_of_memory(caught.value)
        assert (facts.tried_bytes, facts.free_bytes) == (3 * GIB, 2 * GIB)
        assert facts.blocks == ({"pool": "0.0", "bytes": 6 * GIB},)
        assert device.category(caught.value) == "oom"
        assert pool.use_count() == 1
        kept.free()

    def test_not_out_of_memory(self, device):
        """Another error has no such figures."""
        assert device.out_of_memory(ValueError("x")) is None
        assert device.category(ValueError("x")) is None

    def test_driver_words(self, device):
        """A driver's own out of memory has no figures but its blocks."""
        assert device.out_of_memory(RuntimeError("CUDA error: out of memory")).tried_bytes is None

    @pytest.mark.parametrize("what", ["synchronize", "settle"])
    def test_waiting(self, device, what):
        """Waiting for the device invalidates a capture."""
        pool = device.open_pool("throwaway")
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing") as caught:
            device.capture(getattr(device, what), pool, size=1, warmups=0)
        assert device.category(caught.value) == "capture"

    def test_nested(self, device):
        """A capture inside a capture is forbidden."""
        pool, inner = device.open_pool("outer"), device.open_pool("inner")
        with pytest.raises(RuntimeError, match="not permitted"):
            device.capture(lambda: device.capture(lambda: None, inner, size=1), pool, size=1, warmups=0)

    def test_swallowed(self, device):
        """A body that hides the error fails at the end of the capture, in CUDA's words."""
        pool = device.open_pool("throwaway")

        def hides():
            with pytest.raises(RuntimeError, match="not permitted"):
                device.synchronize()

        with pytest.raises(RuntimeError, match="failed due to a previous error during capture"):
            device.capture(hides, pool, size=1, warmups=0)


class TestRepair:
    def fail(self, device):
        pool = device.open_pool("throwaway")
        with pytest.raises(RuntimeError, match="not permitted"):
            device.capture(lambda: forbidden(device), pool, size=1, warmups=0)
        return pool

    def test_poisoned(self, device):
        """An invalidated capture leaves its pool open: the default cache is no longer emptied."""
        self.fail(device)
        SimulatedBuffer(device, 64 * MIB).free()
        # With the pool open, the default stream still allocates from the default pool.
        device.settle()
        assert device.snapshot().pool("0.0").reserved_bytes == 64 * MIB

    def test_repaired(self, device):
        """Ending and releasing the pool repairs it, and that is proven by an allocation that comes back."""
        pool = self.fail(device)
        SimulatedBuffer(device, 64 * MIB).free()
        repair = device.repair(pool)
        assert repair.proven
        assert repair.evidence["capture_was_open"]
        assert repair.evidence["pool_gone"]
        assert repair.evidence["reserved_after_bytes"] == 0
        assert repair.evidence["reserved_with_probe_bytes"] == 2 * MIB
        assert device.allocator.captures_underway == ()

    def test_held(self, device):
        """While a buffer of the failed capture lives, the pool is not gone and nothing is proven."""
        held = []
        pool = device.open_pool("throwaway")

        def body():
            held.append(SimulatedBuffer(device, 5 * MIB))
            forbidden(device)

        with pytest.raises(RuntimeError, match="not permitted"):
            device.capture(body, pool, size=1, warmups=0)
        repair = device.repair(pool)
        assert not repair.proven
        assert repair.evidence["pool_reserved_bytes"] == 20 * MIB

    def test_full(self, device):
        """A device without a page cannot prove anything."""
        pool = self.fail(device)
        device.neighbour_takes("9", device.snapshot().free_bytes)
        repair = device.repair(pool)
        assert not repair.proven
        assert "out of memory" in repair.evidence["error"]

    def test_second_capture_open(self, device):
        """With another capture left open the pool cannot be emptied, as torch asserts."""
        first, second = self.fail(device), self.fail(device)
        repair = device.repair(first)
        assert not repair.proven
        assert "captures_underway.empty()" in repair.evidence["error"]
        assert device.repair(second).proven


class TestNeighbours:
    def test_named(self, device):
        """A neighbour is a tenant, and its bytes are not ours."""
        device.neighbour_takes("4711", GIB)
        snapshot = device.snapshot()
        assert [(tenant.label, tenant.bytes) for tenant in snapshot.tenants] == [("4711", GIB)]
        assert (snapshot.used_bytes, snapshot.process_bytes) == (GIB, 0)
        device.neighbour_frees("4711", 512 * MIB)
        device.neighbour_frees("4711")
        assert device.snapshot().tenants == ()

    def test_too_much(self, device):
        """A neighbour cannot take what is not free."""
        with pytest.raises(ValueError, match="neighbour 4711 asked for"):
            device.neighbour_takes("4711", 9 * GIB)

    def test_in_the_sentence(self, device):
        """The out-of-memory sentence names it."""
        device.neighbour_takes("4711", 6 * GIB)
        with pytest.raises(DeviceOutOfMemoryError, match=r"Process 4711 has 6\.00 GiB memory in use\."):
            device.buffers(1, 3 * GIB)


class TestArena:
    def test_in_snapshots(self, device):
        """A mapped arena stands beside torch, not within it."""
        arena = device.reserve(count=2, block_bytes=MIB, blocks=100)
        arena.map_blocks(3)
        snapshot = device.snapshot()
        assert (snapshot.arena_mapped_bytes, snapshot.arena_reserved_bytes) == (8 * MIB, 200 * MIB)
        assert (snapshot.reserved_bytes, snapshot.outside_bytes, snapshot.unexplained_bytes) == (0, 0, 0)
        first, second = arena.buffers()
        test = device.holder_test(None)
        assert test(first)
        assert test(second)
        assert second.address - first.address == 100 * MIB
        arena.close()
        assert device.snapshot().arena_reserved_bytes == 0

    def test_two(self, device):
        """Two arenas do not overlap."""
        first, second = (device.reserve(count=2, block_bytes=MIB, blocks=100) for _ in range(2))
        assert second.base == first.base + first.reserved_bytes

    def test_no_growth_in_capture(self, device):
        """Nothing is mapped while a capture is open."""
        arena = device.reserve(count=1, block_bytes=MIB, blocks=100)
        pool = device.open_pool("graphs")
        with pytest.raises(RuntimeError, match="mapping memory while a capture is open"):
            device.capture(lambda: arena.map_blocks(1), pool, size=1, warmups=0)
        assert arena.mapped_bytes == 0

    def test_full(self, device):
        """A device that has no page left says so in CUDA's words."""
        arena = device.reserve(count=1, block_bytes=MIB, blocks=100)
        device.neighbour_takes("9", 8 * GIB)
        with pytest.raises(RuntimeError, match="CUDA error: out of memory") as caught:
            arena.map_blocks(1)
        assert device.category(caught.value) == "oom"


class TestReadings:
    def test_identity(self):
        """Every byte in use has a holder."""
        device = SimulatedDevice(H200_BYTES, neighbours={"1": GIB})
        pool = device.open_pool("graphs")
        graphs = [device.capture(lambda: decode(device), pool, size=size) for size in (8, 4)]
        arena = device.reserve(count=1, block_bytes=MIB, blocks=10)
        arena.map_blocks(10)
        snapshot = device.snapshot(settled=True)
        parts = snapshot.outside_bytes + snapshot.reserved_bytes + snapshot.arena_mapped_bytes + snapshot.other_bytes
        assert parts == snapshot.used_bytes
        assert sum(pool.reserved_bytes for pool in snapshot.pools) == snapshot.reserved_bytes
        assert snapshot.settled
        assert len(graphs) == 2

    def test_peaks(self, device):
        """Peaks start again when they are reset."""
        SimulatedBuffer(device, 64 * MIB).free()
        assert device.snapshot().allocated_peak_bytes == 64 * MIB
        device.settle()
        device.reset_peaks()
        assert device.snapshot().allocated_peak_bytes == 0
        assert device.snapshot().reserved_peak_bytes == 0

    def test_limit(self):
        """A process limit is kept."""
        device = SimulatedDevice(8 * GIB, costs=Costs.none(), limit_bytes=GIB)
        with pytest.raises(DeviceOutOfMemoryError, match="allowed"):
            device.malloc(2 * GIB)

    def test_trace(self):
        """The allocator's history can be listened to."""
        entries = []
        device = SimulatedDevice(8 * GIB, costs=Costs.none(), trace=entries.append)
        SimulatedBuffer(device, 1).free()
        assert [entry.action for entry in entries] == ["segment_alloc", "alloc", "free_requested", "free_completed"]

    def test_scope(self, device):
        """There is nothing to follow without tensors."""
        with device.scope() as nothing:
            assert nothing is None
