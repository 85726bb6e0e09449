"""Who holds a pool that should be gone: planted holders are named."""

from __future__ import annotations

import functools

import pytest
import torch

from startup_fsm import probes
from startup_fsm.devices.cuda_readings import pool_segments
from startup_fsm.memory import MIB

pytestmark = pytest.mark.gpu


@pytest.fixture
def pool(device):
    made = device.open_pool("profiling_kv")
    yield made
    made.release()


def tensor(pool):
    """A tensor of that pool."""
    with pool:
        return torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")


def found(device, pool):
    """What holds the pool after it was released, as the proof of teardown asks."""
    lives_there = device.holder_test(pool.id)
    pool.release()
    device.settle(clear_workspaces=True)
    return probes.holders(lives_there)


class Layer:
    """Keeps a view of the KV cache that nobody remembers."""


def test_attribute(device, pool):
    """An attribute of an object, though it is only a view."""
    layer = Layer()
    layer.scale = tensor(pool)[: 4 * MIB].view(torch.bfloat16)
    [holder] = found(device, pool)
    assert holder.kind == "attribute"
    assert holder.path.endswith("Layer.scale")
    assert holder.bytes == 24 * MIB


def test_closure(device, pool):
    """A cell of a closure."""

    def made():
        kept = tensor(pool)
        return lambda: kept

    keeper = made()
    [holder] = found(device, pool)
    assert holder.kind == "closure"
    assert keeper() is not None


def test_partial(device, pool):
    """An argument of a partial."""
    keeper = functools.partial(torch.add, tensor(pool))
    [holder] = found(device, pool)
    assert holder.kind == "partial"
    assert "functools.partial" in holder.path
    assert keeper.args


def test_frame(device, pool):
    """A local variable of a function that still runs."""
    forgotten = tensor(pool)
    [holder] = found(device, pool)
    assert holder.kind == "frame"
    assert "local forgotten in test_frame" in holder.path
    assert forgotten.is_cuda


def test_workspace(device):
    """A cuBLAS workspace has no Python owner: the pool is still there, and nobody is named."""
    weights = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    weights @ weights
    device.settle(clear_workspaces=True)
    pool = device.open_pool("throwaway_graphs")
    graph = device.capture(lambda: weights @ weights, pool, size=1, warmups=0)
    graph.reset()
    lives_there = device.holder_test(pool.id)
    pool.release()
    device.settle()
    assert pool_segments(0, pool.key)
    assert probes.holders(lives_there) == []


def test_output_of_a_graph(device):
    """An output of a graph that somebody kept, by name."""
    values = torch.ones(8 * MIB, device="cuda")
    pool = device.open_pool("throwaway_graphs")
    layer = Layer()
    graph = device.capture(lambda: values * 2, pool, size=1)
    layer.logits = graph.output
    graph.reset()
    [holder] = found(device, pool)
    assert holder.path.endswith("Layer.logits")


def test_arena(device):
    """What points into the arena is named; what does not is not."""
    arena = device.reserve(2, MIB, 64)
    layer, other = Layer(), torch.ones(MIB, device="cuda")
    layer.keys = arena.buffers()[1]
    [holder] = probes.holders(device.holder_test(None))
    assert holder.path.endswith("Layer.keys")
    assert other.is_cuda
    del layer.keys
    assert probes.holders(device.holder_test(None)) == []
    arena.close()
