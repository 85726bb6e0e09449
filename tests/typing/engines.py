"""What users write, as a type checker sees it. Only checked by mypy, never run."""

from __future__ import annotations

from collections.abc import Sequence

from startup_fsm.engine import Engine, Graph, LongestRequest, Step
from startup_fsm.plan import Plan, throwaway
from startup_fsm.states import State


class Typed:
    """An engine that inherits from nothing of ours."""

    def __init__(self) -> None:
        self.graphs: dict[int, Graph] = {}

    def load_weights(self, step: Step) -> None:
        step.note(checkpoint_bytes=1)

    def profile_activations(self, step: Step) -> None:
        with step.part("sampler"):
            step.workspace("attention", 1 << 20)

    def kv_block_bytes(self) -> int:
        return 1

    def allocate_kv(self, step: Step, blocks: int) -> None:
        step.kv_buffers(1, 1, blocks)

    def capture_sizes(self) -> Sequence[int]:
        return [1, 2]

    def capture(self, step: Step, size: int) -> None:
        self.graphs[size] = step.capture(size, lambda: None)

    def release_graphs(self) -> None:
        self.graphs.clear()

    def release_kv(self) -> None:
        return

    def verify(self, step: Step) -> None:
        step.skip("replay", "nothing to compare")

    def longest_request(self) -> LongestRequest:
        return LongestRequest(tokens=8, block_tokens=16)


engine: Engine = Typed()
plan: Plan = throwaway(retries=1).insert(State("autotune"), after="load_weights")
is_allowed: bool = plan.allows("load_weights", "advance")
