"""
The course of one start: states are entered, judged and left here, and failures recorded. Not part of the surface.

Refused is refused before anything is written; what is written is folded at once, and the fold is what the next
decision stands on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from startup_fsm import checks
from startup_fsm.checks import held
from startup_fsm.devices.base import Device
from startup_fsm.errors import (
    BudgetError,
    CheckFailed,
    EdgeRefused,
    HookFailed,
    PeerFailed,
    RestartRequired,
    text_of,
)
from startup_fsm.events import (
    CheckJudged,
    OomObserved,
    SignalReceived,
    StateEntered,
    StateFailed,
    StateLeft,
    StateStalled,
)
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState
from startup_fsm.hooks import Hooks
from startup_fsm.machine import GuardTable, refused
from startup_fsm.measurement import Measurement
from startup_fsm.meetings import Meetings
from startup_fsm.plan import Edge, Plan
from startup_fsm.recorder import Recorder
from startup_fsm.step import LiveStep
from startup_fsm.watchdog import Watchdog

#: ``default`` fails on checks that would give wrong results, ``observe`` never, ``strict`` on warnings too.
Mode = Literal["default", "observe", "strict"]

_FRAMES: Final = 8
#: Where a simulated device follows allocations.
_FOLLOWING: Final = f"{Path(__file__).parent / 'devices'}{os.sep}"
_OURS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (CheckFailed, "check"),
    (BudgetError, "budget"),
    (HookFailed, "hook"),
    (PeerFailed, "peer"),
    (RestartRequired, "restart"),
    (KeyboardInterrupt, "signal"),
    (SystemExit, "signal"),
)


class Course:
    """
    What an open state stands on.

    Args:
        plan, mode, device, recorder, hooks: Of the start.
        meetings: With the other ranks.
        begin: Records the first event, when nothing was recorded yet.
        watch: Makes the watchdog, given what it reports to.
        show: Shows progress, or None.
    """

    def __init__(
        self,
        plan: Plan,
        mode: Mode,
        device: Device,
        recorder: Recorder,
        hooks: Hooks,
        *,
        meetings: Meetings,
        begin: Callable[[], None],
        watch: Callable[[Callable[[StateStalled], None]], Watchdog],
        show: Callable[[str, int, int, str], None] | None,
    ) -> None:
        self.plan = plan
        self.mode = mode
        self.device = device
        self.recorder = recorder
        self.hooks = hooks
        self.meetings = meetings
        self.measurement = Measurement(device, recorder)
        self.open: OpenState | None = None
        self.watchdog = watch(self._stalled)
        self._table = None if plan.is_free else GuardTable(plan)
        self._begin = begin
        self._show = show

    @property
    def history(self) -> RunState:
        """The fold of everything that was recorded so far."""
        return self.recorder.state

    def _stalled(self, event: StateStalled) -> None:
        self.recorder.record(event)
        self.recorder.sync()

    def admit(self, name: str, by: str | None) -> tuple[LiveStep, StateEntered]:
        """Refuse the entry of a state, by the edge ``by`` where it is named, or say what is to be recorded."""
        history = self.history
        if self.open is not None or history.position == "ended":
            raise refused(history, name, "a state is open" if self.open is not None else "the start is over")
        edge = self._edge_to(name, by)
        source = history.state
        visit = len(history.visits_of(name)) + 1
        entered = StateEntered(
            state=name,
            visit=visit,
            edge=None if edge is None else edge.name,
            source=None if edge is None else source,
        )
        return LiveStep(name, visit, self.measurement, show=self._show, boundary=self.meetings.check), entered

    def _edge_to(self, name: str, by: str | None) -> Edge | None:
        history, plan = self.history, self.plan
        if plan.state(name) is None:
            raise refused(history, name, "the plan has no such state")
        if plan.is_free or self._table is None:
            return None
        here = history.state
        if here is None:
            if name != plan.start and self.mode != "observe":
                raise refused(history, name, f"a start begins with {plan.start}")
            return None
        failed, taken = history.position == "failed", history.edges_taken
        edge = plan.edge(here, by) if by else plan.between(here, name, failed=failed, taken=taken)
        try:
            if edge is None:
                raise refused(history, name, "the plan has no such edge")
            self._table.move(history, edge)
        except EdgeRefused:
            if self.mode != "observe":
                raise
        return edge

    def begin(self) -> HookFailed | None:
        """Record the first event, where there is none; a hook that refuses it has refused the state that follows."""
        try:
            self._begin()
        except HookFailed as refusal:
            return refusal
        return None

    def opened(self, state: OpenState, entered: StateEntered, refusal: HookFailed | None) -> None:
        """Record the entry, then watch, measure, run hooks."""
        step = state.step
        self.open = state
        self.recorder.record(entered)
        if refusal is not None:
            raise refusal
        declared = self.plan.state(step.state)
        self.watchdog.watch(step.state, step.visit, None if declared is None else declared.deadline_s)
        self.device.label(f"state={step.state} visit={step.visit}")
        self.meetings.entered(step.state)
        self.measurement.entering(step.state, step.visit)
        if not self.meetings.is_alone and len(self.history.visits) == 1:
            self._compare(step)
        self.hooks.before_state(step.state, visit=step.visit)

    def _compare(self, step: LiveStep) -> None:
        """Before anything is done that needs the other ranks: that they start the same thing."""
        if self.history.started is not None:
            self.meetings.compare(self.history.started)
            try:
                self._judge(step, checks.ALIKE)
            except CheckFailed:
                self.meetings.refused()
                raise

    def succeeded(self, state: OpenState) -> None:
        """A body returned: measure, judge, run hooks, record the end."""
        if self.open is not state:
            # The body declared the whole start failed.
            return
        step = state.step
        self.measurement.leaving(step.state, step.visit)
        self.measurement.snapshot(step.state, step.visit, "leave")
        self._judge(step)
        self.hooks.after_state(step.state, visit=step.visit, snapshot=self._visit_snapshot())
        self.meetings.left(step.state, self.plan)
        self.watchdog.rest()
        self.open = None
        self.recorder.record(StateLeft(state=step.state, visit=step.visit, **state.costs()))
        self.recorder.sync(edge=True)

    def _visit_snapshot(self) -> Any:
        current = self.history.current
        return None if current is None else current.after

    def _judge(self, step: LiveStep, only: checks.Check | None = None) -> None:
        current = self.history.current
        if current is None or not self.recorder.is_ours:
            return
        broken: list[Finding] = []
        for judged in checks.judge(current, self.history):
            if only is not None and judged.check is not only:
                continue
            failing = [finding for finding in judged.findings if self._fails(judged.check, finding)]
            broken += failing
            self.recorder.record(
                CheckJudged(
                    check=judged.check.name,
                    state=step.state,
                    visit=step.visit,
                    findings=judged.findings,
                    failed=bool(failing),
                )
            )
        if broken:
            first = broken[0]
            raise CheckFailed(f"{first.code} in {step.state}: {first.message}", findings=broken)

    def _fails(self, check: checks.Check, finding: Finding) -> bool:
        if self.mode == "observe" or finding.severity == "note":
            return False
        return self.mode == "strict" or (check.on_broken == "fail" and finding.severity == "error")

    def failed(self, state: OpenState, error: BaseException) -> None:
        """A body raised, or what follows it: record what can be known, leave the exception as it is."""
        step, visit = state.step, self.history.current
        self.open = None
        if not self.recorder.is_ours or visit is None:
            return
        if not visit.is_open:
            # The state was left already: nothing of it failed, and only an interrupt comes so late.
            if isinstance(error, KeyboardInterrupt):
                self.recorder.record(SignalReceived(signal="SIGINT", state=step.state))
            return
        self.hooks.telling = True
        try:
            self._record_failure(state, error, self.category(error), visit.part)
        finally:
            self.hooks.telling = False
        is_answerable = self.plan.is_free or self.mode == "observe" or self.meetings.may_recover(step.state, self.plan)
        self.meetings.failed(step.state, error, is_final=not is_answerable)
        self.hooks.on_failure(step.state, error, visit=step.visit)

    def _record_failure(self, state: OpenState, error: BaseException, category: str, part: str | None) -> None:
        step = state.step
        try:
            if category == "oom":
                self._observe_oom(error, step, part)
            self.measurement.snapshot(step.state, step.visit, "fail")
            self._judge_neighbours(step)
        except Exception as unread:  # noqa: BLE001 - a device that can no longer be read must not hide why
            step.skip("snapshot", f"the device could not be read after the failure: {type(unread).__name__}: {unread}")
        self.watchdog.rest()
        self.recorder.record(
            StateFailed(
                state=step.state,
                visit=step.visit,
                part=part,
                error_type=f"{type(error).__module__}.{type(error).__qualname__}",
                category=category,
                reason="",
                message=text_of(error),
                where=_frames(error),
                **state.costs(),
            )
        )
        self.recorder.sync()
        where = f" in part {part}" if part else ""
        path = self.recorder.path or "none"
        error.add_note(f"startup-fsm: failed in state {step.state}{where} ({category}); journal: {path}")

    def _judge_neighbours(self, step: LiveStep) -> None:
        # Only what tells whose fault it was; the contracts of a state that ended well do not hold here.
        current = self.history.current
        if current is not None:
            found = held.neighbours_still(current, current.before, current.after, self.history)
            if found:
                self.recorder.record(
                    CheckJudged(check="neighbours_still", state=step.state, visit=step.visit, findings=tuple(found))
                )

    def _observe_oom(self, error: BaseException, step: LiveStep, part: str | None) -> None:
        facts = self.device.out_of_memory(error)
        self.recorder.record(
            OomObserved(
                state=step.state,
                visit=step.visit,
                part=part,
                tried_bytes=None if facts is None else facts.tried_bytes,
                free_bytes=None if facts is None else facts.free_bytes,
                allocated_bytes=None if facts is None else facts.allocated_bytes,
                reserved_unallocated_bytes=None if facts is None else facts.reserved_unallocated_bytes,
                private_pool_bytes=None if facts is None else facts.private_pool_bytes,
                message=text_of(error),
                blocks=() if facts is None else facts.blocks,
            )
        )
        tried, free = (0, 0) if facts is None else (facts.tried_bytes or 0, facts.free_bytes or 0)
        self.measurement.learn(step.state, tried, free)

    def category(self, error: BaseException) -> str:
        """How an exception counts: see ``state_failed``."""
        for kind, name in _OURS:
            if isinstance(error, kind):
                return name
        if isinstance(error, NotImplementedError) and self.history.state == "reserve_kv":
            return "unsupported"
        named = self.device.category(error) or ("host_oom" if _host_ran_out(error) else None)
        # A collective whose other side is gone raises too: that is not this rank's failure.
        return named or ("peer" if self.meetings.explain(error) else "raised")


class OpenState:
    """A state while it is open; made by ``Bootstrap.state``. As a context manager it yields the step."""

    def __init__(self, course: Course, name: str, *, by: str | None = None) -> None:
        self._course = course
        self._name = name
        self._by = by
        self.step: LiveStep

    def __enter__(self) -> LiveStep:
        course = self._course
        recorder = course.recorder
        self._costs = (recorder.bookkeeping_ns, recorder.syncing_ns, recorder.measuring_ns)
        self._began, self._cpu = time.monotonic_ns(), time.process_time_ns()
        refusal = course.begin()
        self.step, entered = course.admit(self._name, self._by)
        try:
            course.opened(self, entered, refusal)
            self._scope = course.device.scope()
            self._scope.__enter__()
        except BaseException as error:
            course.failed(self, error)
            raise
        return self.step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(Exception):
                self._scope.__exit__(kind, error, trace)
            self._course.failed(self, error)
            return
        try:
            self._scope.__exit__(None, None, None)
            self._course.succeeded(self)
        except BaseException as broken:
            self._course.failed(self, broken)
            raise

    async def __aenter__(self) -> LiveStep:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def costs(self) -> dict[str, int]:
        """What the state took so far, and our own part of it, in ns."""
        recorder = self._course.recorder
        bookkeeping, syncing, measuring = self._costs
        return {
            "duration_ns": time.monotonic_ns() - self._began,
            "cpu_ns": time.process_time_ns() - self._cpu,
            "bookkeeping_ns": recorder.bookkeeping_ns - bookkeeping,
            "syncing_ns": recorder.syncing_ns - syncing,
            "measuring_ns": recorder.measuring_ns - measuring,
        }


def _host_ran_out(error: BaseException) -> bool:
    # Tensors of a simulated device are memory of the host, whose allocator says so in its own words.
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text_of(error)


def _frames(error: BaseException) -> tuple[str, ...]:
    """The innermost lines; where an allocation failed, the engine's own and not those that it passed through."""
    frames = list(traceback.extract_tb(error.__traceback__))
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    passed = (_FOLLOWING,) if torch is None else (_FOLLOWING, f"{Path(torch).parent}{os.sep}")
    while len(frames) > 1 and frames[-1].filename.startswith(passed):
        frames.pop()
    frames = frames[-_FRAMES:]
    return tuple(f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line or ''}".rstrip(": ") for frame in frames)
