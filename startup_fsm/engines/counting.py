"""
An engine that only counts bytes: it mallocs and frees on a simulated device and computes nothing. No torch.

It goes through every state in milliseconds, so it is what hooks, plans and crashes are tried on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engine import Graph, LongestRequest, Step
from startup_fsm.memory import MIB


@attrs.define(kw_only=True)
class CountingEngine:
    """
    Bytes by state, all in bytes.

    Attributes:
        device: Where they are counted.
        weights: Weights, in ``layers`` parts.
        activations: Transient peak of the largest step.
        sampler: Transient peak of the sampler beside it.
        block: One KV block over all layers.
        sizes: Batch sizes with a graph.
        row: Output kept alive by a graph, for each row.
        tokens: Length of the longest request; blocks have 16 tokens.
    """

    device: SimulatedDevice
    weights: int = 512 * MIB
    layers: int = 8
    activations: int = 96 * MIB
    sampler: int = 16 * MIB
    block: int = MIB
    sizes: Sequence[int] = (1, 2, 4, 8, 16)
    row: int = 512 * 1024
    tokens: int = 1024
    name: str = "counting"
    _graphs: list[Graph] = attrs.field(factory=list, init=False)
    _kv: list[Any] = attrs.field(factory=list, init=False)

    def knobs(self) -> dict[str, Any]:
        """Settings for the journal."""
        return {"capture_sizes": list(self.sizes), "max_model_len": self.tokens}

    def load_weights(self, step: Step) -> None:
        """One allocation a layer."""
        step.note(checkpoint_bytes=self.weights)
        for _ in range(self.layers):
            self.device.malloc(self.weights // self.layers)

    def profile_activations(self, step: Step) -> None:
        """The largest step, and the sampler."""
        self._work(self.activations)
        with step.part("sampler"):
            self._work(self.sampler)

    def _work(self, size: int) -> None:
        address = self.device.malloc(size)
        self.device.launch(1, gemm=True)
        self.device.free(address)

    def kv_block_bytes(self) -> int:
        """As given."""
        return self.block

    def longest_request(self) -> LongestRequest:
        """Blocks of 16 tokens."""
        return LongestRequest(self.tokens, 16)

    def allocate_kv(self, step: Step, blocks: int) -> None:
        """One buffer a layer."""
        self._kv = step.kv_buffers(self.layers, self.block // self.layers, blocks)

    def capture_sizes(self) -> Sequence[int]:
        """As given."""
        return self.sizes

    def capture(self, step: Step, size: int) -> None:
        """A few kernels and an output that stays."""
        self._graphs.append(step.capture(size, lambda: self._decode(size)))

    def _decode(self, size: int) -> Any:
        scratch = self.device.buffers(1, size * self.row)
        self.device.launch(8, gemm=True)
        output = self.device.buffers(1, size * self.row)
        del scratch
        return output

    def release_graphs(self) -> None:
        """Every graph with its output."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()

    def release_kv(self) -> None:
        """All buffers."""
        self._kv = []

    def verify(self, step: Step) -> None:
        """The largest step again, and every graph once."""
        self._work(self.activations)
        with step.part("sampler_warmup"):
            self._work(self.sampler)
        for graph in self._graphs:
            graph.replay()
        step.skip("replay", "nothing is computed, so nothing can be compared")
