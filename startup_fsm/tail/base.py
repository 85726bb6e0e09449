"""What can be followed, and what is seen of a start at one moment."""

from __future__ import annotations

from typing import Protocol

import attrs

from startup_fsm.starts import Start


@attrs.frozen
class Bar:
    """A progress bar that an engine printed: what is done, how many of how many."""

    label: str
    done: int
    total: int


@attrs.frozen(kw_only=True)
class Sight:
    """
    A start as far as it has come.

    Attributes:
        start: Its processes so far; those that nobody writes any more are not alive.
        quiet_s: By process: seconds since its last event, or since the log last grew.
        bar: The progress bar that was printed last; None where no text is followed.
        missing: How many ranks the launcher has announced that have no journal yet.
    """

    start: Start
    quiet_s: tuple[float, ...]
    bar: Bar | None = None
    missing: int = 0


class Tail(Protocol):
    """Something that grows."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come: every process has finished, or its writer is gone."""

    def poll(self) -> bool:
        """
        Read what has come; True where that changes anything.

        Raises:
            JournalError: It cannot be read.
            UnknownSchema: A newer version writes it.
        """

    def sight(self) -> Sight | None:
        """The start; None before its first event."""

    def final(self) -> Start:
        """
        The start as the ordinary reader has it, once it is over.

        Raises:
            JournalError: There was not a single event.
        """

    def drain(self) -> None:
        """Read on to the end, and forget what comes: a pipe that is closed early would end its writer."""

    def close(self) -> None:
        """Let go of what is open; harmless when repeated."""
