"""One logged start with all that its judgement rests on, and the findings that are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from startup_fsm.findings import Finding, Severity
from startup_fsm.logged.facts import Facts, Seen, gathered
from startup_fsm.logged.outcome import Ending, Failure, ending
from startup_fsm.logged.sizing import Reserved, reserved, sizing_of
from startup_fsm.sources import Source
from startup_fsm.states import position
from startup_fsm.what_if import Sizing


@attrs.frozen(kw_only=True)
class Found:
    """
    A finding with where its log says so.

    Attributes:
        finding: As a verdict has it.
        seen: The events that show it.
        process: Whose it is; None for one that is about all of them.
        is_cause: Whether it is what the start ended of.
        is_after: It comes after the cause, though it broke before it: the start came to ready all the same.
    """

    finding: Finding
    seen: tuple[Seen, ...] = ()
    process: int | None = None
    is_cause: bool = False
    is_after: bool = False

    @property
    def order(self) -> tuple[Any, ...]:
        """The earliest violated invariant first, then severity, then bytes; notes come last."""
        finding = self.finding
        rank = ("error", "warning", "note").index(finding.severity)
        return rank == 2, self.is_after, place(finding.state), rank, not self.is_cause, -finding.bytes


def place(state: str | None) -> float:
    """Where a state stands in the start of an engine: the usual order, but warm-up follows the real KV cache."""
    return position("allocate_kv") + 0.5 if state == "warmup" else position(state)


@attrs.frozen(kw_only=True)
class Start:
    """
    A logged start.

    Attributes:
        facts: What was said.
        ending: How it ended.
        kept: What was reserved for graphs.
        sizing: How the KV cache was sized; None where the log does not come to it.
    """

    facts: Facts
    ending: Ending
    kept: Reserved
    sizing: Sizing | None

    @property
    def is_ready(self) -> bool:
        """Whether it came to ready."""
        return self.ending.outcome == "ready"

    @property
    def failure(self) -> Failure | None:
        """What it ended of; None where nothing failed."""
        return self.ending.failure

    @property
    def gravity(self) -> Severity:
        """Of a fault that may have ended the start: an error, unless it came to ready all the same."""
        return "warning" if self.is_ready else "error"

    def size(self, name: str) -> int | None:
        """A figure in whole bytes or a count."""
        return self.facts.size(name)

    def failed_at(self) -> tuple[Seen, ...]:
        """Where the failure is printed."""
        failure = self.failure
        return () if failure is None else (Seen(failure.process, failure.seq),)

    def found(
        self,
        code: str,
        message: str,
        *,
        severity: Severity | None = None,
        state: str | None = None,
        figures: Sequence[str] = (),
        seen: Sequence[Seen] = (),
        is_cause: bool = False,
        **more: Any,
    ) -> Found:
        """A finding of this start, with the figures that show it."""
        where = (*self.facts.of(*figures), *seen)
        if is_cause:
            where = (*where, *self.failed_at())
        process, is_after = more.pop("process", None), more.pop("is_after", False)
        if process is None and is_cause and self.failure is not None:
            process = self.failure.process
        evidence = tuple(dict.fromkeys(each.seq for each in where if process is None or each.process == process))
        finding = Finding(
            code=code,
            severity=severity or self.gravity,
            state=state,
            message=message,
            evidence=evidence,
            **more,
        )
        seen = tuple(dict.fromkeys(where))
        return Found(finding=finding, seen=seen, process=process, is_cause=is_cause, is_after=is_after)


def _begin(process: Source) -> int:
    """Line of what a process said first; its first event stands for the whole start."""
    origin = process.origins.get(1, process.origins.get(0))
    return 0 if origin is None or origin.line is None else origin.line


def read_start(processes: Sequence[Source]) -> Start:
    """
    All that a judgement needs of a start.

    Args:
        processes: At least one.
    """
    # Journals that were made of a log come by name: a verdict must not depend on that.
    processes = sorted(processes, key=_begin)
    end = ending(processes)
    facts = gathered(processes, None if end.failure is None else end.failure.process)
    kept = reserved(facts)
    return Start(facts=facts, ending=end, kept=kept, sizing=sizing_of(facts, kept))
