"""
The journal of one process of a vLLM start: states, snapshots, figures, and how it ended.

It stands beside the engine: whatever goes wrong here is said once in the journal or the log, and never reaches vLLM.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from startup_fsm import identity
from startup_fsm.events import (
    DecisionMade,
    Event,
    FigureRead,
    OomObserved,
    PartEntered,
    RunFinished,
    RunStarted,
    SnapshotTaken,
    StateEntered,
    StateFailed,
    StateLeft,
)
from startup_fsm.importers.facts import Death, Figure, Frame, Raised
from startup_fsm.importers.torch_oom import parse_sentence
from startup_fsm.integrations.vllm import facts
from startup_fsm.integrations.vllm.readings import Readings
from startup_fsm.journal import JournalWriter
from startup_fsm.memory import Snapshot
from startup_fsm.plan import observed
from startup_fsm.recorder import Recorder

ENGINE: Final = "vllm"
_MESSAGE: Final = 2_000
_SENTENCE: Final = {
    "oom_tried_bytes": "tried_bytes",
    "oom_free_bytes": "free_bytes",
    "process_bytes": "process_bytes",
    "torch_allocated_bytes": "allocated_bytes",
    "torch_reserved_unallocated_bytes": "reserved_unallocated_bytes",
    "graph_private_pool_bytes": "private_pool_bytes",
}


class Start:
    """
    One process's part of a start.

    Args:
        runs: Directory of runs.
        config: vLLM's whole configuration.
        rank: Of a worker; None for a process that is no rank.
        mode: ``record`` or ``enforce``.

    Attributes:
        recorder: Where events go.
        fingerprint: Equal where two starts should take the same memory.
        readings: Once the process has a context on its device.
        is_over: Nothing is recorded any more.
    """

    def __init__(self, runs: str, config: Any, rank: int | None, mode: str) -> None:
        run, _ = identity.run_id()
        identity.export_run(run)
        process = identity.process_name(rank)
        self.runs = Path(runs)
        self.config = config
        self.recorder = Recorder(run, process, rank, JournalWriter(self.runs / run, process))
        self.readings: Readings | None = None
        self.is_over = False
        self._entered_ns = 0
        knobs = identity.without_secrets(facts.settings(config))
        plan = observed().as_data()
        self.fingerprint = identity.fingerprint(facts.everything(config), ENGINE, facts.version())
        self._record(
            RunStarted(
                wall_ns=time.time_ns() - self.recorder.now_ns,
                host=identity.host_name(),
                pid=os.getpid(),
                boot_id=identity.boot_id(),
                label=facts.label(config, rank),
                engine=ENGINE,
                engine_version=facts.version(),
                plan=plan,
                knobs=knobs,
                versions=identity.versions(),
                environment=identity.environment(),
                fingerprint=self.fingerprint,
                mode="observe",
            )
        )
        self.decide("vllm_plugin", mode)

    @property
    def state(self) -> str | None:
        """The state that is open; None between states."""
        visit = self.recorder.state.current
        return visit.state if visit is not None and visit.is_open else None

    def _record(self, event: Event) -> None:
        if not self.is_over:
            self.recorder.record(event)

    def look(self, index: int) -> None:
        """From now on memory can be read."""
        self.readings = Readings(index)

    def enter(self, state: str, part: str | None = None) -> None:
        """A state begins; the one before it is over."""
        before = self.recorder.state.state
        self.leave()
        visit = len(self.recorder.state.visits_of(state)) + 1
        self._record(StateEntered(state=state, visit=visit, source=before))
        self._entered_ns = self.recorder.now_ns
        if part is not None:
            self._record(PartEntered(state=state, part=part, visit=visit))
        self.snapshot("enter")

    def leave(self) -> None:
        """The open state is over."""
        if self.state is None:
            return
        self.snapshot("leave")
        state, visit = self._here()
        self._record(StateLeft(state=state, visit=visit, duration_ns=self.recorder.now_ns - self._entered_ns))

    def _here(self) -> tuple[str, int]:
        visit = self.recorder.state.current
        return ("", 1) if visit is None else (visit.state, visit.visit)

    def snapshot(self, label: str) -> Snapshot | None:
        """Memory now; None before there is a device."""
        if self.readings is None or self.is_over:
            return None
        state, visit = self._here()
        taken = self.readings.snapshot()
        self.recorder.measuring_ns += taken.cost_ns
        self._record(SnapshotTaken(state=state or None, visit=visit, label=label, snapshot=taken))
        return taken

    def figures(self, read: Iterable[tuple[str, int | float]]) -> None:
        """Figures of the shared list."""
        for name, value in read:
            if abs(value) < 1 << 62:
                self._record(FigureRead(figure=name, value=value, state=self.recorder.state.state))

    def decide(self, decision: str, reason: str, **inputs: Any) -> None:
        """Something that was chosen, left out, or noticed."""
        self._record(DecisionMade(decision=decision, reason=reason, state=self.state, inputs=inputs))

    def fail(self, error: BaseException) -> None:
        """The engine raised: what, where, and what memory looked like; then nothing more is recorded."""
        if self.is_over:
            return
        self.snapshot("fail")
        message, frames = str(error)[:_MESSAGE], _frames(error)
        raised = Raised(0, f"{type(error).__module__}.{type(error).__qualname__}", message, frames)
        death = _death(raised, self)
        state, visit = self._here()
        part = death.part if death.state in (None, state) else None
        if part is not None:
            self._record(PartEntered(state=state, part=part, visit=visit))
        self.figures((figure.name, figure.value) for figure in _said(message, self))
        self._observe(message, state, visit, part, death)
        if state and self.state is not None:
            where = tuple(f"{frame.file} {frame.function}" for frame in frames[-12:])
            self._record(
                StateFailed(
                    state=state,
                    visit=visit,
                    part=part,
                    error_type=raised.type,
                    category=death.category,
                    reason=death.reason,
                    message=message,
                    where=where,
                    duration_ns=self.recorder.now_ns - self._entered_ns,
                )
            )
        self.finish("failed", message.splitlines()[0] if message else raised.type)

    def _observe(self, message: str, state: str, visit: int, part: str | None, death: Death) -> None:
        if death.category != "oom":
            return
        sentence = parse_sentence(message)
        told = {} if sentence is None else {name: getattr(sentence, field) for name, field in _SENTENCE.items()}
        self.figures((name, value) for name, value in told.items() if value is not None)
        self._record(
            OomObserved(
                state=state,
                visit=visit,
                part=part,
                tried_bytes=told.get("oom_tried_bytes"),
                free_bytes=told.get("oom_free_bytes"),
                allocated_bytes=told.get("torch_allocated_bytes"),
                reserved_unallocated_bytes=told.get("torch_reserved_unallocated_bytes"),
                private_pool_bytes=told.get("graph_private_pool_bytes"),
                message=message,
            )
        )

    def finish(self, end: str, reason: str = "") -> None:
        """The start is over."""
        if self.is_over:
            return
        if end == "ready":
            self.leave()
        recorder = self.recorder
        self._record(
            RunFinished(
                end=end,
                state=recorder.state.state,
                reason=reason[:300],
                duration_ns=recorder.now_ns,
                bookkeeping_ns=recorder.bookkeeping_ns,
                syncing_ns=recorder.syncing_ns,
                measuring_ns=recorder.measuring_ns,
            )
        )
        self.is_over = True
        recorder.sync(edge=True)
        recorder.close()

    def has(self, row: str) -> bool:
        """No line was printed here; what an exception means is told by its text, its frames and the state."""
        return False


def _frames(error: BaseException) -> tuple[Frame, ...]:
    listed = traceback.extract_tb(error.__traceback__)
    return tuple(Frame(each.filename.replace("\\", "/"), each.name) for each in listed[-200:])


def _death(raised: Raised, start: Start) -> Death:
    """What the exception means, by the same words as in a text log."""
    from startup_fsm.importers.vllm import VLLM

    return VLLM.death(raised, start)


def _said(message: str, start: Start) -> list[Figure]:
    """Figures in the text of an exception."""
    from startup_fsm.importers.vllm import VLLM

    found = []
    for row in VLLM.rows:
        if row.anchor in message and (match := row.search(message)) is not None:
            found += [fact for fact in row.facts(match, start) if isinstance(fact, Figure)]
    return found
