"""
How far one process of a running start is: its state, how long it has been there, shards and captures, memory. Pure.

All of it is taken from the fold; what a journal does not tell is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from startup_fsm.figures import last_snapshot
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import format_bytes
from startup_fsm.reports.page.frames import printed
from startup_fsm.starts import Process
from startup_fsm.tail import Bar

Standing = Literal["before", "open", "between", "failed", "ready", "ended", "gone"]

_CAPTURES: Final = frozenset({"capture_graphs", "capture_throwaway"})
#: Words of an engine's bar, with the states that it can stand for.
_BARS: Final = (("shard", frozenset({"load_weights"})), ("captur", _CAPTURES))


@attrs.frozen(kw_only=True)
class Done:
    """What is done of something: bytes where ``unit`` is ``B``. ``total`` is None where nobody said it."""

    done: int
    total: int | None
    unit: str


@attrs.frozen(kw_only=True)
class Held:
    """
    Memory of the device, in bytes.

    Attributes:
        own: This process.
        other: Other processes, and what nobody explains.
        total: The device; None where a log does not say it.
    """

    own: int
    other: int
    total: int | None


@attrs.frozen(kw_only=True)
class Standpoint:
    """
    Where one process stands.

    Attributes:
        label: ``rank 3``, or its name.
        standing: In a state, between two, at an end, or gone without one.
        state, part: The one that is open or was last.
        since_ns: How long it has been in that state; None where the source has no time or it is over.
        done: Of shards or captures.
        held: Memory at its last reading, with what captures have added since.
    """

    label: str
    standing: Standing
    state: str | None
    part: str | None
    since_ns: int | None
    done: Done | None
    held: Held | None


def standpoint(process: Process, *, quiet_s: float, bar: Bar | None = None) -> Standpoint:
    """
    Where a process stands.

    Args:
        process: Its journal and fold.
        quiet_s: Seconds since its last event.
        bar: A progress bar that its log ends with.
    """
    run, visit = process.history, process.history.current
    standing = _standing(process)
    since = None
    if standing == "open" and visit is not None and visit.entered_t is not None and run.last_t is not None:
        since = max(0, run.last_t - visit.entered_t) + int(quiet_s * 1e9)
    return Standpoint(
        label=process.label,
        standing=standing,
        state=run.state,
        part=None if visit is None else visit.part,
        since_ns=since,
        done=done_of(run, bar) if standing in ("open", "gone", "failed") else None,
        held=held_of(run),
    )


def _standing(process: Process) -> Standing:
    run = process.history
    if run.finished is not None:
        return "ready" if run.finished[1].end == "ready" else "ended"
    if not process.is_alive and not process.as_source().is_imported:
        return "gone"
    if run.position == "failed":
        return "failed"
    return "open" if run.position == "open" else "before" if run.current is None else "between"


def done_of(run: RunState, bar: Bar | None = None) -> Done | None:
    """Shards or captures of the state that is open or was last; None where nothing tells."""
    visit = run.current
    if visit is None:
        return None
    noted = _noted(visit)
    if visit.state in _CAPTURES and (visit.captures or noted is None) and not _is_of(bar, visit):
        total = noted.total if noted is not None else _planned(run, visit)
        count = len(visit.captures)
        return Done(done=count, total=total if total is not None and count <= total else None, unit="graphs")
    if noted is not None:
        return noted
    if bar is not None and _is_of(bar, visit):
        unit = "graphs" if visit.state in _CAPTURES else "shards"
        return Done(done=min(bar.done, bar.total), total=bar.total, unit=unit)
    return None


def _is_of(bar: Bar | None, visit: Visit) -> bool:
    label = "" if bar is None else bar.label.lower()
    return any(word in label and visit.state in states for word, states in _BARS)


def _noted(visit: Visit) -> Done | None:
    note = visit.notes.get("progress")
    if not isinstance(note, Mapping):
        return None
    done, total = _count(note.get("done")), _count(note.get("total"))
    if done is None:
        return None
    return Done(done=done, total=total, unit=str(note.get("unit", "")))


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _planned(run: RunState, visit: Visit) -> int | None:
    """How many graphs a state is going to capture."""
    sizes = run.knob("capture_sizes")
    if not isinstance(sizes, (list, tuple)):
        return run.estimates[-1][1].of if run.estimates and visit.state == "capture_graphs" else None
    sample = _count(run.knob("graph_sample"))
    return min(len(sizes), sample) if visit.state == "capture_throwaway" and sample else len(sizes)


def held_of(run: RunState) -> Held | None:
    """Memory as it was read last; of a log, what it has printed so far."""
    shot = last_snapshot(run)
    if shot is None:
        said = printed(run, run.last_seq)
        return None if said is None else Held(own=said.own, other=0, total=said.total)
    visit = run.current
    last = 0 if visit is None else max((seq for seq, _ in visit.snapshots.values()), default=0)
    since = [] if visit is None else [event for seq, event in visit.captures if seq > last]
    grown = sum(event.pool_delta_bytes + event.outside_delta_bytes for event in since)
    other = max(0, shot.used_bytes - shot.own_bytes)
    return Held(own=max(0, shot.own_bytes + grown), other=other, total=shot.total_bytes)


def amount(done: Done) -> str:
    """What is done, and of how much."""
    if done.unit != "B":
        return f"{done.done}{'' if done.total is None else f'/{done.total}'} {done.unit}".rstrip()
    if not done.total:
        return format_bytes(done.done)
    return f"{done.done / done.total:.0%} of {format_bytes(done.total)}"
