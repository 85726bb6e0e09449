"""
Hooks: what a platform does at the edges of a start, timed, recorded and held to its deadline.

A hook is any object with some of ``before_state``, ``after_state``, ``on_event`` and ``on_failure``. All are called
with keyword arguments and take ``**future``, so that later versions may say more. Optional attributes: ``name``,
``states`` (None is all), ``policy`` (``fail``, ``warn`` or ``disable``), ``deadline_s`` and ``thread``.
"""

from __future__ import annotations

import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from importlib import metadata
from typing import Any, Final, Literal, get_args

import attrs

from startup_fsm import errors
from startup_fsm.events import Event, HookFailed, HookRan
from startup_fsm.stacks import stack_lines
from startup_fsm.watchdog import Sentry

Policy = Literal["fail", "warn", "disable"]
Moment = Literal["before_state", "after_state", "on_event", "on_failure"]

#: Entry points of this group are hooks, or classes that make one without arguments.
GROUP: Final = "startup_fsm.hooks"

_MOMENTS: Final[tuple[Moment, ...]] = get_args(Moment)
_POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)

# Not offered to on_event: what a hook does would be an event for it again.
_OWN: Final = frozenset({"hook_ran", "hook_failed"})
# While these are recorded an exception of the engine is on its way; a hook's must not take its place.
_AT_FAILURE: Final = frozenset({"state_failed", "oom_observed", "signal_received", "peer_failed", "state_stalled"})
# These come between states: nothing is open that a hook could refuse.
_BETWEEN: Final = frozenset({"state_left", "recovery_chosen", "run_finished"})


@attrs.frozen(kw_only=True)
class BrokenHook:
    """An entry point that cannot be used; recorded when the first state begins, and no reason not to start."""

    name: str
    error: str


@attrs.define(slots=True)
class _Sum:
    """Runs of ``on_event`` that were not recorded yet."""

    count: int = 0
    duration_ns: int = 0
    failed: int = 0
    error: str = ""


@attrs.define(eq=False, kw_only=True)
class _Hook:
    """One hook with its settings."""

    name: str
    moments: dict[Moment, Callable[..., object]]
    states: frozenset[str] | None
    policy: Policy
    deadline_s: float | None
    worker: _Worker | None
    off: bool = False
    sum: _Sum = attrs.field(factory=_Sum)
    busy: set[int] = attrs.field(factory=set)

    def wants(self, moment: Moment, state: str | None) -> bool:
        return not self.off and moment in self.moments and (self.states is None or state in self.states)


