"""
We drive: an engine is taken through the plan, state by state, retries and degradation included.

Nothing is decided here that the plan does not declare; every choice between edges is an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from startup_fsm.budget import Knobs
from startup_fsm.checks.readings import GRAPH_POOLS
from startup_fsm.course import Course, OpenState
from startup_fsm.devices.base import Device
from startup_fsm.engine import Engine, LongestRequest
from startup_fsm.errors import PlanError, RestartRequired
from startup_fsm.events import BudgetComputed
from startup_fsm.ladder import Lessons, gives_up_graphs
from startup_fsm.measurement import Measurement
from startup_fsm.plan import CAPTURE_AGAIN, FEWER_SIZES, MEASURE_AGAIN, WITHOUT_ARENA, WITHOUT_GRAPHS, Edge, Plan
from startup_fsm.states import FAILED, READY
from startup_fsm.step import LiveStep

#: Rows of the largest size need one block for the prompt and one to decode into.
_BLOCKS_A_ROW: Final = 2


class Start(Protocol):
    """What is driven: a ``Bootstrap``, seen from here."""

    @property
    def plan(self) -> Plan: ...

    @property
    def knobs(self) -> Knobs: ...

    @property
    def device(self) -> Device: ...

    @property
    def measurement(self) -> Measurement: ...

    @property
    def course(self) -> Course: ...

    @property
    def lessons(self) -> Lessons: ...

    def kv_budget(
        self,
        block_bytes: int,
        *,
        longest: LongestRequest | None = None,
        graphs: bool = True,
        reserve: Mapping[str, int] | None = None,
    ) -> BudgetComputed: ...

    def recovery(self, error: BaseException) -> Edge | None: ...

    def fail(self, reason: str) -> None: ...

    def finish(self) -> None: ...


def run(boot: Start, engine: Engine) -> BudgetComputed:
    """See ``Bootstrap.run``."""
    return _Drive(boot, engine).run()


class _Drive:
    """One engine on its way through one plan."""

    def __init__(self, boot: Start, engine: Engine) -> None:
        self._boot = boot
        self._engine = engine
        self._measurement = boot.measurement
        self._without_graphs = False
        self._without_arena = False
        self._captures_again = False
        self._budget: BudgetComputed | None = None
        self._measurement.sizes = tuple(sorted({int(size) for size in engine.capture_sizes()}, reverse=True))
        self._measurement.method = boot.knobs.graph_method
        self._measurement.sample = boot.knobs.sample
        self._bodies: dict[str, Callable[[LiveStep], None]] = {
            "init_device": self._init_device,
            "load_weights": self._load_weights,
            "profile_activations": engine.profile_activations,
            "bootstrap_kv": self._bootstrap_kv,
            "capture_throwaway": self._capture_some,
            "recover_allocator": self._recover,
            "teardown": self._tear_down,
            "reserve_kv": self._reserve_kv,
            "size_kv": self._size_kv,
            "allocate_kv": self._allocate_kv,
            "capture_graphs": self._capture,
            "commit_kv": self._commit_kv,
            "verify": self._verify,
        }
        self._check_plan()

    def _check_plan(self) -> None:
        plan = self._boot.plan
        if plan.is_free:
            text = f"plan {plan.name!r} has no order to drive an engine through"
            raise PlanError(text, hint="keep control with Bootstrap.state, or choose another plan")
        if plan.state("size_kv") is None:
            text = f"plan {plan.name!r} sizes no KV cache"
            raise PlanError(text, hint="let it pass through size_kv")
        for state in plan.states:
            if plan.onward(state.name) is None:
                text = f"plan {plan.name!r}: no advance edge leads on from {state.name!r}"
                raise PlanError(text, hint="add one, to the next state or to ready")
            if state.name not in self._bodies:
                self._bodies[state.name] = self._call(state.name)

    def _call(self, name: str) -> Callable[[LiveStep], None]:
        """A state of the user's own is a method of the engine that takes the step."""
        method: Callable[[LiveStep], Any] | None = getattr(self._engine, name, None)
        if method is None:
            text = f"plan {self._boot.plan.name!r} has the state {name!r}, and the engine has no method of that name"
            raise PlanError(text, hint=f"def {name}(self, step): ...")
        return method

    def run(self) -> BudgetComputed:
        """From the start to an end."""
        self._boot.lessons.apply(self._measurement)
        self._without_graphs = self._boot.lessons.without_graphs
        state: str = self._boot.plan.start
        edge: str | None = None
        while True:
            try:
                with OpenState(self._boot.course, state, by=edge) as step:
                    self._bodies[state](step)
            except BaseException as error:
                chosen = self._boot.recovery(error) if isinstance(error, Exception) else None
                if chosen is None or chosen.target == FAILED:
                    self._boot.fail(f"{type(error).__name__} in {state}")
                    raise
                self._without_arena |= chosen.name == WITHOUT_ARENA
                self._without_graphs |= gives_up_graphs(chosen, self._boot.plan)
                self._captures_again = chosen.name == FEWER_SIZES
                _forget_frames(error)
                state, edge = chosen.target, chosen.name
                continue
            following = self._following(state)
            if following is None:
                break
            state, edge = following
        self._boot.finish()
        if self._budget is None:
            text = f"plan {self._boot.plan.name!r} came to ready without sizing a KV cache"
            raise PlanError(text, hint="let it pass through size_kv")
        return self._budget

    @property
    def _sizes(self) -> tuple[int, ...]:
        """The capture sizes that are left, largest first."""
        return self._measurement.sizes

    def _following(self, state: str) -> tuple[str, str] | None:
        """The state after one that ended well, and the edge to it; None at ``ready``."""
        plan = self._boot.plan
        edge = plan.onward(state)
        if self._without_graphs and edge is not None and edge.target == "capture_graphs":
            edge = plan.edge(state, WITHOUT_GRAPHS) or edge
        if self._without_arena:
            edge = plan.edge(state, WITHOUT_ARENA) or edge
        if self._captures_again:
            edge = self._back_to_capture(state) or edge
        if edge is None:
            raise PlanError(f"plan {plan.name!r}: {state!r} ended well and has no edge to go on")
        return None if edge.target == READY else (edge.target, edge.name)

    def _back_to_capture(self, state: str) -> Edge | None:
        """With fewer sizes: the edge back to where graphs are captured, when the way of the plan leads past it."""
        plan = self._boot.plan
        on_arena = plan.state("reserve_kv") is not None and not self._without_arena
        edge = plan.edge(state, CAPTURE_AGAIN if on_arena else MEASURE_AGAIN)
        self._captures_again &= edge is None
        return edge

    def _init_device(self, step: LiveStep) -> None:
        snapshot = self._boot.device.snapshot()
        step.note(total_bytes=snapshot.total_bytes, requested_bytes=self._boot.knobs.requested(snapshot.total_bytes))
        self._boot.device.synchronize()

    def _load_weights(self, step: LiveStep) -> None:
        self._engine.load_weights(step)
        self._digest(step)

    def _digest(self, step: LiveStep) -> None:
        digest = getattr(self._engine, "weights_digest", None)
        if digest is None:
            return
        if not self._boot.device.has_values:
            step.skip("weights", "no values: tensors are fakes")
            return
        step.probe("weights", {"digest": digest()})

    def _addresses(self, step: LiveStep) -> None:
        addresses = getattr(self._engine, "kv_addresses", None)
        if addresses is not None:
            step.probe("kv_addresses", {"addresses": [int(address) for address in addresses()]})

    def _profiling_blocks(self) -> int:
        wanted = getattr(self._engine, "profiling_blocks", None)
        return int(wanted()) if wanted is not None else _BLOCKS_A_ROW * (self._sizes[0] if self._sizes else 1)

    def _bootstrap_kv(self, step: LiveStep) -> None:
        blocks = self._profiling_blocks()
        step.note(blocks=blocks, largest_size=self._sizes[0] if self._sizes else 0)
        self._engine.allocate_kv(step, blocks)

    def _capture_some(self, step: LiveStep) -> None:
        self._capture(step, self._boot.knobs.sample)

    def _capture(self, step: LiveStep, most: int | None = None) -> None:
        # Largest first: later graphs then fit into what the first one left free.
        sizes = self._sizes[:most]
        for done, size in enumerate(sizes, 1):
            self._engine.capture(step, size)
            step.progress(done, len(sizes), "graphs")

    def _recover(self, step: LiveStep) -> None:
        self._engine.release_graphs()
        pools = self._measurement.pools
        purpose = next((name for name in GRAPH_POOLS if name in pools), None)
        # An engine that captures by itself has the graphs in pools of its own: no less has to be proven then.
        repair = self._boot.device.repair(None if purpose is None else pools[purpose])
        if purpose is not None:
            self._measurement.gone(purpose, step.state, step.visit)
        step.probe("repair", {"proven": repair.proven, **repair.evidence}, pool=purpose)
        if not repair.proven:
            into = "a pool of the engine's own" if purpose is None else f"the pool {purpose}"
            text = f"the allocator could not be repaired after a failed capture into {into}"
            raise RestartRequired(text, hint="start a new process")

    def _tear_down(self, step: LiveStep) -> None:
        self._engine.release_graphs()
        self._engine.release_kv()
        self._digest(step)

    def _longest(self) -> LongestRequest | None:
        longest = getattr(self._engine, "longest_request", None)
        return None if longest is None else longest()

    def _size_kv(self, step: LiveStep) -> None:
        graphs = bool(self._sizes) and not self._without_graphs and self._boot.plan.state("capture_graphs") is not None
        if self._without_graphs:
            step.decide("without_graphs", "the graphs could not be captured and allow_eager is set")
        reserve = getattr(self._engine, "reserve_bytes", None)
        self._budget = self._boot.kv_budget(
            self._engine.kv_block_bytes(),
            longest=self._longest(),
            graphs=graphs,
            reserve=None if reserve is None else reserve(),
        )

    def _allocate_kv(self, step: LiveStep) -> None:
        self._engine.allocate_kv(step, self._sized().blocks)
        self._addresses(step)

    def _sized(self) -> BudgetComputed:
        if self._budget is None:
            raise PlanError(f"plan {self._boot.plan.name!r} allocates a KV cache before it is sized")
        return self._budget

    def _reserve_kv(self, step: LiveStep) -> None:
        total = self._boot.device.snapshot().total_bytes
        capacity = self._boot.knobs.arena_bytes or self._boot.knobs.requested(total)
        blocks = max(1, capacity // self._engine.kv_block_bytes())
        self._measurement.prefix_blocks = self._profiling_blocks()
        self._engine.allocate_kv(step, blocks)
        self._addresses(step)

    def _commit_kv(self, step: LiveStep) -> None:
        arena, blocks = self._measurement.arena, self._sized().blocks
        if arena is not None:
            arena.map_blocks(blocks)
            step.arena_mapped()
        committed = getattr(self._engine, "commit_kv", None)
        if committed is not None:
            committed(step, blocks)

    def _verify(self, step: LiveStep) -> None:
        self._addresses(step)
        self._engine.verify(step)


def _forget_frames(error: BaseException) -> None:
    """Tracebacks hold the frames of the failed body, and those hold its tensors; so do those of what came before."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        following.__traceback__ = None
        following = following.__cause__ or following.__context__
