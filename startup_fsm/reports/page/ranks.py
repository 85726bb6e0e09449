"""
What the page shows of one process, as plain data: visits, frames, lanes, budget, events. Pure.

All that is numbers and names here is said, in the sense of redaction, when the whole is put together in ``data``; texts
of events are said here, since they are cut to a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from startup_fsm.causes import last_oom
from startup_fsm.diagnose import outcome
from startup_fsm.figures import last_snapshot
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import accounts
from startup_fsm.reports.page.frames import Frame, Reading, frames_of, kind_of, peak_of, printed, request_of
from startup_fsm.reports.page.graph import steps_of
from startup_fsm.reports.page.redaction import Redactor
from startup_fsm.reports.page.sizings import of_journal
from startup_fsm.starts import Process

#: Stops of the slider, visits, captures and hooks of all processes together.
MOST_FRAMES: Final = 2_400
MOST_VISITS: Final = 1_600
MOST_MARKS: Final = 3_200

#: Longest name (of a state, a check, an account), and longest line of an event, in characters.
NAME: Final = 80
LINE: Final = 240


def rank_data(process: Process, texts: Sequence[str], redactor: Redactor, *, share: int) -> dict[str, Any]:
    """
    One process.

    Args:
        process: Its journal and fold.
        texts: What each of its events says, as they stand in the journal.
        redactor: What says every text.
        share: How many processes share what the page has room for.
    """
    run, records = process.history, process.journal.records
    started = run.started
    times = {record.seq: record.t for record in records}
    visits = _bounded(run.visits, MOST_VISITS // share)
    places = {visit.entered_seq: at for at, visit in enumerate(visits)}
    frames = [each for each in frames_of(run, times) if run.visits[each.visit].entered_seq in places]
    frames = [attrs.evolve(each, visit=places[run.visits[each.visit].entered_seq]) for each in frames]
    few = _thinned(frames, max(48, MOST_FRAMES // share))
    memory = _Memory(redactor)
    own_outcome = outcome(process.as_source())
    return {
        "label": process.label,
        "outcome": own_outcome,
        "state": run.state,
        "host": None if started is None or not started.host else redactor.token("host", started.host),
        "pid": None if started is None or started.pid is None else redactor.token("pid", str(started.pid)),
        "device": None if started is None else started.device,
        "offset": 0,
        "end": None if run.last_t is None else run.last_t // 1_000,
        "request": request_of(run),
        "visits": [_visit(visit, at, run, frames, memory) for at, visit in enumerate(visits)],
        "visits_left": len(run.visits) - len(visits),
        "frames": [_frame(each, memory) for each in few],
        "frames_left": len(frames) - len(few),
        "ledger": _ledger(run),
        "accounts": memory.accounts,
        "memory": memory.rows,
        "marks": _marks(run, times, places, MOST_MARKS // share),
        "steps": [[each.source, each.edge, each.target, each.after] for each in steps_of(run)[: MOST_VISITS // share]],
        "budget": _budget(run),
        "what_if": of_journal(run),
        "pools": [[life.pool, life.purpose, life.opened_seq, life.released_seq] for life in run.pools[:80]],
        "violations": [[each.seq, each.message] for each in run.violations[:40]],
        "events": _events(process, texts, places, redactor),
    }


def _ledger(run: RunState) -> dict[str, Any] | None:
    """Where every byte was at the last reading, with the meter of each account; of a log, what it printed."""
    last = last_snapshot(run)
    if last is not None:
        rows = [[each.account, kind_of(each.account), each.bytes, each.source] for each in accounts(last)[:40]]
        return {"basis": "read", "total": last.total_bytes, "free": last.free_bytes, "rows": rows}
    said = printed(run, run.last_seq)
    if said is None:
        return None
    rows = [[account, kind_of(account), size, "printed"] for account, size in said.held.items()]
    return {"basis": "printed", "total": said.total, "free": said.free, "rows": rows}


class _Memory:
    """Readings of one process as rows of numbers, each different one once."""

    def __init__(self, redactor: Redactor) -> None:
        self.accounts: list[list[str]] = []
        self.rows: list[list[Any]] = []
        self._say = redactor.say
        self._columns: dict[str, int] = {}
        self._seen: dict[tuple[Any, ...], int] = {}

    def row(self, reading: Reading | None) -> int | None:
        """Index of the row: total, free, peak, basis, then bytes by account."""
        if reading is None:
            return None
        for name in reading.held:
            if name not in self._columns:
                self._columns[name] = len(self.accounts)
                self.accounts.append([self._say(name, NAME), kind_of(name)])
        held = [reading.held.get(name, 0) for name in self._columns]
        while held and held[-1] == 0:
            held.pop()
        row = (reading.total, reading.free, reading.peak, reading.basis, *held)
        if row not in self._seen:
            self._seen[row] = len(self.rows)
            self.rows.append(list(row))
        return self._seen[row]


def _visit(visit: Visit, at: int, run: RunState, frames: Sequence[Frame], memory: _Memory) -> dict[str, Any]:
    end = visit.left or visit.failed
    is_ours = run.started is None or run.started.source == "journal"
    own = end.bookkeeping_ns + end.syncing_ns + end.measuring_ns if end is not None and is_ours else None
    oom = last_oom(visit, run)
    last = next((each for each in reversed(frames) if each.visit == at), None)
    return {
        "state": visit.state,
        "visit": visit.visit,
        "part": visit.part,
        "edge": visit.edge,
        "seq": visit.entered_seq,
        "ended": "left" if visit.left is not None else "failed" if visit.failed is not None else "open",
        "category": None if visit.failed is None else visit.failed.category,
        "from": None if visit.entered_t is None else visit.entered_t // 1_000,
        "to": None if visit.ended_t is None else visit.ended_t // 1_000,
        "cpu": None if end is None or own is None else end.cpu_ns // 1_000,
        "ours": None if own is None else own // 1_000,
        "memory": None if last is None else memory.row(last.reading),
        "peak": peak_of(visit),
        "tried": None if oom is None else oom.tried_bytes,
        "graphs": _graphs(visit),
        "hooks": _hooks(visit, run),
    }


def _graphs(visit: Visit) -> list[int]:
    """How many, in how many us, and what they took: pool and driver together."""
    events = [event for _, event in visit.captures]
    took = sum(event.duration_ns for event in events) // 1_000
    return [len(events), took, sum(event.pool_delta_bytes + event.outside_delta_bytes for event in events)]


def _hooks(visit: Visit, run: RunState) -> list[int]:
    """How often hooks ran in a visit, in how many us."""
    end = visit.ended_seq if visit.ended_seq is not None else run.last_seq
    own = [event for seq, event in run.hooks if visit.entered_seq <= seq <= end]
    return [sum(event.count for event in own), sum(event.duration_ns for event in own) // 1_000]


def _frame(frame: Frame, memory: _Memory) -> list[Any]:
    t = None if frame.t is None else frame.t // 1_000
    return [frame.seq, t, frame.visit, frame.label, int(frame.is_edge), memory.row(frame.reading), frame.captures]


def _thinned(frames: list[Frame], most: int) -> list[Frame]:
    """Every edge, and of what lies between as many as there is room for, evenly."""
    if len(frames) <= most:
        return frames
    edges = [each for each in frames if each.is_edge]
    if len(edges) >= most:
        return _bounded(edges, most)
    between = [each for each in frames if not each.is_edge]
    return sorted([*edges, *_even(between, most - len(edges))], key=lambda each: each.seq)


def _even(rows: Sequence[Any], most: int) -> list[Any]:
    """So many of them, evenly."""
    return list(rows) if len(rows) <= most else [rows[at * len(rows) // most] for at in range(most)]


def _bounded(rows: Sequence[Any], most: int) -> list[Any]:
    """The first and the last; the middle is what is left out."""
    most = max(2, most)
    return list(rows) if len(rows) <= most else [*rows[: most // 2], *rows[-(most - most // 2) :]]


def _marks(run: RunState, times: Mapping[int, int | None], places: Mapping[int, int], most: int) -> dict[str, Any]:
    """What lies on the lanes below the states: captures, hooks, stalls."""
    captures = [
        [
            places[visit.entered_seq],
            event.size,
            _micro(times.get(seq)),
            event.duration_ns // 1_000,
            event.pool_delta_bytes,
            event.outside_delta_bytes,
            event.part,
        ]
        for visit in run.visits
        if visit.entered_seq in places
        for seq, event in visit.captures
    ]
    hooks = [
        [event.hook, event.moment, event.state, _micro(times.get(seq)), event.duration_ns // 1_000, event.count, None]
        for seq, event in run.hooks
    ]
    hooks += [
        [event.hook, event.moment, event.state, _micro(times.get(seq)), event.duration_ns // 1_000, 1, event.policy]
        for seq, event in run.hook_failures
    ]
    stalls = [
        [event.state, event.visit, _micro(times.get(seq)), event.deadline_ns // 1_000, (*event.stack[-1:], "")[0]]
        for seq, event in run.stalls
    ]
    rows = {"captures": captures, "hooks": hooks, "stalls": stalls[:40]}
    left = {name: max(0, len(each) - most) for name, each in rows.items()}
    return {name: _even(each, most) for name, each in rows.items()} | {"left": sum(left.values())}


def _micro(t: int | None) -> int | None:
    return None if t is None else t // 1_000


def _budget(run: RunState) -> dict[str, Any] | None:
    if not run.budgets:
        return None
    seq, computed = run.budgets[-1]
    return {
        "seq": seq,
        "terms": [[each.term, each.bytes, each.source] for each in computed.terms[:40]],
        "available": computed.available_bytes,
        "kv": computed.kv_bytes,
        "blocks": computed.blocks,
        "block": computed.block_bytes,
        "missing": computed.missing_bytes,
        "times": len(run.budgets),
    }


def _events(process: Process, texts: Sequence[str], places: Mapping[int, int], redactor: Redactor) -> dict[str, Any]:
    """Columns of equal length: seq and time as differences to the row before, kind, visit, text."""
    entered = sorted(places)
    columns: dict[str, list[Any]] = {"seq": [], "t": [], "kind": [], "visit": [], "text": []}
    last_seq = last_t = at = 0
    for record, text in zip(process.journal.records, texts, strict=True):
        while at < len(entered) and entered[at] <= record.seq:
            at += 1
        t = None if record.t is None else record.t // 1_000
        columns["seq"].append(record.seq - last_seq)
        columns["t"].append(None if t is None else t - last_t)
        columns["kind"].append(record.kind)
        columns["visit"].append(places[entered[at - 1]] if at else -1)
        columns["text"].append(redactor.say(text, LINE))
        last_seq, last_t = record.seq, last_t if t is None else t
    return columns
