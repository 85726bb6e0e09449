"""Readings that several judgements share: figures of a visit or a run, from what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from startup_fsm import budget
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import Snapshot

#: What pools of ours for graphs are opened for.
GRAPH_POOLS: Final = ("throwaway_graphs", "graphs")


def utilization(run: RunState) -> float | None:
    """The share of the device that was asked for; None where the knob is not set, or is no share."""
    share = run.knob("gpu_memory_utilization")
    return share if type(share) in (int, float) and 0 < share <= 1 else None


def requested_bytes(run: RunState, total: int) -> int | None:
    """What the knobs ask for on a device of ``total`` bytes; None where they do not say."""
    explicit = run.knob("requested_bytes")
    if isinstance(explicit, int):
        return explicit
    share = utilization(run)
    return None if share is None else int(total * share)


def graphs_actual(visit: Visit) -> int | None:
    """Bytes of this process that the real capture took; None where it was not measured."""
    settled = visit.snapshots.get("F3") or visit.snapshots.get("leave")
    if visit.before is None or settled is None:
        return None
    if not visit.captures and not pools_of_graphs_grew(visit.before, settled[1]):
        return None
    return settled[1].own_bytes - visit.before.own_bytes


def graph_pools_of_engine(run: RunState) -> dict[str, int]:
    """
    Pools that are not ours and grew while graphs were captured: the engine captured into them by itself.

    With the least bytes that each had when such a state was entered: it must come back to them.
    """
    found: dict[str, int] = {}
    for visit in run.visits:
        if visit.state in ("capture_throwaway", "capture_graphs") and visit.before and visit.after:
            for name in grown_pools(visit.before, visit.after):
                had = reserved_in(visit.before, name)
                found[name] = min(had, found.get(name, had))
    return found


def grown_pools(before: Snapshot, after: Snapshot) -> list[str]:
    """Pools that are not ours and hold more than before."""
    return [name for name in sorted(after.foreign_pools) if reserved_in(after, name) > reserved_in(before, name)]


def pools_of_graphs_grew(before: Snapshot, after: Snapshot) -> bool:
    """Whether something was captured in between: into a pool of ours for graphs, or by the engine into its own."""
    ours = [pool for pool in after.pools if pool.purpose in GRAPH_POOLS]
    grew = any(pool.reserved_bytes > reserved_in(before, pool.pool) for pool in ours)
    return grew or bool(grown_pools(before, after))


def reserved_in(snapshot: Snapshot, pool: str) -> int:
    """Bytes that a pool holds; 0 where the snapshot does not have it."""
    usage = snapshot.pool(pool)
    return 0 if usage is None else usage.reserved_bytes


def graphs_reserved(visit: Visit, run: RunState) -> tuple[int, int] | None:
    """
    Seq and bytes of what the budget before a capture took off for its graphs.

    None where sizing comes after it, or where the engine keeps room for them by itself.
    """
    torn = [each.entered_seq for each in run.visits_of("teardown") if each.entered_seq < visit.entered_seq]
    since = torn[-1] if torn else 0
    for seq, computed in reversed(run.budgets):
        if since < seq < visit.entered_seq:
            if budget.source_of(computed, "graphs") == budget.NOT_APART:
                return None
            return seq, -budget.term(computed, "graphs")
    return None


def used_peak(visit: Visit) -> int | None:
    """Outside torch + arena + reserved peak over this visit."""
    after = visit.snapshots.get("leave")
    if after is None:
        return None
    reserved = max(after[1].reserved_peak_bytes, after[1].reserved_bytes)
    return after[1].outside_bytes + after[1].arena_mapped_bytes + reserved


def workspaces_in(visit: Visit) -> dict[str, int]:
    """Named workspaces that were recorded in this visit, by name; the last size wins."""
    sizes = ((str(probe.result.get("name")), probe.result.get("bytes")) for _, probe in visit.workspaces)
    return {name: size for name, size in sizes if isinstance(size, int)}


def workspace_before(run: RunState, visit: Visit, name: str) -> int | None:
    """The size that a workspace had before this visit; None where nobody named it."""
    sizes = [workspaces_in(each).get(name) for each in run.visits if each.entered_seq < visit.entered_seq]
    return next((size for size in reversed(sizes) if size is not None), None)


def holders_of(visit: Visit, purpose: str) -> tuple[int | None, list[dict[str, Any]]]:
    """Seq and holders that a probe named for a pool; None and nothing where it did not run."""
    if (probe := visit.probes.get(f"holders_{purpose}")) is None:
        return None, []
    holders = probe[1].result.get("holders")
    named = holders if isinstance(holders, (list, tuple)) else ()
    return probe[0], [dict(each) for each in named if isinstance(each, Mapping)]


def shown_holders(holders: Sequence[Mapping[str, Any]]) -> str:
    """Holders in words; one that holds several is named once."""
    counts = Counter(f"{each.get('path')} ({each.get('kind')})" for each in holders)
    named = [name if count == 1 else f"{name} x{count}" for name, count in counts.items()]
    return "; ".join(named) or "no Python owner found"


def sequence_numbers(visit: Visit, *labels: str) -> tuple[int, ...]:
    """Where the snapshots of these labels stand; labels without one are left out."""
    return tuple(visit.snapshots[label][0] for label in labels if label in visit.snapshots)