class Hooks:
    """
    The hooks of one start.

    They run on the caller's thread, in the order given. One that passes its deadline there is recorded with its stack
    while it is still busy, and is off from then on. One that says ``thread = True`` runs on a thread of its own and is
    abandoned at its deadline; it must not touch CUDA. A ``KeyboardInterrupt`` passes through. In a forked child
    nothing runs.

    Args:
        hooks: The objects, also those of :func:`discovered`.
        record: Takes an event; also called from another thread, while a hook is overdue.

    Attributes:
        running_ns: Time spent in hooks so far.
        telling: While it is set, no event can be refused.

    Raises:
        TypeError: Something is no hook.
        ValueError: An attribute of a hook has no such value.
    """

    def __init__(self, hooks: Iterable[object], record: Callable[[Event], None]) -> None:
        given = list(hooks)
        self.running_ns = 0
        self.telling = False
        self._record = record
        self._pid = os.getpid()
        self._broken = [hook for hook in given if isinstance(hook, BrokenHook)]
        self._hooks = [_hook(hook) for hook in given if not isinstance(hook, BrokenHook)]
        self._sentry = Sentry("startup-fsm-hooks")
        self._state: str | None = None
        names: dict[str, int] = {}
        for hook in self._hooks:
            names[hook.name] = names.get(hook.name, 0) + 1
            if names[hook.name] > 1:
                hook.name = f"{hook.name}#{names[hook.name]}"

    def before_state(self, state: str, **facts: Any) -> None:
        """A state begins. Raises :class:`startup_fsm.errors.HookFailed` where a hook's policy is ``fail``."""
        self._state = state
        while self._broken and os.getpid() == self._pid:
            broken = self._broken.pop(0)
            self._record(HookFailed(hook=broken.name, moment="load", policy="warn", error=broken.error, state=state))
        self._all("before_state", state, facts)

    def after_state(self, state: str, **facts: Any) -> None:
        """A state ended well. Raises as :meth:`before_state`."""
        try:
            self._all("after_state", state, facts)
        finally:
            self._sum_up(state)

    def on_failure(self, state: str | None, error: BaseException, **facts: Any) -> None:
        """A state ended by an exception, which stays what it is: whatever a hook's policy, nothing is raised."""
        try:
            self._all("on_failure", state, {"error": error, **facts}, raising=False)
        finally:
            self._sum_up(state)

    def on_event(self, event: Event, **facts: Any) -> None:
        """
        An event was recorded. Raises as :meth:`before_state`, but not where a state has ended or is failing.

        Call it without the lock of the journal: a hook that is overdue is recorded from another thread.
        """
        kind = getattr(event, "kind", "")
        if kind not in _OWN:
            state = getattr(event, "state", None) or self._state
            may_refuse = not self.telling and kind not in _AT_FAILURE | _BETWEEN
            self._all("on_event", state, {"event": event, **facts}, raising=may_refuse)

    def close(self) -> None:
        """Record what is not recorded yet, and end the threads."""
        self._sum_up(None)
        self._sentry.close()
        if os.getpid() == self._pid:
            for hook in self._hooks:
                if hook.worker is not None:
                    hook.worker.close()

    def _all(self, moment: Moment, state: str | None, facts: dict[str, Any], *, raising: bool = True) -> None:
        if os.getpid() != self._pid:
            return
        for hook in self._hooks:
            if hook.wants(moment, state):
                self._one(hook, moment, state, {"state": state, **facts}, raising=raising)

    def _one(self, hook: _Hook, moment: Moment, state: str | None, facts: dict[str, Any], *, raising: bool) -> None:
        thread = threading.get_ident()
        if moment == "on_event":
            # A hook that records something while it looks at an event does not look at that.
            if thread in hook.busy:
                return
            hook.busy.add(thread)
        before = time.perf_counter_ns()
        try:
            self._timed(hook, moment, state, facts, before)
        except Exception as error:
            self._failed(hook, moment, state, error, time.perf_counter_ns() - before)
            if hook.policy == "fail" and raising:
                where = f" of {state}" if state else ""
                msg = f"the hook {hook.name} failed at {moment}{where}: {_text(error)}"
                hint = f'fix the hook, or give it policy = "warn" or "disable" (it has "{hook.policy}")'
                raise errors.HookFailed(msg, hint=hint) from error
        else:
            self._ran(hook, moment, state, time.perf_counter_ns() - before)
        finally:
            self.running_ns += time.perf_counter_ns() - before
            if moment == "on_event":
                hook.busy.discard(thread)

    def _timed(self, hook: _Hook, moment: Moment, state: str | None, facts: dict[str, Any], before: int) -> None:
        body = hook.moments[moment]
        if hook.worker is not None:
            hook.worker.run(body, facts, hook.deadline_s)
            return
        if hook.deadline_s is None:
            body(**facts)
            return

        def overdue(stack: tuple[str, ...]) -> None:
            hook.off = True
            error = f"still busy at its deadline of {hook.deadline_s:g} s"
            self._tell(hook, moment, state, error, time.perf_counter_ns() - before, stack)

        watch = self._sentry.watch(hook.deadline_s, overdue)
        try:
            body(**facts)
        finally:
            self._sentry.rest(watch)

    def _ran(self, hook: _Hook, moment: Moment, state: str | None, duration_ns: int) -> None:
        if moment == "on_event":
            hook.sum.count += 1
            hook.sum.duration_ns += duration_ns
        else:
            self._record(HookRan(hook=hook.name, moment=moment, state=state, duration_ns=duration_ns))

    def _failed(self, hook: _Hook, moment: Moment, state: str | None, error: Exception, duration_ns: int) -> None:
        late = isinstance(error, _OverdueError)
        hook.off = hook.off or late or hook.policy == "disable"
        if moment == "on_event" and not hook.off and hook.policy == "warn":
            hook.sum.failed += 1
            if hook.sum.failed > 1:
                # The first of a state is told at once, the rest together: one that fails on every event fills no disk.
                hook.sum.error = _text(error)
                return
        stack = error.stack if isinstance(error, _OverdueError) else _own_frames(error)
        self._tell(hook, moment, state, str(error) if late else _text(error), duration_ns, stack)

    def _tell(
        self, hook: _Hook, moment: Moment, state: str | None, error: str, duration_ns: int, stack: tuple[str, ...] = ()
    ) -> None:
        self._record(
            HookFailed(
                hook=hook.name,
                moment=moment,
                policy=hook.policy,
                error=error,
                state=state,
                duration_ns=duration_ns,
                stack="\n".join(stack) or None,
            )
        )

    def _sum_up(self, state: str | None) -> None:
        """Record the runs of ``on_event`` since the last state, one event a hook."""
        if os.getpid() != self._pid:
            return
        self._state = None
        for hook in self._hooks:
            total, hook.sum = hook.sum, _Sum()
            if total.count:
                ran = HookRan(
                    hook=hook.name, moment="on_event", state=state, duration_ns=total.duration_ns, count=total.count
                )
                self._record(ran)
            if total.failed > 1:
                self._tell(hook, "on_event", state, f"failed {total.failed - 1} times more, last: {total.error}", 0)


