"""
Checks: pure functions that judge an edge from what was recorded before it.

    (edge, before, after, run) -> findings

They never look at a live heap: what needs one is a probe, whose raw result they read. So a journal can be judged
again with today's checks. Only what would give wrong results or corrupt memory fails a start by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import attrs

from startup_fsm.checks import held, proofs, sizes
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import Snapshot

Judge = Callable[[Visit, Snapshot | None, Snapshot | None, RunState], list[Finding]]


@attrs.frozen
class Check:
    """
    One contract on an edge.

    Attributes:
        name: Stable; in ``check_judged``.
        states: Where it looks; empty for every state.
        judge: The pure function.
        on_broken: ``fail`` stops the start, ``report`` only says it.
    """

    name: str
    states: frozenset[str]
    judge: Judge
    on_broken: Literal["fail", "report"] = "report"


@attrs.frozen
class Judged:
    """What one check said of one edge."""

    check: Check
    findings: tuple[Finding, ...]


def judge(visit: Visit, run: RunState) -> list[Judged]:
    """All checks that look at this state, in order."""
    return [
        Judged(check, tuple(check.judge(visit, visit.before, visit.after, run)))
        for check in (*CHECKS, *(RANK_CHECKS if run.agreements else ()))
        if not check.states or visit.state in check.states
    ]


def _at(*states: str) -> frozenset[str]:
    return frozenset(states)


#: Ranks must start the same thing, each on a device of its own: judged when the first state begins, and at its end.
ALIKE: Final = Check("ranks_alike", _at(), proofs.ranks_alike, "fail")
#: Checks of a start that has met other ranks, after the others.
RANK_CHECKS: Final[tuple[Check, ...]] = (ALIKE, Check("ranks_even", _at("size_kv"), sizes.ranks_even))

#: Every check of one rank, in the order in which they are run.
CHECKS: Final[tuple[Check, ...]] = (
    Check("enough_free", _at("init_device"), held.enough_free),
    Check("tenants", _at("init_device"), held.tenants),
    Check("weights_once", _at("load_weights"), held.weights_once),
    Check("nothing_unnamed_stays", _at("profile_activations"), held.nothing_unnamed_stays),
    Check("neighbours_still", _at(), held.neighbours_still),
    Check("workspaces_still", _at("capture_throwaway", "capture_graphs"), held.workspaces_still),
    Check("pools_gone", _at("teardown"), proofs.pools_gone, "fail"),
    Check("weights_same", _at("teardown"), proofs.weights_same, "fail"),
    Check("estimate_positive", _at("teardown"), sizes.estimate_positive),
    Check("terms_once", _at("size_kv"), sizes.terms_once),
    Check("mapped_within_reserved", _at("reserve_kv", "commit_kv"), sizes.mapped_within_reserved, "fail"),
    Check("pool_fresh", _at("capture_throwaway", "capture_graphs"), proofs.pool_fresh, "fail"),
    Check("graphs_as_estimated", _at("capture_graphs"), sizes.graphs_as_estimated),
    Check("addresses_live", _at("capture_graphs", "verify"), proofs.addresses_live, "fail"),
    Check("replay_equals_eager", _at("verify"), proofs.replay_equals_eager, "fail"),
    Check("within_request", _at("verify"), sizes.within_request),
)
