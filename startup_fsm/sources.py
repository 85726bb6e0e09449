"""What a diagnosis is made from: the fold of one process's journal, and what surrounds it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from startup_fsm.events import Origin
from startup_fsm.fold import RunState


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
    """

    run: RunState
    problems: tuple[tuple[str, str, int | None], ...] = ()
    is_alive: bool = False
    stacks: tuple[str, ...] = ()
    origins: Mapping[int, Origin] = attrs.field(factory=dict)

    @property
    def label(self) -> str:
        """``rank 3``, what a log calls it, or the name of a process that is no rank."""
        if self.run.started is not None and self.run.started.label is not None:
            return self.run.started.label
        return self.run.process or "unknown" if self.run.rank is None else f"rank {self.run.rank}"

    @property
    def is_imported(self) -> bool:
        """Whether it is known by the words of a log alone."""
        return self.run.started is not None and self.run.started.source != "journal"