class _OverdueError(TimeoutError):
    """A worker was abandoned; ``stack`` is where it was."""

    def __init__(self, deadline_s: float, stack: tuple[str, ...]) -> None:
        self.stack = stack
        super().__init__(f"abandoned at its deadline of {deadline_s:g} s")


@attrs.define(eq=False)
class _Call:
    """One run on a worker."""

    body: Callable[..., object]
    facts: dict[str, Any]
    done: threading.Event = attrs.field(factory=threading.Event)
    error: BaseException | None = None


class _Worker:
    """The thread of one hook, started with its first run; a daemon, so that an abandoned one keeps nothing alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, body: Callable[..., object], facts: dict[str, Any], deadline_s: float | None) -> None:
        """Run it there and wait; raises what it raised, or :class:`_OverdueError`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=f"startup-fsm-hook-{self._name}", daemon=True)
            self._thread.start()
        call = _Call(body, facts)
        self._calls.put(call)
        if not call.done.wait(deadline_s) and deadline_s is not None:
            frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - documented, and the only way
            raise _OverdueError(deadline_s, () if frame is None else stack_lines(frame))
        if call.error is not None:
            raise call.error

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.body(**call.facts)
            except BaseException as error:  # noqa: BLE001 - raised again on the thread that waits
                call.error = error
            call.done.set()
            del call

    def close(self) -> None:
        self._calls.put(None)


def discovered() -> list[object]:
    """The hooks of installed distributions (entry point group ``startup_fsm.hooks``), a broken one as such."""
    found: list[object] = []
    for point in metadata.entry_points(group=GROUP):
        try:
            hook = point.load()
            hook = hook() if isinstance(hook, type) else hook
            _hook(hook)
        except Exception as error:  # noqa: BLE001 - somebody else's distribution must not keep an engine from starting
            hook = BrokenHook(name=point.name, error=f"{point.value}: {_text(error)}")
        found.append(hook)
    return found


def _hook(given: object) -> _Hook:
    name = str(getattr(given, "name", None) or getattr(given, "__name__", None) or type(given).__name__)
    if isinstance(given, type):
        msg = f"hook {name}: a class, not an object\nhint: pass {name}()"
        raise TypeError(msg)
    moments: dict[Moment, Callable[..., object]] = {
        moment: getattr(given, moment) for moment in _MOMENTS if callable(getattr(given, moment, None))
    }
    if not moments:
        msg = (
            f"hook {name}: {type(given).__qualname__} has none of {', '.join(_MOMENTS)}\nhint: a hook has at least one"
        )
        raise TypeError(msg)
    for moment, body in moments.items():
        _check_signature(name, moment, body)
    policy = getattr(given, "policy", "warn")
    if policy not in _POLICIES:
        msg = f"hook {name}: policy {policy!r}\nhint: one of {', '.join(_POLICIES)}"
        raise ValueError(msg)
    thread = bool(getattr(given, "thread", False))
    return _Hook(
        name=name,
        moments=moments,
        states=_states(name, getattr(given, "states", None)),
        policy=policy,
        deadline_s=_deadline(name, getattr(given, "deadline_s", None)),
        worker=_Worker(name) if thread else None,
    )


def _check_signature(name: str, moment: str, body: Callable[..., object]) -> None:
    if inspect.iscoroutinefunction(body):
        msg = f"hook {name}: {moment} is a coroutine function\nhint: hooks are called, not awaited"
        raise TypeError(msg)
    try:
        parameters = inspect.signature(body).parameters.values()
    except ValueError:
        return
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        msg = f"hook {name}: {moment} takes no **future\nhint: def {moment}(self, *, state, **future)"
        raise TypeError(msg)


def _states(name: str, states: Any) -> frozenset[str] | None:
    if states is None:
        return None
    if isinstance(states, Collection) and not isinstance(states, str) and all(isinstance(each, str) for each in states):
        return frozenset(states)
    msg = f"hook {name}: states {states!r}\nhint: names of states in a collection, such as ('capture_graphs',), or None"
    raise TypeError(msg)


def _deadline(name: str, seconds: Any) -> float | None:
    if seconds is None:
        return None
    if type(seconds) in (int, float) and 0 < seconds < threading.TIMEOUT_MAX:
        return float(seconds)
    msg = f"hook {name}: deadline_s {seconds!r}\nhint: seconds, more than 0, or None"
    raise ValueError(msg)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2_000]


def _own_frames(error: BaseException) -> tuple[str, ...]:
    """The frames of the hook itself, without ours above it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return () if trace is None else stack_lines(trace)
