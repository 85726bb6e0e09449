"""An engine of a few matrices with a KV cache between them: enough to see graphs, workspaces and growth."""

from __future__ import annotations

import torch

from startup_fsm.engine import LongestRequest

WIDTH, LAYERS, BLOCK = 2_048, 4, 16
SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)


class LittleEngine:
    """Matrices with a KV cache between them: enough to see graphs, workspaces and growth."""

    name = "little"

    def __init__(self, *, breaks=False, row_bytes=0):
        self.breaks = breaks
        self.row_bytes, self.of_graphs = row_bytes, []
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
        if self.row_bytes and torch.cuda.is_current_stream_capturing():
            # Memory that only graphs have.
            self.of_graphs.append(torch.empty(size * self.row_bytes, dtype=torch.uint8, device="cuda"))
        return values @ self.head

    def release_graphs(self):
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.of_graphs.clear()

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


class Replayed:
    """A graph of plain torch with what it leaves; a graph that somebody keeps is not reset under him."""

    def __init__(self, graph, output):
        self.replay, self.output = graph.replay, output

    def reset(self):
        self.replay = self.output = None


class OwnCaptures(LittleEngine):
    """
    Captures with plain torch, into a pool of its own.

    ``keeps`` an ``output`` or a ``graph`` that it should let go; ``cripples`` the allocator by waiting in a capture.
    """

    def __init__(self, *, keeps=None, cripples=False, **given):
        super().__init__(**given)
        self.keeps, self.cripples = keeps, cripples
        self.pool, self.kept = None, None

    def capture(self, step, size):
        self.decode(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = self.decode(size)
            if self.cripples:
                torch.cuda.synchronize()
        self.pool = self.pool or graph.pool()
        if self.keeps:
            self.kept = output if self.keeps == "output" else graph
        self.graphs[size] = Replayed(graph, output)

    def release_graphs(self):
        super().release_graphs()
        self.pool = None
