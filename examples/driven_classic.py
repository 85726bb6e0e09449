"""The classic engine behind the methods of an `Engine`, as docs/guide/ten-minutes.md has it."""

from collections.abc import Sequence
from typing import Any

import torch
from classic_engine.engine import ClassicEngine
from classic_engine.model import Config

from startup_fsm import Knobs, LongestRequest, Step


class Driven:
    """What `boot.run` asks of an engine, told to one that never heard of it."""

    name = "classic"

    def __init__(self, engine: ClassicEngine) -> None:
        self.engine = engine

    def load_weights(self, step: Step) -> None:
        step.note(checkpoint_bytes=self.engine.weight_bytes)
        self.engine.load_weights()

    def profile_activations(self, step: Step) -> None:
        self.engine.profile()

    def kv_block_bytes(self) -> int:
        return self.engine.block_bytes

    def longest_request(self) -> LongestRequest:
        return LongestRequest(self.engine.config.max_length, self.engine.config.block_tokens)

    def allocate_kv(self, step: Step, blocks: int) -> None:
        with step.pool():
            self.engine.allocate_kv(blocks)

    def capture_sizes(self) -> Sequence[int]:
        return self.engine.config.capture_sizes

    def capture(self, step: Step, size: int) -> None:
        graph = step.capture(size, lambda: self.engine.decode(size))
        self.engine.graphs[size] = graph, graph.output

    def release_graphs(self) -> None:
        self.engine.graphs.clear()

    def release_kv(self) -> None:
        self.engine.kv = None
        for layer in self.engine.model.layers:
            layer.attention.keys = layer.attention.values = None

    def verify(self, step: Step) -> None:
        prompts = [[1, 2, 3], [5, 8]]
        self.engine.profile()
        stepwise = self.engine.generate(prompts, graphs=False)
        step.probe("replay", {"equal": self.engine.generate(prompts) == stepwise})


def make() -> tuple[Driven, dict[str, Any]]:
    if torch.cuda.is_available():
        return Driven(ClassicEngine(Config.large())), {"knobs": Knobs(utilization=0.9)}
    return Driven(ClassicEngine(Config())), {"knobs": Knobs(requested_bytes=1 << 30)}
