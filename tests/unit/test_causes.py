"""Causes: which invariant was violated first, from what was recorded and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from startup_fsm import events
from startup_fsm.causes import budget_before, causes, graphs_needed, last_oom, was_answered
from startup_fsm.events import BudgetComputed, BudgetTerm, Event, Record, RecoveryChosen
from startup_fsm.findings import CODES, Finding
from startup_fsm.fold import RunState, fold
from startup_fsm.memory import GIB, MIB, Snapshot, Tenant

TOTAL = 10 * GIB


def shot(used: int = 0, others: int = 0) -> Snapshot:
    """A device of 10 GiB: ``used`` by us, ``others`` by pid 7."""
    tenants = (Tenant(label="pid 6", bytes=MIB), Tenant(label="pid 7", bytes=others)) if others else ()
    free = TOTAL - used - sum(tenant.bytes or 0 for tenant in tenants)
    return Snapshot(total_bytes=TOTAL, free_bytes=free, process_bytes=used, tenants=tenants)


def budget(graphs: int = 0, **facts: Any) -> BudgetComputed:
    terms = (BudgetTerm(term="graphs", bytes=-graphs, source="x"),)
    sized = {"available_bytes": GIB, "block_bytes": MIB, "blocks": 1024, "kv_bytes": GIB, "requested_bytes": 2 * GIB}
    return BudgetComputed(**{"terms": terms, "total_bytes": TOTAL, "reachable_bytes": TOTAL, **sized, **facts})


def oom(tried: int | None = 64 * MIB, free: int | None = MIB) -> Event:
    return events.OomObserved(tried_bytes=tried, free_bytes=free)


def failing(state: str, *inside: Event, category: str = "oom", before: Snapshot | None = None, after: Snapshot | None = None, earlier: tuple[Event, ...] = (), message: str = "m") -> RunState:  # fmt: skip
    """A run that dies in that state."""
    sequence = [
        events.RunStarted(),
        *earlier,
        events.StateEntered(state=state),
        events.SnapshotTaken(state=state, label="enter", snapshot=before or shot()),
        *inside,
        events.SnapshotTaken(state=state, label="fail", snapshot=after or shot()),
        events.StateFailed(state=state, error_type="a.b.Error", category=category, message=message),
    ]
    return fold(
        Record(run="r", process="p", seq=seq, t=seq, kind=event.kind, event=event) for seq, event in enumerate(sequence)
    )


def sized(computed: BudgetComputed, snapshot: Snapshot | None = None) -> tuple[Event, ...]:
    """A ``size_kv`` that went well."""
    return (
        events.StateEntered(state="size_kv"),
        events.SnapshotTaken(state="size_kv", label="sizing", snapshot=snapshot or shot()),
        computed,
        events.StateLeft(state="size_kv"),
    )


def cause(run: RunState) -> Finding:
    """The one cause of the last failure, with evidence that exists."""
    assert run.current is not None
    (found,) = causes(run.current, run)
    assert found.code in CODES
    assert found.severity == "error"
    assert found.evidence
    assert all(0 <= seq <= run.last_seq for seq in found.evidence)
    assert list(found.evidence) == sorted(found.evidence)
    return found


PROFILED = (
    events.StateEntered(state="profile_activations"),
    events.PartEntered(state="profile_activations", part="sampler"),
    events.SnapshotTaken(state="profile_activations", label="peak", snapshot=shot()),
    events.StateLeft(state="profile_activations"),
)
SAMPLER = events.PartEntered(state="verify", part="sampler_warmup")


@pytest.mark.parametrize(
    ("run", "code", "state"),
    [
        (failing("init_device", oom()), "device.out_of_memory", "init_device"),
        (failing("serving", oom()), "device.out_of_memory", "serving"),
        (failing("load_weights", oom()), "device.out_of_memory", "load_weights"),
        (failing("load_weights", events.NoteAdded(note={"checkpoint_bytes": 11 * GIB})), "weights.exceed_device", "load_weights"),
        (failing("load_weights", events.NoteAdded(note={"checkpoint_bytes": 9 * GIB}), before=shot(2 * GIB)), "weights.exceed_device", "load_weights"),
        (failing("load_weights", events.NoteAdded(note={"checkpoint_bytes": 9 * GIB}), before=shot(0, 2 * GIB)), "device.not_enough_free", "load_weights"),
        (failing("load_weights", events.NoteAdded(note={"checkpoint_bytes": GIB}), oom()), "device.out_of_memory", "load_weights"),
        (failing("profile_activations", oom()), "profile.out_of_memory", "profile_activations"),
        (failing("bootstrap_kv", oom()), "kv.out_of_memory", "bootstrap_kv"),
        (failing("capture_throwaway", oom()), "capture.out_of_memory", "capture_throwaway"),
        (failing("allocate_kv", oom(), earlier=sized(budget())), "kv.out_of_memory", "allocate_kv"),
        (failing("commit_kv", oom()), "kv.out_of_memory", "commit_kv"),
        (failing("allocate_kv", oom(), earlier=sized(budget()), after=shot(0, GIB)), "device.neighbour_grew", "allocate_kv"),
        (failing("allocate_kv", oom(3 * GIB), earlier=sized(budget()), after=shot(0, GIB)), "kv.out_of_memory", "allocate_kv"),
        (failing("profile_activations", oom(), after=shot(0, GIB)), "profile.out_of_memory", "profile_activations"),
        (failing("capture_graphs", oom()), "capture.out_of_memory", "capture_graphs"),
        (failing("capture_graphs", oom(), earlier=sized(budget())), "graphs.not_reserved", "size_kv"),
        (failing("capture_graphs", oom(), earlier=sized(budget(MIB))), "graphs.estimate_short", "size_kv"),
        (failing("capture_graphs", oom(), earlier=sized(budget(GIB))), "capture.out_of_memory", "capture_graphs"),
        (failing("capture_graphs", oom(), earlier=sized(budget(GIB)), before=shot(), after=shot(GIB)), "graphs.estimate_short", "size_kv"),
        (failing("verify", oom()), "verify.out_of_memory", "verify"),
        (failing("verify", SAMPLER, oom(), earlier=PROFILED), "verify.out_of_memory", "verify"),
        (failing("verify", SAMPLER, oom()), "profile.incomplete", "verify"),
        (failing("verify", SAMPLER, oom(), earlier=(PROFILED[0], *PROFILED[2:])), "profile.incomplete", "profile_activations"),
        (failing("size_kv", category="budget"), "budget.negative", "size_kv"),
        (failing("size_kv", budget(blocks=0, kv_bytes=0, missing_bytes=5), category="budget"), "budget.negative", "size_kv"),
        (failing("size_kv", budget(needed_bytes=2 * GIB, missing_bytes=GIB), category="budget"), "budget.request_does_not_fit", "size_kv"),
        (failing("capture_throwaway", category="capture"), "capture.failed", "capture_throwaway"),
        (failing("capture_graphs", category="pool"), "capture.pool_reused", "capture_graphs"),
        (failing("load_weights", category="host_oom"), "host.out_of_memory", "load_weights"),
        (failing("load_weights", category="signal"), "run.ended_by_signal", "load_weights"),
        (failing("load_weights", category="hook"), "state.raised", "load_weights"),
        (failing("load_weights", category="raised"), "state.raised", "load_weights"),
        (failing("load_weights", category="a later word"), "state.raised", "load_weights"),
        (failing("size_kv", category="peer"), "ranks.peer_failed", "size_kv"),
        (failing("recover_allocator", category="restart"), "teardown.pool_held", "recover_allocator"),
        (failing("autotune", oom()), "device.out_of_memory", "autotune"),
    ],
)  # fmt: skip
def test_each_failure_has_its_cause(run: RunState, code: str, state: str) -> None:
    """The code, and the state in which the invariant was violated first."""
    found = cause(run)
    assert (found.code, found.state) == (code, state)


def test_a_check_speaks_for_itself() -> None:
    """What a check said is not said again; a visit that did not fail has no cause."""
    run = failing("teardown", category="check")
    assert run.current is not None
    assert causes(run.current, run) == []
    run = fold([Record(run="r", process="p", seq=0, kind="state_entered", event=events.StateEntered(state="x"))])
    assert run.current is not None
    assert causes(run.current, run) == []


def test_the_neighbour_that_grew_most_is_named() -> None:
    """Of several the one that took the most."""
    assert (
        "pid 7 took 1.00 GiB"
        in cause(failing("allocate_kv", oom(), earlier=sized(budget()), after=shot(0, GIB))).message
    )


def test_the_first_line_of_the_error_is_told() -> None:
    """Type and first line, and nothing where there is no message."""
    found = cause(failing("load_weights", category="raised", message="no such file\nsecond line"))
    assert found.message.endswith("Error: no such file")
    assert found.reason == "Error"
    assert cause(failing("load_weights", category="raised", message="")).message.endswith("in load_weights: Error")


def test_an_error_without_figures_has_none() -> None:
    """A driver's out-of-memory says no bytes; none are made up."""
    found = cause(failing("allocate_kv", oom(None, None)))
    assert found.observed is None
    assert found.bytes == 0
    assert "asked for" not in found.message


