"""
What the budget formula starts from, for a journal of our own and for a log, and what may be reserved for graphs. Pure.

Only numbers that were recorded or printed; the formula itself is in ``budget_table``.
"""

from __future__ import annotations

from typing import Any

from startup_fsm import budget
from startup_fsm.causes import graphs_needed
from startup_fsm.checks.readings import graphs_actual
from startup_fsm.estimators import captured
from startup_fsm.events import BudgetComputed
from startup_fsm.fold import RunState, Visit
from startup_fsm.reports.page.budget_table import Number, evaluate
from startup_fsm.what_if import Sizing


def of_journal(run: RunState) -> dict[str, Any] | None:
    """The what-if of one process; None where it came to no budget."""
    if not run.budgets:
        return None
    seq, computed = run.budgets[-1]
    inputs = inputs_of(computed, run)
    again = evaluate(inputs)
    return {
        "setting": "gpu_memory_utilization",
        "unit": "tokens" if inputs["block_tokens"] not in (None, 1) else "blocks",
        "charged": "used by us",
        "inputs": inputs,
        "choices": graph_choices(computed, seq, run),
        "is_exact": again["available"] == computed.available_bytes and again["blocks"] == computed.blocks,
        "assumed": [],
    }


def of_log(sized: Sizing) -> dict[str, Any] | None:
    """The what-if of a log, as far as its printed digits go; None where it does not say what the share is of."""
    if sized.base_bytes is None or sized.share is None:
        return None
    graphs = -sum(term.bytes for term in sized.terms if term.term == "graphs")
    each = sized.token_bytes
    block, block_tokens, longest, unit = (1, None, None, "bytes")
    if each is not None and each >= 1:
        block, block_tokens, longest, unit = round(each), 1, sized.longest_tokens, "tokens"
    elif sized.needed_bytes:
        block, block_tokens, longest, unit = sized.needed_bytes, 1, 1, "requests"
    inputs: dict[str, Number] = {
        "total": sized.base_bytes,
        "utilization": float(sized.share),
        "explicit": None,
        "reachable": sized.reachable_bytes,
        "used_by_us": sized.charged_bytes - graphs,
        "graphs": graphs,
        "headroom": 0,
        "margin": 0,
        "shortfall": 0,
        "not_mapped": 0,
        "block": block,
        "pinned": sized.pinned_bytes,
        "most_blocks": None,
        "block_tokens": block_tokens,
        "longest": longest,
    }
    need = graphs + max(0, sized.later_bytes)
    choices = [_choice("as this start reserved", graphs, need)]
    choices += [_choice("as they took", need, need)] if need != graphs else []
    names = [term.term.replace("_", " ") for term in sized.terms if term.term != "graphs"]
    return {
        "setting": sized.setting,
        "unit": unit,
        "charged": ", ".join(names) or "charged",
        "inputs": inputs,
        "choices": [*choices, _choice("none: eager", 0, 0)],
        "is_exact": evaluate(inputs)["available"] == sized.available_bytes,
        "assumed": list(sized.assumed),
    }


