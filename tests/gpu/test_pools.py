"""Pools on a card: an id that stays safe, one reference that proves that graphs are gone, and what pins a pool."""

from __future__ import annotations

import importlib

import pytest
import torch

from startup_fsm.devices.cuda_readings import pool_segments
from startup_fsm.memory import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture
def values():
    return torch.ones(MIB, device="cuda")


def left(pool):
    """Bytes of segments that a pool has."""
    return sum(high - low for low, high in pool_segments(0, pool.key))


class TestZombies:
    def test_bare_handle(self, child):
        """A handle whose only graph died while its output lives asserts when it is captured into again."""
        found = child("zombie")
        assert "use_count > 0 INTERNAL ASSERT FAILED" in found["error"]
        assert found["category"] == "pool"
        assert found["output"] == 2

    def test_pool_of_ours(self, device, values):
        """The same with a pool of ours captures, and the old output is untouched."""
        pool = device.open_pool("throwaway_graphs")
        graph = device.capture(lambda: values * 2, pool, size=1)
        graph.replay()
        output = graph.output
        graph.reset()
        again = device.capture(lambda: values * 3, pool, size=1)
        again.replay()
        assert bool((output == 2).all())
        assert bool((again.output == 3).all())
        again.reset()
        pool.release()

    def test_use_count(self, device, values):
        """One reference is ours, each graph has one, and a reset gives it back."""
        pool = device.open_pool("graphs")
        assert pool.use_count() == 1
        graphs = [device.capture(lambda: values * 2, pool, size=size) for size in (2, 1)]
        assert pool.use_count() == 3
        for graph in graphs:
            graph.reset()
        assert pool.use_count() == 1
        pool.release()
        assert pool.use_count() == 0
        assert pool.is_released


class TestRelease:
    def test_all_comes_back(self, device, values):
        """After reset and release no segment is left, and what torch reserves is what it was."""
        before = device.snapshot()
        pool = device.open_pool("throwaway_graphs")
        graph = device.capture(lambda: torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), pool, size=1)
        assert left(pool) == 64 * MIB
        graph.reset()
        pool.release()
        device.settle()
        after = device.snapshot()
        assert left(pool) == 0
        assert after.pool(pool.id) is None
        assert after.reserved_bytes == before.reserved_bytes

    def test_output_pins(self, device, values):
        """An output that lives keeps its segment when the pool is released; when it dies, the segment goes."""
        pool = device.open_pool("throwaway_graphs")
        graph = device.capture(lambda: torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), pool, size=1)
        kept = graph.output
        graph.reset()
        pool.release()
        device.settle()
        assert left(pool) == 64 * MIB
        del kept
        device.settle()
        assert left(pool) == 0

    def test_workspace_pins(self, device):
        """A cuBLAS workspace that is first used inside a capture pins the pool until workspaces are cleared."""
        weights = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
        weights @ weights
        device.settle(clear_workspaces=True)
        pool = device.open_pool("throwaway_graphs")
        graph = device.capture(lambda: weights @ weights, pool, size=1, warmups=0)
        graph.reset()
        pool.release()
        device.settle()
        assert left(pool) >= 8 * MIB
        settled = device.settle(clear_workspaces=True)
        assert settled.workspaces_cleared
        assert left(pool) == 0

    def test_expandable_segments(self, child):
        """Pools come back where torch uses expandable segments too."""
        assert child("expandable")["left"] == [0, 0]


class TestScope:
    def test_allocations_go_to_the_pool(self, device):
        """Inside its scope allocations are the pool's, by name, and outside again the default pool's."""
        pool = device.open_pool("profiling_kv")
        default = device.snapshot().pool("0.0").reserved_bytes
        with pool:
            held = torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
        usage = device.snapshot().pool(pool.id)
        assert (usage.purpose, usage.reserved_bytes, usage.active_bytes) == ("profiling_kv", 48 * MIB, 48 * MIB)
        assert device.snapshot().pool("0.0").reserved_bytes == default
        assert pool.use_count() == 1
        del held
        pool.release()
        assert left(pool) == 0


