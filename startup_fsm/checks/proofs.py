"""Checks that rest on proofs: pools gone, weights the same, addresses live, replay equal."""

from __future__ import annotations

from startup_fsm import ranks
from startup_fsm.checks.readings import (
    GRAPH_POOLS,
    graph_pools_of_engine,
    holders_of,
    reserved_in,
    sequence_numbers,
    shown_holders,
)
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import Snapshot, format_bytes


def pools_gone(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """Released pools hold nothing any more; otherwise the holder is named."""
    found: list[Finding] = []
    for life in run.pools:
        released = life.released
        if released is None or life.released_seq is None or life.released_seq < visit.entered_seq:
            continue
        if released.state != visit.state or (not released.left_bytes and (released.use_count or 0) <= 1):
            continue
        seq, holders = holders_of(visit, released.purpose)
        is_graph = released.purpose in GRAPH_POOLS
        alive = is_graph and (released.use_count or 0) > 1
        code = "teardown.graphs_alive" if alive else "teardown.pool_held" if is_graph else "teardown.kv_alive"
        found.append(
            Finding(
                code=code,
                severity="error",
                state=visit.state,
                message=f"{released.purpose} still holds {format_bytes(released.left_bytes)} after teardown,"
                f" held by: {shown_holders(holders)}",
                observed=released.left_bytes,
                expected=0,
                tolerance=0,
                scope="allocator",
                bytes=released.left_bytes,
                evidence=(life.released_seq, *((seq,) if seq is not None else ())),
            )
        )
    found += _engine_pools_alive(visit, after, run)
    if "holders_kv" in visit.probes and not found:
        seq, probe = visit.probes["holders_kv"]
        _, holders = holders_of(visit, "kv")
        found.append(
            Finding(
                code="teardown.kv_alive",
                severity="error",
                state=visit.state,
                message=f"the KV arena is still in use after teardown, held by: {shown_holders(holders)}",
                observed=probe.result.get("left_bytes"),
                expected=0,
                evidence=(seq,),
            )
        )
    return found


def _engine_pools_alive(visit: Visit, after: Snapshot | None, run: RunState) -> list[Finding]:
    """What pools of the engine's own still hold: an error only where a graph is alive, which could be replayed."""
    found: list[Finding] = []
    if after is None:
        return found
    for name, had in sorted(graph_pools_of_engine(run).items()):
        left = reserved_in(after, name) - had
        if left <= 0:
            continue
        seq, holders = holders_of(visit, name)
        probe = visit.probes.get(f"holders_{name}")
        has_graphs = probe is not None and probe[1].result.get("has_graphs") is True
        what = "a graph of it is alive" if has_graphs else "no graph of it is alive"
        found.append(
            Finding(
                code="teardown.graphs_alive" if has_graphs else "teardown.pool_held",
                severity="error" if has_graphs else "warning",
                state=visit.state,
                message=f"the engine's own pool {name}, which grew with its graphs, still holds {format_bytes(left)}"
                f" after teardown; {what}; held by: {shown_holders(holders)}",
                observed=left,
                expected=0,
                tolerance=0,
                scope="allocator",
                bytes=left,
                evidence=(*sequence_numbers(visit, "leave"), *((seq,) if seq is not None else ())),
            )
        )
    return found


def weights_same(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """The weights are the same bytes as after loading."""
    now, was = visit.probes.get("weights"), None
    for other in run.visits:
        if other is not visit and "weights" in other.probes:
            was = other.probes["weights"]
            break
    if now is None or was is None or now[1].skipped or was[1].skipped:
        return []
    if now[1].result.get("digest") == was[1].result.get("digest"):
        return []
    return [
        Finding(
            code="teardown.weights_changed",
            severity="error",
            state=visit.state,
            message="the weights are not the same bytes as after loading",
            observed=now[1].result.get("digest"),
            expected=was[1].result.get("digest"),
            evidence=(was[0], now[0]),
        )
    ]


def pool_fresh(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """No pool is opened that a dropped graph used."""
    found: list[Finding] = []
    for life in run.pools:
        if life.opened_seq < visit.entered_seq:
            continue
        earlier = [one for one in run.pools if one.pool == life.pool and one.opened_seq < life.opened_seq]
        if earlier:
            found.append(
                Finding(
                    code="capture.pool_reused",
                    severity="error",
                    state=visit.state,
                    message=f"pool {life.pool} was opened in {earlier[0].state} and again in {visit.state}",
                    observed=life.pool,
                    expected="a pool that no dropped graph used",
                    evidence=(earlier[0].opened_seq, life.opened_seq),
                )
            )
    return found


def addresses_live(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """The KV cache lies where it lay when it was made."""
    now = visit.probes.get("kv_addresses")
    allocated = [each for each in run.visits if each.state in ("allocate_kv", "reserve_kv") and each is not visit]
    was = next((each.probes["kv_addresses"] for each in reversed(allocated) if "kv_addresses" in each.probes), None)
    if now is None or was is None or now[1].result.get("addresses") == was[1].result.get("addresses"):
        return []
    return [
        Finding(
            code="kv.addresses_moved",
            severity="error",
            state=visit.state,
            message="the KV cache does not lie where it lay when the graphs were captured",
            observed=now[1].result.get("addresses"),
            expected=was[1].result.get("addresses"),
            evidence=(was[0], now[0]),
        )
    ]


def replay_equals_eager(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """A replayed step equals the eager step."""
    if "replay" not in visit.probes:
        return []
    seq, probe = visit.probes["replay"]
    if probe.skipped or probe.result.get("equal", True):
        return []
    return [
        Finding(
            code="verify.replay_differs",
            severity="error",
            state=visit.state,
            message="a replayed step does not equal the eager step",
            observed=dict(probe.result),
            evidence=(seq,),
        )
    ]


def ranks_alike(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """All ranks start the same thing, each on a device of its own."""
    return ranks.judged_alike(run) if run.visits and visit is run.visits[0] else []
