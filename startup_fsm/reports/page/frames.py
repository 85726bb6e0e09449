"""
Memory at every step of one process: what the slider moves over, taken from the fold that was made already. Pure.

A frame stands at each edge of a state, at each snapshot in between and at each captured graph. Where nothing was read,
the figures that a capture tells are added to the last reading, and the frame says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import attrs

from startup_fsm.checks.readings import requested_bytes
from startup_fsm.events import GraphCaptured
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import Snapshot, accounts

#: Kinds of accounts in the order in which they are stacked; each has a colour of its own.
KINDS: Final = (
    "outside", "weights", "pool", "trial_kv", "kv", "trial_graphs", "graphs", "peak", "other", "unexplained"
)  # fmt: skip
#: Kinds that are charged to this process.
OWN: Final = frozenset(KINDS) - {"other", "unexplained"}

_KIND_OF: Final = {
    "torch pool default": "weights",
    "torch pool profiling_kv": "trial_kv",
    "torch pool kv": "kv",
    "arena mapped": "kv",
    "torch pool throwaway_graphs": "trial_graphs",
    "torch pool graphs": "graphs",
    "torch, no pool": "pool",
    "outside torch": "outside",
    "other processes": "other",
    "unexplained": "unexplained",
    "before the engine looked first": "other",
    "weights and outside torch": "weights",
    "torch, everything else": "pool",
    "torch, pools of graphs": "graphs",
    "torch, reserved and not allocated": "pool",
    "this process outside torch": "outside",
    "outside torch, and other processes": "outside",
    "largest step, for as long as it runs": "peak",
}
#: Figures of a log that say where bytes are, with the account they stand for; of two names the first that is there.
_PRINTED: Final = (
    (("weights_bytes",), "weights", "weights"),
    (("kv_cache_bytes", "kv_available_bytes"), "KV cache", "kv"),
    (("graph_actual_bytes", "graph_estimate_bytes"), "graphs", "graphs"),
    (("engine_activation_bytes",), "activations, at their peak", "peak"),
    (("engine_outside_torch_bytes",), "outside torch", "outside"),
)
#: Accounts of one process; what comes after them is one account together.
_MOST: Final = 12
_REST: Final = "other pools"


@attrs.frozen(kw_only=True)
class Reading:
    """
    Memory as it is shown, in bytes.

    Attributes:
        held: By account.
        total, free: The device; None where nobody said.
        peak: Of this process since the peak was last reset; None where it is no news.
        basis: ``read``, ``counted`` (a reading and what captures added since), or ``printed`` (figures of a log).
    """

    held: Mapping[str, int]
    total: int | None
    free: int | None
    peak: int | None = None
    basis: str = "read"

    @property
    def own(self) -> int:
        """What is charged to this process."""
        return sum(size for account, size in self.held.items() if kind_of(account) in OWN)


@attrs.frozen(kw_only=True)
class Frame:
    """
    One stop of the slider.

    Attributes:
        seq, t: Where it stands in the journal; ``t`` in ns, None where the source has no time.
        visit: Index of the visit.
        label: What happened there.
        is_edge: Whether a state begins or ends here.
        reading: Memory then; None where nothing tells.
        captures: How many graphs of this visit there were.
    """

    seq: int
    t: int | None
    visit: int
    label: str
    is_edge: bool
    reading: Reading | None
    captures: int = 0


def kind_of(account: str) -> str:
    """Kind of an account, for its place in the stack and its colour."""
    return _KIND_OF.get(account, _PRINTED_KINDS.get(account, "pool"))


_PRINTED_KINDS: Final = {name: kind for _, name, kind in _PRINTED}


@attrs.frozen
class _End:
    """The begin or the end of a visit that has no snapshot of its own."""

    label: str


@attrs.frozen
class _Printed:
    """A figure that a log printed, and all that it had printed of memory until then."""

    label: str
    reading: Reading | None


_What = Snapshot | GraphCaptured | _End | _Printed


def frames_of(run: RunState, times: Mapping[int, int | None]) -> list[Frame]:
    """
    All stops of one process, in order.

    Args:
        run: Its fold.
        times: By seq, the time of each record in ns.
    """
    purposes = {life.pool: life.purpose for life in run.pools}
    found: list[Frame] = []
    last: Reading | None = None
    for at, visit in enumerate(run.visits):
        captures = 0
        for seq, what in _moments(visit, run):
            label, reading = _labelled(what, visit, seq), _reading(what, last, purposes)
            last = reading if reading is not None else last
            captures += isinstance(what, GraphCaptured)
            is_edge = label in ("enter", "leave", "fail") and not isinstance(what, _Printed)
            t = times.get(seq)
            frame = Frame(seq=seq, t=t, visit=at, label=label, is_edge=is_edge, reading=last, captures=captures)
            found.append(frame)
    return found


def _moments(visit: Visit, run: RunState) -> list[tuple[int, _What]]:
    """What there is to stop at: snapshots, captures, figures, and the two ends where no snapshot stands for them."""
    moments: list[tuple[int, _What]] = [(seq, shot) for seq, shot in visit.snapshots.values()]
    if not moments and run.figures:
        moments += _printed_moments(visit, run)
    moments += [(seq, event) for seq, event in visit.captures]
    if "enter" not in visit.snapshots:
        moments.append((visit.entered_seq, _End("enter")))
    if visit.ended_seq is not None and visit.after is None:
        moments.append((visit.ended_seq, _End("leave" if visit.left is not None else "fail")))
    return sorted(moments, key=lambda moment: moment[0])


def _labelled(what: _What, visit: Visit, seq: int) -> str:
    if isinstance(what, Snapshot):
        return next(label for label, (at, _) in visit.snapshots.items() if at == seq)
    return f"graph of size {what.size}" if isinstance(what, GraphCaptured) else what.label


def _reading(what: _What, last: Reading | None, purposes: Mapping[str, str]) -> Reading | None:
    if isinstance(what, Snapshot):
        return read(what)
    if isinstance(what, GraphCaptured):
        return _counted(last, what, purposes)
    return what.reading if isinstance(what, _Printed) else last


def read(shot: Snapshot) -> Reading:
    """A snapshot as it is shown; pools of one purpose are one account."""
    held: dict[str, int] = {}
    for account in accounts(shot):
        name = account.account if account.account in held or len(held) < _MOST else _REST
        held[name] = held.get(name, 0) + account.bytes
    peak = shot.outside_bytes + shot.arena_mapped_bytes + shot.reserved_peak_bytes
    return Reading(
        held={name: size for name, size in held.items() if size},
        total=shot.total_bytes,
        free=shot.free_bytes,
        peak=peak if shot.reserved_peak_bytes > shot.reserved_bytes else None,
    )


def _counted(last: Reading | None, event: GraphCaptured, purposes: Mapping[str, str]) -> Reading | None:
    if last is None or last.basis == "printed":
        return last
    pool = f"torch pool {purposes.get(event.pool, event.pool)}"
    held = dict(last.held)
    for name, delta in ((pool, event.pool_delta_bytes), ("outside torch", event.outside_delta_bytes)):
        if delta:
            held[name] = held.get(name, 0) + delta
    grown = event.pool_delta_bytes + event.outside_delta_bytes
    free = None if last.free is None else last.free - grown
    return Reading(held=held, total=last.total, free=free, basis="counted")


def _printed_moments(visit: Visit, run: RunState) -> Iterator[tuple[int, _What]]:
    """Figures that were printed inside a visit, each with all that was printed so far."""
    # A line that ends a state also says what it came to: figures are read just after the end.
    later = (each.entered_seq for each in run.visits if each.entered_seq > visit.entered_seq)
    end = next(later, run.last_seq + 1)
    for name, (seq, _) in run.figures.items():
        if visit.entered_seq <= seq < end and any(name in names for names, _, _ in _PRINTED):
            yield seq, _Printed(name, printed(run, seq))


def printed(run: RunState, until: int) -> Reading | None:
    """What a log had printed of memory up to an event; None where it printed nothing of it."""
    figures = {name: event.value for name, (seq, event) in run.figures.items() if seq <= until}
    held: dict[str, int] = {}
    for names, account, _ in _PRINTED:
        value = next((figures[name] for name in names if name in figures), None)
        if isinstance(value, int) and value > 0:
            held[account] = value
    if not held:
        return None
    total = figures.get("total_bytes")
    whole = total if isinstance(total, int) else None
    return Reading(held=held, total=whole, free=None, basis="printed")


def request_of(run: RunState) -> int | None:
    """The request in bytes: of the last budget, as printed, or from the knobs; None where nobody said."""
    if run.budgets:
        return run.budgets[-1][1].requested_bytes
    said = run.figures.get("requested_bytes")
    if said is not None and isinstance(said[1].value, int):
        return said[1].value
    total = next((shot.total_bytes for visit in run.visits for _, shot in visit.snapshots.values()), None)
    if total is None and (known := run.figures.get("total_bytes")) is not None:
        total = known[1].value if isinstance(known[1].value, int) else None
    return None if total is None else requested_bytes(run, total)


def end_of(visit: int, frames: list[Frame]) -> Frame | None:
    """The last stop of a visit that has a reading; None where it has none."""
    return next((each for each in reversed(frames) if each.visit == visit and each.reading is not None), None)


def peak_of(visit: Visit) -> int | None:
    """The highest that this process stood in a visit, in bytes; None where no peak of it was recorded."""
    entered, after = visit.before, visit.after
    shot = visit.snapshots["peak"][1] if "peak" in visit.snapshots else after
    if shot is None or (shot.reserved_peak_bytes <= shot.reserved_bytes and "peak" not in visit.snapshots):
        return None
    # A peak that nobody reset is the one of a state before this.
    if (
        "peak" not in visit.snapshots
        and entered is not None
        and shot.reserved_peak_bytes <= entered.reserved_peak_bytes
    ):
        return None
    return shot.outside_bytes + shot.arena_mapped_bytes + max(shot.reserved_peak_bytes, shot.reserved_bytes)
