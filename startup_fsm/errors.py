"""
Every error of the package, in one tree.

    StartupError
    |- PlanError(ValueError)              a definition is wrong, at build time
    |- EdgeRefused(RuntimeError)          undeclared or out of order
    |- CheckFailed(RuntimeError)          a contract is broken
    |- HookFailed(RuntimeError)           a hook with the policy ``fail`` raised
    |- PeerFailed(RuntimeError)           another rank failed
    |- BudgetError(ValueError)            nothing fits
    |- RestartRequired(RuntimeError)      the allocator could not be repaired
    |- EngineImportError(ImportError)     a factory or a hook does not import
    |- JournalError(OSError)              a journal cannot be read or written
    |  |- TornJournal                     broken in the middle
    |  |- UnknownSchema                   written by a newer version
    |- DecodeError(ValueError)            a line is no event of ours
    |- ReplayDivergence(ValueError)       journal and plan disagree

Each is also the nearest builtin, carries its facts as attributes, and says: what, where, numbers; then ``hint:``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class StartupError(Exception):
    """
    The root of the tree.

    Args:
        message: One clear sentence: what happened, where, with which numbers.
        hint: What the reader can do; printed on a line of its own.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


def text_of(error: BaseException) -> str:
    """What an exception says; also where it raises when it is asked."""
    try:
        return str(error)
    except Exception as refused:  # noqa: BLE001 - somebody else's exception must come out as it is
        return f"<{type(error).__name__} that cannot be shown: {type(refused).__name__}>"


class PlanError(StartupError, ValueError):
    """A plan is wrong: an unreachable state, a trap, an edge name that cannot be used."""


class EdgeRefused(StartupError, RuntimeError):
    """An edge that the plan does not declare, or that its bound no longer allows."""

    def __init__(
        self, message: str, *, source: str | None, target: str | None, allowed: Sequence[str], hint: str | None = None
    ) -> None:
        self.source = source
        self.target = target
        self.allowed = tuple(allowed)
        super().__init__(message, hint=hint)


class CheckFailed(StartupError, RuntimeError):
    """A contract on an edge is broken; ``findings`` holds what was seen, worst first."""

    def __init__(self, message: str, *, findings: Sequence[Any], hint: str | None = None) -> None:
        self.findings = tuple(findings)
        super().__init__(message, hint=hint)


class HookFailed(StartupError, RuntimeError):
    """A hook whose policy is ``fail`` raised; ``__cause__`` is its own exception."""


class PeerFailed(StartupError, RuntimeError):
    """
    Another rank failed first.

    Attributes:
        rank, state, reason: Which, in which state where it is known, and what it said; -1 is what ranks talk through.
        edge: The edge of the plan that all ranks take now; None where the start ends.
        restart: Whether a new process may go on with the run.
        missing: Ranks that did not come to a meeting.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        state: str | None,
        reason: str,
        edge: str | None = None,
        restart: bool = False,
        missing: Sequence[int] = (),
        hint: str | None = None,
    ) -> None:
        self.rank = rank
        self.state = state
        self.reason = reason
        self.edge = edge
        self.restart = restart
        self.missing = tuple(missing)
        super().__init__(message, hint=hint)


class BudgetError(StartupError, ValueError):
    """
    No budget can be met.

    Attributes:
        missing_bytes: Bytes that are short.
        terms: Name to signed bytes, as the budget added them up.
        code: The finding that says why.
        fits: What would fit instead, by the name of the figure (a length in tokens, say).
    """

    def __init__(
        self,
        message: str,
        *,
        missing_bytes: int,
        terms: Mapping[str, int],
        code: str = "budget.negative",
        fits: Mapping[str, int] | None = None,
        hint: str | None = None,
    ) -> None:
        self.missing_bytes = missing_bytes
        self.terms = dict(terms)
        self.code = code
        self.fits = dict(fits or {})
        super().__init__(message, hint=hint)


class RestartRequired(StartupError, RuntimeError):
    """The allocator could not be repaired after a failed capture; only a new process helps."""


class EngineImportError(StartupError, ImportError):
    """``MODULE:FACTORY`` names something that cannot be imported or called."""


class JournalError(StartupError, OSError):
    """A journal cannot be read or written; ``path`` and ``offset`` (bytes) say where."""

    def __init__(
        self, message: str, *, path: str | None = None, offset: int | None = None, hint: str | None = None
    ) -> None:
        self.path = path
        self.offset = offset
        super().__init__(message, hint=hint)


class TornJournal(JournalError):
    """A line in the middle of a journal is broken, or events are missing."""


class UnknownSchema(JournalError):
    """A journal of a newer schema than this version reads."""


class DecodeError(StartupError, ValueError):
    """A line does not decode to an event; the message names the field by its path."""

    def __init__(self, message: str, *, where: str, hint: str | None = None) -> None:
        self.where = where
        super().__init__(message, hint=hint)


class ReplayDivergence(StartupError, ValueError):
    """A journal does something that its plan does not allow."""

    def __init__(self, message: str, *, expected: Sequence[str], found: str, seq: int, hint: str | None = None) -> None:
        self.expected = tuple(expected)
        self.found = found
        self.seq = seq
        super().__init__(message, hint=hint)
