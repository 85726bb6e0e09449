"""Whole starts on a card, with an engine of a few matrices: what was predicted is what was taken."""

from __future__ import annotations

import pytest
import torch

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.engine import LongestRequest
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import single_capture, throwaway

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, BLOCK = 2_048, 4, 16
SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


class LittleEngine:
    """Matrices with a KV cache between them: enough to see graphs, workspaces and growth."""

    name = "little"

    def __init__(self, *, breaks=False):
        self.breaks = breaks
        self.graphs, self.caches = {}, []

    def load_weights(self, step):
        step.note(checkpoint_bytes=(LAYERS * WIDTH + 32_000) * WIDTH * 2)
        self.weights = [
            torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5 for _ in range(LAYERS)
        ]
        self.head = torch.randn(WIDTH, 32_000, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5
        self.inputs = torch.randn(SIZES[0], WIDTH, device="cuda", dtype=torch.bfloat16)
        self.slots = torch.arange(SIZES[0], device="cuda")

    def profile_activations(self, step):
        values = torch.randn(4_096, WIDTH, device="cuda", dtype=torch.bfloat16)
        for weight in self.weights:
            values = torch.nn.functional.silu(values @ weight)
        logits = values[: SIZES[0]] @ self.head
        with step.part("sampler"):
            logits.float().softmax(-1).sort(-1)

    def kv_block_bytes(self):
        return LAYERS * BLOCK * WIDTH * 2

    def longest_request(self):
        return LongestRequest(1_024, BLOCK)

    def profiling_blocks(self):
        return SIZES[0] // BLOCK

    def allocate_kv(self, step, blocks):
        buffers = step.kv_buffers(LAYERS, BLOCK * WIDTH * 2, blocks)
        self.caches = [buffer.view(torch.bfloat16).view(-1, WIDTH) for buffer in buffers]
        self.usable = blocks

    def commit_kv(self, step, blocks):
        self.usable = blocks

    def kv_addresses(self):
        return [cache.data_ptr() for cache in self.caches]

    def capture_sizes(self):
        return SIZES

    def capture(self, step, size):
        def body():
            if self.breaks and size == 32:
                torch.cuda.synchronize()
            return self.decode(size)

        self.graphs[size] = step.capture(size, body, warmups=0 if self.breaks and size == 32 else 1)

    def decode(self, size):
        values, slots = self.inputs[:size], self.slots[:size]
        for weight, cache in zip(self.weights, self.caches, strict=True):
            values = torch.nn.functional.silu(values @ weight)
            cache.index_copy_(0, slots, values)
            values = values + cache.index_select(0, slots)
        return values @ self.head

    def release_graphs(self):
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()

    def release_kv(self):
        self.caches = []

    def verify(self, step):
        self.profile_activations(step)
        self.slots.copy_(torch.arange(self.usable * BLOCK - SIZES[0], self.usable * BLOCK, device="cuda"))
        for size in (SIZES[0], 1):
            eager = self.decode(size)
            if size in self.graphs:
                self.graphs[size].replay()
                equal = torch.equal(eager, self.graphs[size].output)
                step.probe("replay", {"equal": equal, "largest_difference": 0.0 if equal else 1.0}, size=size)


@pytest.fixture
def start(device, tmp_path):
    """Starts an engine in a journal of its own: the engine, the boot, the budget. Nothing of it stays on the card."""
    engines, boots = [], []

    def run(plan, engine=None, **knobs):
        knobs = Knobs(requested_bytes=8 * GIB, **knobs)
        boots.append(Bootstrap(plan=plan, journal=tmp_path, device=device, knobs=knobs, discover=False, progress=False))
        engines.append(engine or LittleEngine())
        with torch.no_grad():
            budget = boots[-1].run(engines[-1])
        return engines[-1], boots[-1], budget

    yield run
    for engine, boot in zip(engines, boots, strict=True):
        engine.release_graphs()
        vars(engine).clear()
        boot.measurement.pools.clear()
        if boot.measurement.arena is not None:
            boot.measurement.arena.close()


def used_peak(visit):
    """Most that the process had during a visit: outside torch, arena, and the peak of what torch reserved."""
    return visit.after.outside_bytes + visit.after.arena_mapped_bytes + visit.after.reserved_peak_bytes


def findings(boot):
    """Codes of findings that are more than notes."""
    return [each.code for _, judged in boot.history.checks for each in judged.findings if each.severity != "note"]


def test_throwaway(start):
    """What the throwaway graphs gave back is what the real ones take, and the request is filled to the margin."""
    engine, boot, budget = start(throwaway())
    history = boot.history
    capture = history.last("capture_graphs")
    taken = capture.after.own_bytes - capture.before.own_bytes
    predicted = history.estimates[-1][1].recurring_bytes
    print(f"predicted {predicted / MIB:.1f} MiB, taken {taken / MIB:.1f} MiB, blocks {budget.blocks}")
    assert history.finished[1].end == "ready"
    assert findings(boot) == []
    assert abs(taken - predicted) <= 4 * MIB
    peak, margin = used_peak(history.last("verify")), 151 * MIB
    print(f"peak {peak / MIB:.1f} of {8 * GIB / MIB:.0f} MiB requested")
    assert 0 <= 8 * GIB - peak <= margin + engine.kv_block_bytes() + 2 * MIB
    assert [each.instantiate_bytes is None for _, each in capture.captures] == [False] * len(SIZES)


def test_single_capture(start):
    """One capture; the last block was mapped after it, and replay into it equals eager."""
    engine, boot, budget = start(single_capture())
    history = boot.history
    mapped = history.last("verify").after
    print(f"blocks {budget.blocks}, mapped {mapped.arena_mapped_bytes / MIB:.1f} MiB")
    assert history.finished[1].end == "ready"
    assert findings(boot) == []
    assert len(history.visits_of("capture_graphs")) == 1
    assert engine.usable == budget.blocks > engine.profiling_blocks()
    assert used_peak(history.last("verify")) <= 8 * GIB
    assert mapped.arena_mapped_bytes <= mapped.arena_reserved_bytes


def test_capture_fails(start):
    """A throwaway capture that fails is repaired, proven, and the start goes on without graphs where that is allowed."""
    _, boot, _ = start(throwaway(allow_eager=True), LittleEngine(breaks=True), allow_eager=True)
    history = boot.history
    repair = history.last("recover_allocator").probes["repair"][1]
    print(dict(repair.result))
    assert repair.result["proven"]
    assert history.last("capture_throwaway").failed.category == "capture"
    assert history.finished[1].end == "ready"
    assert history.last("capture_graphs") is None
