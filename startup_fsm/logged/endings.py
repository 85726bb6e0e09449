"""Ends that no failure explains: a log that stops, stalls, or is cut off by a signal, and ranks that never came."""

from __future__ import annotations

from typing import Final

from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import format_bytes

_CAPTURES: Final = ("capture_throwaway", "capture_graphs")


def ended(start: Start) -> list[Found]:
    """An end that no failure explains."""
    outcome, state, part = start.ending.outcome, start.ending.state, start.ending.part
    if start.failure is not None or outcome in ("ready", "running"):
        return []
    last = start.facts.last()
    seen = () if last is None else (last,)
    if outcome == "hang":
        code = "capture.stalled" if state in _CAPTURES else "state.stalled"
        text = f"{state} stopped going on: notices of waiting come up to the end of the log"
        return [start.found(code, text, state=state, part=part, seen=seen, is_cause=True)]
    if outcome == "interrupted":
        text = f"a signal arrived in {state}" if state else "a signal arrived"
        return [start.found("run.ended_by_signal", text, state=state, part=part, seen=seen, is_cause=True)]
    where = f"in {state}" if state else "before any state"
    ended = start.found(
        "run.ended_without_trace",
        f"the log stops {where}; nothing says why",
        state=state,
        part=part,
        seen=seen,
        is_cause=True,
    )
    others = [each for each in (_silent_capture(start), _missing_ranks(start)) if each is not None]
    return [*others, ended]


def _missing_ranks(start: Start) -> Found | None:
    """Ranks that never came where most of them are."""
    facts, state = start.facts, start.ending.state
    here = {
        label
        for at, process in enumerate(facts.processes)
        if (label := facts.label(at)) is not None and state is not None and process.run.visits_of(state)
    }
    world = 1
    for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        value = facts.knob(setting)
        world *= value if isinstance(value, int) and value > 0 else 1
    world = max(world, len(facts.labels))
    # Most versions print most lines of one rank only: silence of many ranks says nothing.
    if len(here) < 2 or len(here) >= world or 2 * len(here) < world:
        return None
    silent = [label for label in facts.labels if label not in here]
    text = f"{len(here)} of {world} ranks came to {state}" + (f"; not {', '.join(silent[:4])}" if silent else "")
    return start.found("ranks.missing", text, severity="warning", state=state, observed=len(here), expected=world)


def _silent_capture(start: Start) -> Found | None:
    """Ranks that register no graph at the end of a capture left it by an exception that nobody shows."""
    signs = [sign for sign in start.facts.signs("addresses_registered") if sign.inputs.get("n") == 0]
    if not signs or start.ending.state != "capture_graphs":
        return None
    facts = start.facts
    left = {label for sign in signs if (label := facts.label(sign.seen.process)) is not None}
    text = f"the capture stopped: {len(left) or 'some'} ranks left it without a graph, which is what a hidden failure"
    missing = [label for label in facts.labels if label not in left]
    text += " of one rank leaves" + (f"; {', '.join(missing[:4])} did not" if missing else "")
    first = start.size("avail_first_batch_bytes")
    if first is not None:
        text += f"; {format_bytes(first)} were free at the first size"
    seen = tuple(sign.seen for sign in signs[:8])
    return start.found(
        "capture.stalled", text, state="capture_graphs", seen=seen, figures=("avail_first_batch_bytes",), is_cause=True
    )
