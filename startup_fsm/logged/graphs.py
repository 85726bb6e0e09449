"""
What was reserved for graphs against what they took: not reserved, short, long, negative, or impossible.

The invariant breaks where the KV cache is sized, whatever dies of it later.
"""

from __future__ import annotations

from typing import Final

from startup_fsm.findings import Severity
from startup_fsm.logged.sizing import corrected_bytes, is_pinned
from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import GIB, MIB, format_bytes

#: As in ``checks.sizes``: below this nothing is worth a word; above it a tenth of the estimate must be off too.
_SHORT: Final = 64 * MIB
#: An estimate that is too long breaks nothing: more of it must be wasted before it is said.
_LONG: Final = 256 * MIB
_LONG_SHARE: Final = 0.3
#: More than this share of the device, or where the device is not known more than this, is no memory of graphs.
_ABSURD_SHARE: Final = 0.25
_ABSURD: Final = 24 * GIB
#: The same where the start died of a budget that it was taken off.
_ABSURD_AT_DEATH: Final = 16 * GIB


def graphs_judged(start: Start) -> list[Found]:
    """All that can be said of the graphs of a start, failed or not."""
    found = [each for each in (estimate_is_negative(start), graphs_finding(start)) if each is not None]
    absurd = estimate_is_absurd(start)
    if absurd is None:
        return found
    # An impossible estimate is too long as well; that is said once.
    return [absurd, *(each for each in found if each.finding.code != "graphs.estimate_long")]


def estimate_is_negative(start: Start) -> Found | None:
    """A negative estimate was taken off, which gives the KV cache what there is not."""
    estimate = start.size("graph_estimate_bytes")
    if estimate is None or estimate >= -start.facts.resolution("graph_estimate_bytes") or estimate > -MIB:
        return None
    used = start.kept.how == "taken"
    text = f"graphs were estimated at {format_bytes(estimate)}, and no graph gives memory back"
    if used:
        text += f": the KV cache was sized {format_bytes(-estimate)} too large"
    return start.found(
        "graphs.estimate_negative",
        text,
        severity=start.gravity if used else "note",
        state="capture_throwaway",
        figures=("graph_estimate_bytes", "kv_available_bytes"),
        observed=estimate,
        expected=0,
        bytes=-estimate,
    )


def estimate_is_absurd(start: Start) -> Found | None:
    """More was taken off for graphs than graphs can take."""
    estimate, actual = start.size("graph_estimate_bytes"), start.size("graph_actual_bytes")
    if estimate is None or start.kept.how == "not_taken":
        return None
    of = start.size("total_bytes") or start.size("requested_bytes")
    died_of_it = start.failure is not None and start.failure.category == "budget"
    most = (_ABSURD_AT_DEATH if died_of_it else _ABSURD) if of is None else round(of * _ABSURD_SHARE)
    if estimate <= most or (actual is not None and actual * 2 > estimate):
        return None
    text = f"graphs were estimated at {format_bytes(estimate)}, which no set of graphs takes"
    text += "" if of is None else f" on {format_bytes(of)}"
    left = start.size("kv_available_bytes")
    if left is not None:
        text += f"; without it {format_bytes(left + estimate)} would be left for the KV cache"
    return start.found(
        "graphs.estimate_absurd",
        text,
        state="capture_throwaway",
        figures=("graph_estimate_bytes", "kv_available_bytes"),
        observed=estimate,
        expected=most,
        bytes=estimate,
        is_cause=start.failure is not None,
    )


def graphs_finding(start: Start) -> Found | None:
    """The graphs against what was reserved for them; None where it held, or where nobody can tell."""
    actual = start.size("graph_actual_bytes")
    if start.kept.how in ("eager", "unknown") or start.facts.dialect.engine == "sglang" or is_pinned(start.facts):
        return None
    if actual is not None:
        return _measured(start, actual)
    is_capture = start.failure is not None and start.failure.is_oom and start.ending.state == "capture_graphs"
    return _ran_out(start) if is_capture else None


