"""Readings on a card: they add up, this process is found, and settling comes to rest."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from startup_fsm.devices.cuda import CudaDevice
from startup_fsm.memory import MIB, accounts

pytestmark = pytest.mark.gpu

PAGE = 2 * MIB


class TestIdentity:
    def test_adds_up(self, device):
        """The accounts of a snapshot with pools, an arena and a graph sum to what is used, and pools to reserved."""
        kv, graphs = device.open_pool("kv"), device.open_pool("graphs")
        values = torch.ones(3 * MIB, device="cuda")
        with kv:
            cache = torch.empty(33 * MIB + 5, dtype=torch.uint8, device="cuda")
        graph = device.capture(lambda: values * 2, graphs, size=1)
        arena = device.reserve(2, MIB, 64)
        arena.map_blocks(10)
        snapshot = device.snapshot()
        by_pool = sum(pool.reserved_bytes for pool in snapshot.pools)
        assert by_pool == snapshot.reserved_bytes == torch.cuda.memory_reserved()
        assert sum(pool.active_bytes for pool in snapshot.pools) == snapshot.allocated_bytes
        assert sum(pool.requested_bytes for pool in snapshot.pools) == snapshot.requested_bytes
        assert snapshot.arena_mapped_bytes == 20 * MIB
        assert sum(account.bytes for account in accounts(snapshot)) == snapshot.used_bytes
        assert {pool.purpose for pool in snapshot.pools} >= {"default", "kv", "graphs"}
        graph.reset()
        del cache
        kv.release()
        graphs.release()
        arena.close()

    def test_says_where_from(self, device):
        """Every group of figures has its source."""
        sources = device.snapshot().sources
        assert sources["device"] == "mem_get_info"
        assert sources["process"] in ("NVML by pid", "NVML by probe")

    def test_cheap(self, device):
        """A snapshot changes nothing and takes milliseconds."""
        device.snapshot()
        before = torch.cuda.memory_stats()
        snapshot = device.snapshot()
        assert torch.cuda.memory_stats() == before
        assert snapshot.cost_ns < 20_000_000

    def test_names(self, device):
        """The device has its product name."""
        assert device.kind == "cuda"
        assert torch.cuda.get_device_name(0) in device.name


class TestProcess:
    def test_found(self, device):
        """NVML lists this process, and its bytes follow a tensor and an arena to the page."""
        before = device.snapshot()
        held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        arena = device.reserve(1, MIB, 512)
        arena.map_blocks(256)
        after = device.snapshot()
        assert device.nvml.own_source in ("pid", "probe")
        assert after.process_bytes - before.process_bytes == pytest.approx(768 * MIB, abs=PAGE)
        assert after.own_bytes == after.process_bytes
        arena.close()
        del held

    def test_little_is_unexplained(self, device):
        """What is used and neither ours nor a tenant's is a few MiB, and stays what it is."""
        before = device.snapshot()
        held = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        after = device.snapshot()
        assert abs(after.unexplained_bytes) < 64 * MIB
        assert abs(after.unexplained_bytes - before.unexplained_bytes) <= PAGE
        del held

    def test_neighbour(self, device, neighbour):
        """Another process is named with its bytes, and moves nothing of ours."""
        before = device.snapshot()
        pid = neighbour()
        after = device.snapshot()
        [tenant] = after.tenants
        print(pid, tenant, after.unexplained_bytes - before.unexplained_bytes)
        assert before.tenants == ()
        assert tenant.bytes > 512 * MIB
        assert after.own_bytes == before.own_bytes
        assert after.used_bytes - before.used_bytes - tenant.bytes == pytest.approx(0, abs=16 * MIB)
        assert sum(account.bytes for account in accounts(after)) == after.used_bytes

    def test_neighbour_without_nvml(self, neighbour):
        """Without NVML the same process is charged to us: nobody can tell it apart."""
        device = CudaDevice(use_nvml=False)
        before = device.snapshot()
        neighbour()
        after = device.snapshot()
        assert after.tenants == ()
        assert after.own_bytes - before.own_bytes == after.used_bytes - before.used_bytes > 512 * MIB

    def test_without_nvml(self):
        """With NVML switched off nobody tells the process, and all that is used is charged to us."""
        snapshot = CudaDevice(use_nvml=False).snapshot()
        assert snapshot.process_bytes is None
        assert snapshot.tenants == ()
        assert snapshot.own_bytes == snapshot.used_bytes
        assert (snapshot.other_bytes, snapshot.unexplained_bytes) == (0, 0)
        assert "process" not in snapshot.sources

    def test_totals(self, device):
        """NVML's total is CUDA's and what the driver reserves."""
        snapshot, memory = device.snapshot(), device.nvml.memory()
        assert memory.total - memory.reserved == pytest.approx(snapshot.total_bytes, abs=PAGE)


class TestSettle:
    def test_garbage(self, device):
        """A cycle that holds a tensor is collected though it was frozen, its segment goes, and the reading stands still."""
        before = torch.cuda.memory_reserved()
        cycle = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")]
        cycle.append(cycle)
        gc.freeze()
        del cycle
        settled = device.settle()
        assert gc.get_freeze_count() > 0
        gc.unfreeze()
        assert torch.cuda.memory_reserved() == before
        assert settled.polls >= 3
        assert settled.duration_ns < 2_000_000_000
        readings = {torch.cuda.mem_get_info()[0] for _ in range(5) if time.sleep(0.02) is None}
        assert len(readings) == 1

    def test_live_graphs(self, device):
        """Settling with a live graph leaves it as it was."""
        values = torch.ones(MIB, device="cuda")
        pool = device.open_pool("graphs")
        graph = device.capture(lambda: values * 2, pool, size=1)
        device.settle()
        values.fill_(4)
        graph.replay()
        assert bool((graph.output == 8).all())
        graph.reset()
        pool.release()

    def test_peaks(self, device):
        """Peaks begin again from what is held."""
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert device.snapshot().allocated_peak_bytes >= 64 * MIB
        device.settle()
        device.reset_peaks()
        snapshot = device.snapshot()
        assert snapshot.allocated_peak_bytes == snapshot.allocated_bytes
        assert snapshot.reserved_peak_bytes == snapshot.reserved_bytes
