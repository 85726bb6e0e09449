"""What a diagnosis is made from: the fold of one process's journal, and what surrounds it. Pure data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from startup_fsm.events import Origin, RanksAgreed, Record
from startup_fsm.fold import RunState

#: Engines that size their KV cache themselves, by figures of their own, while a plugin writes the journal.
_WATCHED: Final = frozenset({"vllm"})


@attrs.frozen(kw_only=True)
class Source:
    """
    One process of a start and what surrounds its journal.

    Attributes:
        run: The fold of its journal.
        problems: What is wrong with the file: kind, sentence, seq of the next good event.
        is_alive: Whether a process still holds the journal open for writing.
        stacks: The stack that faulthandler left beside it, outermost line first; empty where it left none.
        origins: By seq, where imported events were read; empty for journals of our own.
        meetings: Journal time of each meeting with other ranks, ns; see :func:`meetings_of`.
    """

    run: RunState
    problems: tuple[tuple[str, str, int | None], ...] = ()
    is_alive: bool = False
    stacks: tuple[str, ...] = ()
    origins: Mapping[int, Origin] = attrs.field(factory=dict)
    meetings: Mapping[tuple[str, int], int] = attrs.field(factory=dict)

    @property
    def label(self) -> str:
        """``rank 3``, what a log calls it, or the name of a process that is no rank."""
        if self.run.started is not None and self.run.started.label is not None:
            return self.run.started.label
        return self.run.process or "unknown" if self.run.rank is None else f"rank {self.run.rank}"

    @property
    def is_imported(self) -> bool:
        """Whether it is judged by an engine's own figures: a text log, or a journal of an engine that we only watch."""
        started, plan = self.run.started, self.run.plan
        if started is None:
            return False
        return started.source != "journal" or (started.engine in _WATCHED and plan is not None and plan.is_free)


def meetings_of(records: Iterable[Record]) -> dict[tuple[str, int], int]:
    """Journal time of each meeting that a rank waited in, ns, by its topic and which of that topic it was."""
    found: dict[tuple[str, int], int] = {}
    seen: Counter[str] = Counter()
    for record in records:
        # What was written down beside another meeting did not wait.
        if isinstance(record.event, RanksAgreed) and record.event.waited_ns and record.t is not None:
            found[record.event.topic, seen[record.event.topic]] = record.t
            seen[record.event.topic] += 1
    return found