def inputs_of(computed: BudgetComputed, run: RunState) -> dict[str, Number]:
    """The inputs of a budget that was recorded, so that the formula gives it again."""

    def charged(name: str) -> int:
        return -budget.term(computed, name)

    explicit, pinned = run.knob("requested_bytes"), run.knob("kv_cache_memory_bytes")
    visit = run.last(computed.state)
    notes = {} if visit is None else visit.notes
    block_tokens, longest = (_count(notes.get(name)) for name in ("block_tokens", "longest_tokens"))
    if block_tokens is None and computed.needed_bytes and computed.block_bytes > 0:
        # Nobody said how tokens fill blocks: count the request in blocks.
        block_tokens, longest = 1, computed.needed_bytes // computed.block_bytes
    wanted = pinned if isinstance(pinned, int) else computed.available_bytes
    capped = computed.block_bytes > 0 and computed.blocks < wanted // computed.block_bytes
    return {
        "total": computed.total_bytes,
        "utilization": None if isinstance(explicit, int) else _share(computed, run),
        "explicit": explicit if isinstance(explicit, int) else None,
        "reachable": computed.reachable_bytes,
        "used_by_us": charged("used_by_us"),
        "graphs": charged("graphs"),
        "headroom": charged("headroom"),
        "margin": charged("margin"),
        "shortfall": charged("shortfall"),
        "not_mapped": charged("already_mapped"),
        "block": max(1, computed.block_bytes),
        "pinned": pinned if isinstance(pinned, int) else None,
        # A ceiling that is not memory, such as the capacity of the arena, shows only where it was reached.
        "most_blocks": computed.blocks if capped and computed.blocks > 0 else None,
        "block_tokens": block_tokens,
        "longest": longest,
    }


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _share(computed: BudgetComputed, run: RunState) -> float:
    share = run.knob("gpu_memory_utilization")
    if type(share) in (int, float) and 0 < share <= 1:
        return float(share)
    return computed.requested_bytes / max(1, computed.total_bytes)


def graph_choices(computed: BudgetComputed, seq: int, run: RunState) -> list[dict[str, Any]]:
    """
    What may be reserved for graphs instead, largest set first: as it was, all sizes as measured, fewer sizes, none.

    Each has the ``bytes`` to reserve and what the graphs ``need``. Fewer sizes are an estimate: the first graph goes by
    its rows, each other one takes the output that it keeps, and what is no pool stays as it was.

    Args:
        computed: The budget.
        seq: Where it stands.
        run: The fold.
    """
    reserved = -budget.term(computed, "graphs")
    if _is_captured(run, seq):
        return [_choice("captured before sizing, nothing to reserve", reserved, reserved)]
    needed = _needed(run)
    choices = [_choice("as this start reserved", reserved, max(reserved, needed))]
    seen = next((captured([event for _, event in visit.captures]) for visit in _captured(run)), ())
    if not seen or needed <= 0:
        return [*choices, _choice("none: eager", 0, 0)]
    if needed != reserved:
        choices.append(_choice(f"all {len(seen)} sizes, as they took", needed, needed))
    beside = max(0, needed - sum(each.pool for each in seen))
    first = seen[0]
    for at in _cuts(len(seen)):
        kept = seen[at:]
        pool = first.pool * kept[0].size // max(1, first.size) + sum(max(0, each.kept) for each in kept[1:])
        size = min(needed, beside + max(0, pool))
        choices.append(_choice(f"{len(kept)} sizes up to {kept[0].size}, estimated", size, size))
    return [*choices, _choice("none: eager", 0, 0)]


def _needed(run: RunState) -> int:
    """What the graphs took at least, by the measure, by the real capture, or by the one that failed."""
    measured = run.estimates[-1][1].recurring_bytes if run.estimates else 0
    real = [visit for visit in run.visits if visit.state == "capture_graphs"]
    took = [graphs_needed(visit, run) if visit.failed is not None else graphs_actual(visit) or 0 for visit in real[-1:]]
    return max(measured, *took, 0)


def _is_captured(run: RunState, seq: int) -> bool:
    """Whether the graphs that stay were there when the budget was computed: then they are in what is used."""
    torn = max((visit.entered_seq for visit in run.visits_of("teardown") if visit.entered_seq < seq), default=-1)
    return any(torn < visit.entered_seq < seq for visit in run.visits_of("capture_graphs"))


def _captured(run: RunState) -> list[Visit]:
    """Visits that captured, the throwaway capture first: it is what the estimate was made of."""
    visits = [visit for visit in run.visits if visit.captures]
    return sorted(visits, key=lambda visit: (visit.state != "capture_throwaway", -visit.entered_seq))


def _cuts(count: int) -> list[int]:
    """How many of the largest sizes to leave out: a few steps down to a single one."""
    return sorted({round(count * part / 8) for part in range(1, 8)} - {0, count})


def _choice(label: str, size: int, need: int) -> dict[str, Any]:
    return {"label": label, "bytes": size, "need": need}