def test_readings_are_those_of_the_visit() -> None:
    """An earlier failure's error and a later budget do not belong to a visit."""
    earlier = (
        events.StateEntered(state="capture_graphs"),
        oom(7),
        events.StateFailed(state="capture_graphs", error_type="E", category="oom", message=""),
        *sized(budget(5)),
    )
    run = failing("capture_graphs", oom(9), earlier=earlier)
    first, last = run.visits[0], run.visits[-1]
    errors = [last_oom(visit, run) for visit in (first, last)]
    assert [None if each is None else each.tried_bytes for each in errors] == [7, 9]
    assert budget_before(first, run) is None
    assert budget_before(last, run) is not None
    assert graphs_needed(first, run) == 7


def test_graphs_need_at_least_what_was_measured() -> None:
    """The estimate, or how far the capture came and what it asked for next."""
    measured = events.EstimateMade(estimate="graphs", method="release", recurring_bytes=3 * GIB)
    run = failing("capture_graphs", oom(), earlier=(measured,), before=shot(), after=shot(GIB))
    assert run.current is not None
    assert graphs_needed(run.current, run) == 3 * GIB
    run = failing("capture_graphs", oom(), before=shot(), after=shot(GIB))
    assert run.current is not None
    assert graphs_needed(run.current, run) == GIB + 64 * MIB


def test_a_failure_whose_answer_was_chosen_is_not_what_the_start_ended_of() -> None:
    """It died on the way there, of something else; without a choice, or with that to fail, it ended of this."""
    run = failing("capture_throwaway", category="capture")
    (visit,) = (each for each in run.visits if each.failed is not None)
    assert not was_answered(visit, run)

    def chosen(target: str) -> tuple[int, RecoveryChosen]:
        event = RecoveryChosen(state="capture_throwaway", edge="recover", target=target, reason="", taken=1, inputs={})
        return run.last_seq + 1, event

    run.recoveries = [chosen("failed")]
    assert not was_answered(visit, run)
    run.recoveries = [chosen("recover_allocator")]
    assert was_answered(visit, run)
