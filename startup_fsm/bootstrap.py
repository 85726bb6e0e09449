"""
The start of an engine as an open book: what a program embeds.

You keep control: ``with boot.state("load_weights") as step: ...``. Or we drive: ``boot.run(engine)``. Either way the
engine's own exceptions stay what they are; they only carry a note.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from startup_fsm import budget, drive, identity, ladder, meetings
from startup_fsm.agreement import Agreement
from startup_fsm.course import Course, Mode, OpenState
from startup_fsm.devices.base import Device
from startup_fsm.devices.choice import choose
from startup_fsm.engine import Engine, LongestRequest
from startup_fsm.errors import (
    EdgeRefused,
    PeerFailed,
    StartupError,
    text_of,
)
from startup_fsm.events import (
    AttemptStarted,
    BudgetComputed,
    DecisionMade,
    Event,
    NoteAdded,
    RecoveryChosen,
    RunFinished,
    RunStarted,
)
from startup_fsm.fold import RunState, allowed_targets
from startup_fsm.hooks import Hooks, discovered
from startup_fsm.journal import Durability, JournalWriter
from startup_fsm.ladder import Lessons
from startup_fsm.machine import refused
from startup_fsm.meetings import Meetings
from startup_fsm.plan import Edge, Plan, throwaway
from startup_fsm.recorder import Recorder
from startup_fsm.sizing import Wanted, size_kv
from startup_fsm.states import FAILED, READY
from startup_fsm.step import terminal_progress
from startup_fsm.structured_log import Mirror
from startup_fsm.watchdog import Watchdog


class Bootstrap:
    """
    One start of one process.

    Args:
        plan: Which states there are; the default plan captures throwaway graphs and follows ``knobs``.
        journal: Directory of runs; None keeps the start in memory.
        device: ``auto``, ``sim``, ``cuda``, or a device.
        knobs: What a user may set about memory.
        hooks: Objects with some of the four hook methods.
        mode: What a broken contract does.
        mirror: Also write events as log lines: to stderr (True) or to a stream.
        durability: When the disk is asked to keep the journal.
        engine, engine_version: What is being started, for the journal.
        settings: Further settings of the engine by our names; secrets are withheld.
        rank: Of this process; None takes the launcher's.
        agreement: With the other ranks; None finds them by what the launcher says, and waits for them.
        discover: Whether hooks of installed packages are loaded (entry points ``startup_fsm.hooks``).
        progress: Whether progress is shown where stderr is a terminal.

    Raises:
        ValueError: A mode, a device or a hook that does not exist.
    """

    def __init__(  # noqa: PLR0913 - every one has a default, and all are by name
        self,
        *,
        plan: Plan | None = None,
        journal: str | Path | None = "runs",
        device: Device | str = "auto",
        knobs: budget.Knobs | None = None,
        hooks: Iterable[object] = (),
        mode: Mode = "default",
        mirror: bool | IO[str] | IO[bytes] = False,
        durability: Durability = "process",
        engine: str | None = None,
        engine_version: str | None = None,
        settings: Mapping[str, Any] | None = None,
        rank: int | None = None,
        agreement: Agreement | None = None,
        discover: bool = True,
        progress: bool = True,
    ) -> None:
        if mode not in ("default", "observe", "strict"):
            msg = f"mode: {mode!r} is none of default, observe, strict"
            raise ValueError(msg)
        self.knobs = knobs or budget.Knobs()
        self.plan = plan or throwaway(
            retries=self.knobs.retries, allow_eager=self.knobs.allow_eager, fewer_sizes=self.knobs.fewer_sizes
        )
        self.mode = mode
        self.engine = engine
        self.engine_version = engine_version
        self.settings = dict(settings or {})
        self.device = choose(device)
        # Before the journal, so that a hook that is none leaves no empty file.
        self.hooks = Hooks([*hooks, *(discovered() if discover else ())], self._record)
        self.continued = identity.continued()
        self.recorder, self.meetings = self._joined(journal, durability, rank, agreement)
        self.lessons = self._lessons()
        self.recorder.listeners.append(lambda record: self.hooks.on_event(record.event, record=record))
        if mirror is not False:
            self.recorder.mirrors.append(Mirror(None if mirror is True else mirror).write)
        self.course = Course(
            self.plan,
            mode,
            self.device,
            self.recorder,
            self.hooks,
            meetings=self.meetings,
            begin=self._begin,
            watch=lambda report: Watchdog(report, self._stacks_path()),
            show=terminal_progress() if progress else None,
        )
        self.measurement = self.course.measurement

    def _joined(
        self, journal: str | Path | None, durability: Durability, rank: int | None, given: Agreement | None
    ) -> tuple[Recorder, Meetings]:
        """Join the other ranks, if there are any: they decide which run this is, and which attempt."""
        before = self.continued
        least = 1 if before is None else before.attempt
        agreement, self._alone = (given, None) if given is not None else meetings.join(rank, least)
        run, joined = identity.run_id() if before is None else (before.run, True)
        chosen = rank if rank is not None else agreement.rank
        if chosen is None:
            chosen = before.rank if before is not None else None if joined else 0
        process = identity.process_name(chosen)
        directory = None if journal is None else Path(journal)

        def first_free(run: str) -> int:
            return least if directory is None else meetings.first_free(directory / run, process, least)

        run, attempt = meetings.run_and_attempt(agreement, run, first_free)
        if attempt is None and before is not None:
            attempt = first_free(run)
        writer = None
        if directory is not None:
            writer = JournalWriter(directory / run, process, attempt=attempt, durability=durability)
        identity.export_run(run)
        recorder = Recorder(run, process, chosen, writer)
        recorder.attempt = attempt or recorder.attempt
        return recorder, Meetings(agreement, recorder, getattr(self.device, "identity", None))

    def _stacks_path(self) -> Path | None:
        writer = self.recorder.writer
        return None if writer is None or writer.trouble else writer.path.with_suffix(".stacks")

    def _record(self, event: Event) -> None:
        self.recorder.record(event)

    @property
    def path(self) -> Path | None:
        """Where the journal is; None for a start in memory."""
        return self.recorder.path

    @property
    def history(self) -> RunState:
        """The fold of everything that was recorded so far."""
        return self.recorder.state

    def _begin(self) -> None:
        if self.history.started is not None:
            return
        knobs = identity.without_secrets(self.knobs.as_settings() | self.settings)
        plan = self.plan.as_data()
        # What was learned and has to be the same on all ranks is part of what they start.
        learned = () if self.continued is None else (self.lessons.sizes, self.lessons.without_graphs)
        self.recorder.record(
            RunStarted(
                wall_ns=time.time_ns() - self.recorder.now_ns,
                host=identity.host_name(),
                pid=os.getpid(),
                boot_id=identity.boot_id(),
                engine=self.engine,
                engine_version=self.engine_version,
                device=self.device.name,
                plan=plan,
                knobs=knobs,
                versions=identity.versions(),
                environment=identity.environment(),
                fingerprint=identity.fingerprint(plan, knobs, self.engine, self.engine_version, *learned),
                mode=self.mode,
            )
        )
        if self.recorder.attempt > 1:
            reason = "the run has an earlier attempt" if self.continued is None else self.continued.reason
            self.recorder.record(AttemptStarted(attempt=self.recorder.attempt, reason=reason))
        if self._alone is not None:
            self.recorder.record(DecisionMade(decision="ranks_alone", reason=self._alone))
        self.meetings.began()

    def _lessons(self) -> Lessons:
        """What the attempt before this one taught, where this process goes on with it."""
        if self.continued is None or self.recorder.writer is None:
            return Lessons()
        directory, process = self.recorder.writer.directory, self.recorder.process
        return ladder.lessons_before(directory, process, self.recorder.attempt)

    def state(self, name: str) -> OpenState:
        """
        A state to be entered with ``with`` or ``async with``; inside it is the step.

        Raises:
            EdgeRefused: On entering, when the plan does not allow it.
        """
        return OpenState(self.course, name)

    def kv_budget(
        self,
        block_bytes: int,
        *,
        longest: LongestRequest | None = None,
        graphs: bool = True,
        reserve: Mapping[str, int] | None = None,
    ) -> BudgetComputed:
        """
        Size the KV cache; enters ``size_kv`` by itself where it is not open.

        Args:
            block_bytes: Bytes of one KV block over all layers, with whatever grows with each block.
            longest: The longest request that must fit; None to ask for one block.
            graphs: Whether graphs are to be charged: those that are still to be captured. False where none will be, or
                where ``block_bytes`` or ``reserve`` have room for them.
            reserve: Bytes that the engine will take after this beside graphs and its largest step, by names of its
                own, such as buffers that it makes with the cache; each is a term of the budget.

        Raises:
            BudgetError: Nothing fits; it says how many bytes are missing.
            ValueError: A block of no bytes, or a reserve that cannot be.
        """
        wanted = Wanted(
            block_bytes=block_bytes,
            needed_blocks=longest.blocks if longest else None,
            graphs=graphs,
            reserve=reserve or {},
        )
        if self.course.open is not None and self.course.open.step.state == "size_kv":
            return self._sized(wanted, longest)
        with self.state("size_kv"):
            return self._sized(wanted, longest)

    def _sized(self, wanted: Wanted, longest: LongestRequest | None) -> BudgetComputed:
        state, visit = self._where()
        if longest is not None:
            note = {"longest_tokens": longest.tokens, "block_tokens": longest.block_tokens}
            self.recorder.record(NoteAdded(state=state, visit=visit, note=note))
        computed = size_kv(self.measurement, self.knobs, wanted, state, visit)
        try:
            # The smallest rank decides; what this one could have had is among the offers.
            computed = self.meetings.sized(computed)
        finally:
            self.recorder.record(computed)
        if computed.missing_bytes:
            raise budget.nothing_fits(computed, longest)
        return computed

    def _where(self) -> tuple[str, int]:
        if self.course.open is None:
            msg = "no state is open"
            raise EdgeRefused(msg, source=self.history.state, target=None, allowed=allowed_targets(self.history))
        return self.course.open.step.state, self.course.open.step.visit

    def run(self, engine: Engine) -> BudgetComputed:
        """
        Drive an engine through the plan: order the sizes, own the pools, compute the budget, tear down, retry.

        Raises:
            PlanError: The plan has a state that neither we nor the engine know.
            Exception: The engine's own, with the diagnosis as a note; ours where a contract is broken.
        """
        self.engine = self.engine or str(getattr(engine, "name", type(engine).__name__))
        self.engine_version = self.engine_version or getattr(engine, "version", None)
        describe = getattr(engine, "knobs", None)
        self.settings = {**(describe() if callable(describe) else {}), **self.settings}
        return drive.run(self, engine)

    def finish(self) -> None:
        """
        Declare the start ready, once all ranks are.

        Raises:
            EdgeRefused: The plan does not lead to ``ready`` from here.
            PeerFailed: Another rank failed.
        """
        self._begin()
        early = not self.plan.is_free and READY not in allowed_targets(self.history)
        if self.history.position == "ended":
            raise refused(self.history, READY, "the start is over")
        if (early or self.course.open is not None) and self.mode != "observe":
            raise refused(self.history, READY, "not from here")
        try:
            self.meetings.ready()
        except PeerFailed as error:
            self._finished(FAILED, error.message)
            raise
        self._finished(READY, "")

    def fail(self, reason: str) -> None:
        """Declare the start failed; a state that is open failed with it, and nothing follows."""
        self._begin()
        if self.course.open is not None:
            self.course.failed(self.course.open, StartupError(reason))
        if self.history.position != "ended":
            self.meetings.failed(self.history.state, reason, is_final=True)
            self._finished(FAILED, reason)

    def _finished(self, end: str, reason: str) -> None:
        recorder = self.recorder
        recorder.record(
            RunFinished(
                end=end,
                state=self.history.state,
                reason=reason,
                duration_ns=recorder.now_ns,
                bookkeeping_ns=recorder.bookkeeping_ns,
                syncing_ns=recorder.syncing_ns,
                measuring_ns=recorder.measuring_ns,
            )
        )
        self.close()

    def close(self) -> None:
        """Let go of the journal, the other ranks, the watchdog and the hooks; harmless when repeated."""
        finished = self.history.finished
        if finished is None:
            self.meetings.failed(self.history.state, "its start was given up", is_final=True)
        self.meetings.close(well=finished is not None and finished[1].end == READY)
        self.course.watchdog.close()
        self.hooks.close()
        self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {text_of(error)}")
        self.close()

    def recovery(self, error: BaseException) -> Edge | None:
        """
        The edge that answers the failure of the last state, recorded; None where there is none, or none is left.

        With several ranks all of them take it, or none does.
        """
        failed = self.history.current
        if failed is None or failed.failed is None:
            return None
        reason = f"{failed.failed.category}: {(text_of(error) or type(error).__name__).splitlines()[0]}"
        if isinstance(error, PeerFailed):
            edge = None if error.edge is None else self.plan.edge(failed.state, error.edge)
        else:
            edge = ladder.rung(failed, self.history, self.plan, self.measurement, self.recorder.record)
            edge = self.meetings.recovered(edge, failed.state, self.plan, reason)
        if edge is None:
            return None
        self.recorder.record(
            RecoveryChosen(
                state=edge.source,
                edge=edge.name,
                target=edge.target,
                reason=reason,
                taken=self.history.edges_taken[edge.source, edge.name] + 1,
                bound=edge.bound,
                inputs=ladder.climb(edge, self.plan, self.measurement),
            )
        )
        return edge
