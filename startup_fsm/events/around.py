"""What happened around the start: hooks, stalls, signals, other ranks."""

from __future__ import annotations

from typing import ClassVar

import attrs

from startup_fsm.events.envelope import Event


@attrs.frozen(kw_only=True)
class HookRan(Event):
    """
    A hook returned.

    Attributes:
        hook: Its name; a second hook of one name has ``#2`` behind it.
        moment: ``before_state``, ``after_state``, ``on_event`` or ``on_failure``.
        state: The state that it ran in; None between states.
        duration_ns: What it took, all ``count`` runs together.
        count: How often it ran: runs of ``on_event`` are summed up once a state.
    """

    kind: ClassVar[str] = "hook_ran"

    hook: str
    moment: str
    state: str | None = None
    duration_ns: int = 0
    count: int = 1


@attrs.frozen(kw_only=True)
class HookFailed(Event):
    """
    A hook raised, or passed its deadline.

    Attributes:
        hook: Its name; that of the entry point where it could not be loaded.
        moment: ``before_state``, ``after_state``, ``on_event``, ``on_failure``, or ``load`` for an entry point that
            cannot be used.
        policy: ``fail``, ``warn`` or ``disable``: what follows from it.
        error: What it raised, as text, at most 2,000 characters of it; or which deadline it passed.
        state: The state that it ran in; None between states.
        duration_ns: From its call until it raised, or until it was found overdue.
        stack: Its own frames, one a line, outermost first; None where there are none.
    """

    kind: ClassVar[str] = "hook_failed"

    hook: str
    moment: str
    policy: str
    error: str
    state: str | None = None
    duration_ns: int = 0
    stack: str | None = None


@attrs.frozen(kw_only=True)
class StateStalled(Event):
    """
    A state passed its deadline.

    Attributes:
        state, visit: The state that is late, and which visit of it, from 1.
        deadline_ns: How long the plan lets it take, ns.
        stack: The thread that runs the state: ``file:line function: source``, the innermost line last.
    """

    kind: ClassVar[str] = "state_stalled"

    state: str
    visit: int = 1
    deadline_ns: int
    stack: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class SignalReceived(Event):
    """
    A signal reached this process.

    Attributes:
        signal: Its name, such as ``SIGTERM``.
        state: The state in which it arrived; None before the first.
    """

    kind: ClassVar[str] = "signal_received"

    signal: str
    state: str | None = None


@attrs.frozen(kw_only=True)
class PeerFailed(Event):
    """
    Another rank failed.

    Attributes:
        peer: Its label, such as ``rank 3``.
        state: The state in which it failed; None where it did not say.
        reason: What it said.
    """

    kind: ClassVar[str] = "peer_failed"

    peer: str
    state: str | None = None
    reason: str = ""
