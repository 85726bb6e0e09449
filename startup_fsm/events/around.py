"""What happened around the start: hooks, stalls, signals, other ranks."""

from __future__ import annotations

from typing import ClassVar

import attrs

from startup_fsm.events.envelope import Event


@attrs.frozen(kw_only=True)
class HookRan(Event):
    """A hook returned; ``count`` runs together where it looks at every event."""

    kind: ClassVar[str] = "hook_ran"

    hook: str
    moment: str
    state: str | None = None
    duration_ns: int = 0
    count: int = 1


@attrs.frozen(kw_only=True)
class HookFailed(Event):
    """A hook raised, or passed its deadline; what its policy did about it."""

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
    """A state passed its deadline; the stack of the thread that runs it, innermost line last."""

    kind: ClassVar[str] = "state_stalled"

    state: str
    visit: int = 1
    deadline_ns: int
    stack: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class SignalReceived(Event):
    """A signal reached this process."""

    kind: ClassVar[str] = "signal_received"

    signal: str
    state: str | None = None


@attrs.frozen(kw_only=True)
class PeerFailed(Event):
    """Another rank failed."""

    kind: ClassVar[str] = "peer_failed"

    peer: str
    state: str | None = None
    reason: str = ""
