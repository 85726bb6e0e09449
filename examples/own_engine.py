"""
An engine of your own, driven by ``boot.run``: you say how, the plan says when.

    python examples/own_engine.py
    cd examples && startup-fsm run own_engine:make

The second line leaves the ``Bootstrap`` to the command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from startup_fsm import Bootstrap, Graph, Knobs, LongestRequest, Step, format_bytes, throwaway

LAYERS, WIDTH, BLOCK_TOKENS = 2, 128, 16


class TinyEngine:
    """A few layers that look into a KV cache made of blocks. It never heard of memory budgets."""

    name = "tiny"
    version = "1.0"

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.kv: list[torch.Tensor] = []
        self.graphs: list[Graph] = []

    def load_weights(self, step: Step) -> None:
        step.note(checkpoint_bytes=LAYERS * WIDTH * WIDTH * 4)
        for layer in range(1, LAYERS + 1):
            self.weights.append(torch.randn(WIDTH, WIDTH))
            step.progress(layer, LAYERS, "layers")

    def profile_activations(self, step: Step) -> None:
        self._model(torch.ones(256, WIDTH))
        with step.part("sampler"):
            torch.multinomial(torch.ones(8, 1_000), 1)

    def kv_block_bytes(self) -> int:
        return LAYERS * self._layer_block_bytes()

    def _layer_block_bytes(self) -> int:
        return 2 * BLOCK_TOKENS * WIDTH * 4

    def longest_request(self) -> LongestRequest:
        return LongestRequest(tokens=512, block_tokens=BLOCK_TOKENS)

    def allocate_kv(self, step: Step, blocks: int) -> None:
        # Called twice: small for the throwaway graphs, then with what the budget gives.
        buffers = step.kv_buffers(LAYERS, self._layer_block_bytes(), blocks)
        self.kv = [each.view(torch.float32).view(blocks, 2, BLOCK_TOKENS, WIDTH) for each in buffers]

    def capture_sizes(self) -> Sequence[int]:
        return [1, 2, 4, 8]

    def capture(self, step: Step, size: int) -> None:
        self.graphs.append(step.capture(size, lambda: self._decode(size)))

    def release_graphs(self) -> None:
        self.graphs = []

    def release_kv(self) -> None:
        self.kv = []

    def verify(self, step: Step) -> None:
        self.profile_activations(step)
        for graph in self.graphs:
            graph.replay()
            equal = torch.equal(graph.output, self._decode(graph.size))
            step.probe("replay", {"equal": equal}, size=graph.size)

    def _model(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            hidden = functional.silu(hidden @ weight) / WIDTH
        return hidden

    def _decode(self, rows: int) -> torch.Tensor:
        hidden = torch.ones(rows, WIDTH)
        for cache in self.kv:
            keys, values = cache[:rows].unbind(1)
            scores = torch.softmax(torch.einsum("rw,rtw->rt", hidden, keys), -1)
            hidden = hidden + torch.einsum("rt,rtw->rw", scores, values)
        return self._model(hidden)


def make() -> tuple[TinyEngine, dict[str, Any]]:
    """What ``startup-fsm run own_engine:make`` starts: an engine, and options for ``Bootstrap``."""
    return TinyEngine(), {"device": "sim", "knobs": Knobs(requested_bytes=1 << 30, retries=1)}


def main(runs: str = "runs") -> None:
    engine, options = make()
    boot = Bootstrap(plan=throwaway(retries=1), journal=runs, **options)
    budget = boot.run(engine)
    print(f"ready with {budget.blocks} KV blocks, {format_bytes(budget.kv_bytes)}:")
    for term in budget.terms:
        print(f"  {term.term:<14} {format_bytes(term.bytes):>12}")
    print(f"startup-fsm doctor {boot.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