def many(values):
    """A thousand small kernels."""
    for _ in range(1_000):
        values.add_(1)


class TestCapture:
    def test_replay_equals_eager(self, device, values):
        """A replay computes what the body computes, on what its input holds then."""
        pool = device.open_pool("graphs")
        graph = device.capture(lambda: torch.sin(values * 3), pool, size=7)
        values.fill_(0.25)
        graph.replay()
        assert torch.equal(graph.output, (values * 3).sin())
        assert graph.size == 7
        graph.reset()
        pool.release()

    def test_steps_apart(self, device, values):
        """Nodes are counted, and what instantiation and upload took is told apart."""
        pool = device.open_pool("graphs")
        graph = device.capture(lambda: torch.cos(torch.sin(values * 3)), pool, size=1)
        assert graph.nodes == 3
        assert graph.instantiate_bytes % (2 * MIB) == 0
        assert graph.upload_bytes % (2 * MIB) == 0
        assert graph.duration_ns > 0
        graph.reset()
        pool.release()

    def test_driver_keeps(self, device, values):
        """What graphs took outside torch stays with the driver, and the next graphs of that kind take it again."""
        settled = device.settle(clear_workspaces=True)
        pools, outside = [device.open_pool("throwaway_graphs"), device.open_pool("graphs")], []
        for pool in pools:
            before = device.snapshot().outside_bytes
            graphs = [device.capture(lambda: many(values), pool, size=size, warmups=0) for size in range(16)]
            outside.append(device.snapshot().outside_bytes - before)
            for graph in graphs:
                graph.reset()
            pool.release()
            settled = device.settle(clear_workspaces=True)
            outside.append(device.snapshot().outside_bytes - before)
        first, kept, second, _ = outside
        print(f"first {first}, kept {kept}, second {second}")
        assert first > 8 * MIB
        assert kept == pytest.approx(first, abs=4 * MIB)
        assert second <= 4 * MIB
        assert settled.late_return_bytes == 0

    def test_first_capture(self, child):
        """A capture that ended leaves nothing reserved, the first one of a process no more than the second."""
        found = child("first_capture")
        assert (found["first"], found["second"]) == (0, 0)

    def test_trims(self, device):
        """Memory that a graph allocates by itself stays after its end, until settling trims it."""
        driver, runtime = (
            importlib.import_module("cuda.bindings.driver"),
            importlib.import_module("cuda.bindings.runtime"),
        )

        def body():
            stream = torch.cuda.current_stream().cuda_stream
            pointer = runtime.cudaMallocAsync(64 * MIB, stream)[1]
            runtime.cudaMemsetAsync(pointer, 0, 64 * MIB, stream)
            runtime.cudaFreeAsync(pointer, stream)

        def reserved():
            attribute = driver.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
            return int(driver.cuDeviceGetGraphMemAttribute(0, attribute)[1])

        pool = device.open_pool("graphs")
        graph = device.capture(body, pool, size=1, warmups=0)
        graph.replay()
        torch.cuda.synchronize()
        assert reserved() == 64 * MIB
        graph.reset()
        assert reserved() == 64 * MIB
        pool.release()
        device.settle()
        assert reserved() == 0

    def test_largest_first_shares(self, device):
        """A smaller graph, captured after the largest on the same stream, takes no new segment."""
        source = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        pool = device.open_pool("graphs")

        def captured(size):
            return device.capture(lambda: torch.clone((source[: size * MIB] + 1)[:1]), pool, size=size)

        graphs = [captured(64)]
        reserved = left(pool)
        graphs += [captured(size) for size in (32, 24, 12)]
        assert left(pool) == reserved
        for graph in graphs:
            graph.reset()
        pool.release()