def _measured(start: Start, actual: int) -> Found | None:
    kept = start.kept.bytes or 0
    off = actual - max(0, kept)
    slack = start.facts.resolution("graph_actual_bytes", "graph_estimate_bytes")
    if start.kept.how == "not_taken":
        if off <= _SHORT + slack:
            return None
        text = f"graphs took {format_bytes(actual)} and nothing was reserved for them ({start.kept.why})"
        return _off(start, "graphs.not_reserved", text, off, _severity(start, off))
    if off > max(_SHORT, abs(kept) // 10) + slack and kept >= 0:
        text = f"graphs took {format_bytes(actual)}, {format_bytes(kept)} were reserved for them: "
        return _off(start, "graphs.estimate_short", f"{text}{format_bytes(off)} short", off, _severity(start, off))
    if -off > max(_LONG, round(kept * _LONG_SHARE)) + slack:
        text = f"graphs took {format_bytes(actual)}, {format_bytes(kept)} were reserved for them: "
        return _off(start, "graphs.estimate_long", f"{text}{format_bytes(-off)} stay unused", -off, "warning")
    return None


def _severity(start: Start, off: int) -> Severity:
    """An error where the start ran out of memory after it by no more than twice what was short."""
    failure = start.failure
    if start.is_ready and corrected_bytes(start.facts) is not None:
        # Their cost was taken off before the KV cache was allocated.
        return "note"
    if failure is None or not failure.is_oom:
        return "warning"
    oom = failure.oom
    short = 0 if oom is None else (oom.tried_bytes or 0) - (oom.free_bytes or 0)
    return "error" if short <= 2 * off else "warning"


def _ran_out(start: Start) -> Found | None:
    """Memory ran out in the capture, so the graphs need more than was left for them."""
    if start.kept.how == "not_taken":
        text = f"nothing was reserved for the graphs ({start.kept.why}), and memory ran out while they were captured"
        estimate = start.size("graph_estimate_bytes")
        if estimate is not None and estimate > 0:
            text += f"; they were estimated at {format_bytes(estimate)}"
        return _off(start, "graphs.not_reserved", text + _beside(start), estimate or 0, "error", is_cause=True)
    kept, beside, private = start.kept.bytes, _room_beside(start), start.size("graph_private_pool_bytes")
    if kept is None or kept < 0:
        return None
    in_pool = private is not None and private > kept
    if not in_pool and (beside is None or beside < 0):
        return None
    text = f"{format_bytes(kept)} were reserved for the graphs and memory ran out while they were captured"
    if in_pool and private is not None:
        text += f", with {format_bytes(private)} in their pools"
    return _off(start, "graphs.estimate_short", text + _beside(start), kept, "error", is_cause=True)


def _room_beside(start: Start) -> int | None:
    """What the device had beyond the request; None where nobody can tell."""
    asked = start.size("requested_bytes")
    sizing = start.sizing
    if asked is None or sizing is None or sizing.reachable_bytes is None:
        return None
    return sizing.reachable_bytes - asked


def _beside(start: Start) -> str:
    beside, total, asked = _room_beside(start), start.size("total_bytes"), start.size("requested_bytes")
    if beside is None or beside < 0 or total is None or asked is None:
        return ""
    text = f"; {format_bytes(total - asked)} of the device lay outside the request"
    taken = total - asked - beside
    return f"{text}, {format_bytes(taken)} of it taken by what the engine does not count" if taken > 0 else text


def _off(start: Start, code: str, text: str, off: int, severity: Severity, *, is_cause: bool = False) -> Found:
    return start.found(
        code,
        text,
        severity=severity,
        state="size_kv",
        figures=("graph_actual_bytes", "graph_estimate_bytes", "kv_available_bytes"),
        seen=start.kept.seen,
        observed=start.size("graph_actual_bytes"),
        expected=start.kept.bytes,
        bytes=off,
        is_cause=is_cause,
        is_after=start.ending.state == "serving",
    )
