"""Checks: each holds on a good start and breaks on a bad one, and what a break does depends on the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from startup_fsm import checks, events
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.checks import CHECKS, Judged, judge
from startup_fsm.devices.base import Settled
from startup_fsm.devices.costs import Costs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.errors import CheckFailed
from startup_fsm.events import BudgetComputed, BudgetTerm, Event, Record
from startup_fsm.findings import CODES
from startup_fsm.fold import RunState, fold
from startup_fsm.memory import GIB, MIB, Snapshot, Tenant
from startup_fsm.plan import observed

TOTAL = 10 * GIB


def shot(used: int = 0, *, others: int = 0, **facts: Any) -> Snapshot:
    """A device of 10 GiB: ``used`` by us, ``others`` by somebody with a name."""
    tenants = (Tenant(label="pid 7", bytes=others),) if others else ()
    facts = {"process_bytes": used, "free_bytes": TOTAL - used - others, **facts}
    return Snapshot(total_bytes=TOTAL, tenants=tenants, **facts)


def budget(**facts: Any) -> BudgetComputed:
    """A sound budget of 1 GiB in blocks of 1 MiB, 100 MiB kept for graphs, 64 MiB margin."""
    terms = (
        BudgetTerm(term="requested", bytes=2 * GIB, source="knob"),
        BudgetTerm(term="used_by_us", bytes=-GIB + 164 * MIB, source="snapshot"),
        BudgetTerm(term="graphs", bytes=-100 * MIB, source="estimate"),
        BudgetTerm(term="margin", bytes=-64 * MIB, source="rule"),
    )
    return BudgetComputed(
        **{
            "terms": terms,
            "available_bytes": GIB,
            "block_bytes": MIB,
            "blocks": 1024,
            "kv_bytes": GIB,
            "requested_bytes": 2 * GIB,
            "total_bytes": TOTAL,
            "reachable_bytes": TOTAL,
            **facts,
        }
    )


class Start:
    """A start told event by event."""

    def __init__(self, **knobs: Any) -> None:
        self.events: list[Event] = [events.RunStarted(plan=observed().as_data(), knobs=knobs)]

    def state(self, name: str, before: Snapshot, after: Snapshot, *inside: Event, left: bool = True) -> Start:
        """One state, entered and (nearly) left."""
        visit = 1 + sum(isinstance(each, events.StateEntered) and each.state == name for each in self.events)
        self.events += [
            events.StateEntered(state=name, visit=visit),
            events.SnapshotTaken(state=name, visit=visit, label="enter", snapshot=before),
            *inside,
            events.SnapshotTaken(state=name, visit=visit, label="leave", snapshot=after),
        ]
        if left:
            self.events.append(events.StateLeft(state=name, visit=visit))
        return self

    def fold(self) -> RunState:
        return fold(
            Record(run="r", process="p", seq=seq, t=seq, kind=event.kind, event=event)
            for seq, event in enumerate(self.events)
        )

    def judged(self, check: str) -> list[tuple[str, str]]:
        """Code and severity of what one check says of the last state."""
        run = self.fold()
        assert run.current is not None
        (judged,) = [each for each in judge(run.current, run) if each.check.name == check]
        for finding in judged.findings:
            assert finding.code in CODES
            assert finding.message
            assert all(0 <= seq <= run.last_seq for seq in finding.evidence)
        return [(each.code, each.severity) for each in judged.findings]


def workspace(name: str, size: int) -> Event:
    return events.ProbeRecorded(probe="workspace", result={"name": name, "bytes": size})


def probe(name: str, **result: Any) -> Event:
    return events.ProbeRecorded(probe=name, result=result)


def opened(pool: str, purpose: str, state: str) -> Event:
    return events.PoolOpened(pool=pool, purpose=purpose, state=state)


def released(pool: str, purpose: str, **facts: Any) -> Event:
    return events.PoolReleased(pool=pool, purpose=purpose, state="teardown", **facts)


def captured(size: int = 1) -> Event:
    return events.GraphCaptured(state="capture_graphs", size=size, pool="0.1")


def torn_down(*inside: Event) -> Start:
    start = Start().state("capture_throwaway", shot(), shot(), opened("0.1", "throwaway_graphs", "capture_throwaway"))
    return start.state("teardown", shot(), shot(), *inside)


HOLDER = {"path": "engine.Layer.view", "kind": "attribute"}
ARENA = {"base": 1, "granule_bytes": MIB}
#: Check, start, what it says.
CASES: list[tuple[str, Callable[[], Start], list[tuple[str, str]]]] = [
    ("enough_free", lambda: Start(gpu_memory_utilization=0.9).state("init_device", shot(), shot(GIB)), []),
    ("enough_free", lambda: Start().state("init_device", shot(), shot(GIB, others=8 * GIB)), []),
    ("enough_free", lambda: Start(gpu_memory_utilization=0.9).state("init_device", shot(), shot(GIB, others=2 * GIB)), [("device.not_enough_free", "warning")]),
    ("enough_free", lambda: Start(requested_bytes=9 * GIB, gpu_memory_utilization=0.1).state("init_device", shot(), shot(others=2 * GIB)), [("device.not_enough_free", "warning")]),
    ("tenants", lambda: Start().state("init_device", shot(), shot(GIB)), []),
    ("tenants", lambda: Start().state("init_device", shot(), shot(others=1)), [("device.neighbour_present", "note")]),
    ("weights_once", lambda: Start().state("load_weights", shot(), shot(allocated_bytes=GIB), events.NoteAdded(note={"checkpoint_bytes": GIB})), []),
    ("weights_once", lambda: Start().state("load_weights", shot(), shot(allocated_bytes=9 * GIB)), []),
    ("weights_once", lambda: Start().state("load_weights", shot(), shot(allocated_bytes=2 * GIB), events.NoteAdded(note={"checkpoint_bytes": GIB})), [("weights.second_copy", "warning")]),
    ("nothing_unnamed_stays", lambda: Start().state("profile_activations", shot(allocated_bytes=GIB), shot(allocated_bytes=GIB + 40 * MIB)), []),
    ("nothing_unnamed_stays", lambda: Start().state("profile_activations", shot(), shot(allocated_bytes=90 * MIB), workspace("cublas", 80 * MIB)), []),
    ("nothing_unnamed_stays", lambda: Start().state("profile_activations", shot(), shot(allocated_bytes=90 * MIB)), [("profile.residue", "warning")]),
    ("neighbours_still", lambda: Start().state("warmup", shot(GIB, others=GIB), shot(2 * GIB, others=GIB + MIB)), []),
    ("neighbours_still", lambda: Start().state("warmup", shot(), shot(others=GIB)), [("device.neighbour_grew", "warning")]),
    ("neighbours_still", lambda: Start().state("warmup", shot(others=GIB), shot()), [("device.neighbour_shrank", "warning")]),
    ("neighbours_still", lambda: Start().state("warmup", shot(), shot(free_bytes=TOTAL - GIB)), [("device.drift", "warning")]),
    ("workspaces_still", lambda: Start().state("warmup", shot(), shot(), workspace("w", 5)).state("capture_graphs", shot(), shot(), workspace("w", 5), workspace("new", 9)), []),
    ("workspaces_still", lambda: Start().state("warmup", shot(), shot(), workspace("w", 5)).state("capture_throwaway", shot(), shot(), workspace("w", 6)), [("workspace.grew", "warning")]),
    ("pools_gone", lambda: torn_down(released("0.1", "throwaway_graphs", use_count=1)), []),
    ("pools_gone", lambda: torn_down(released("0.1", "throwaway_graphs", use_count=2, left_bytes=9)), [("teardown.graphs_alive", "error")]),
    ("pools_gone", lambda: torn_down(released("0.1", "throwaway_graphs", use_count=1, left_bytes=9)), [("teardown.pool_held", "error")]),
    ("pools_gone", lambda: torn_down(opened("0.2", "profiling_kv", "x"), released("0.2", "profiling_kv", use_count=1, left_bytes=9), probe("holders_profiling_kv", holders=[HOLDER])), [("teardown.kv_alive", "error")]),
    ("pools_gone", lambda: torn_down(probe("holders_kv", holders=[HOLDER], left_bytes=9)), [("teardown.kv_alive", "error")]),
    ("pools_gone", lambda: torn_down(released("0.1", "throwaway_graphs", left_bytes=9)).state("teardown", shot(), shot()), []),
    ("weights_same", lambda: Start().state("load_weights", shot(), shot(), probe("weights", digest="a")).state("teardown", shot(), shot(), probe("weights", digest="a")), []),
    ("weights_same", lambda: Start().state("teardown", shot(), shot(), probe("weights", digest="a")), []),
    ("weights_same", lambda: Start().state("load_weights", shot(), shot(), events.ProbeRecorded(probe="weights", skipped="fakes")).state("teardown", shot(), shot(), probe("weights", digest="b")), []),
    ("weights_same", lambda: Start().state("load_weights", shot(), shot(), probe("weights", digest="a")).state("teardown", shot(), shot(), probe("weights", digest="b")), [("teardown.weights_changed", "error")]),
    ("estimate_positive", lambda: Start().state("teardown", shot(), shot(), events.EstimateMade(estimate="graphs", method="release", recurring_bytes=GIB)), []),
    ("estimate_positive", lambda: Start().state("teardown", shot(), shot(), events.EstimateMade(estimate="graphs", method="release", recurring_bytes=-GIB)), [("graphs.estimate_negative", "warning")]),
    ("graphs_as_estimated", lambda: Start().state("size_kv", shot(), shot(), budget()).state("teardown", shot(), shot()).state("capture_graphs", shot(GIB), shot(3 * GIB), captured()), []),
    ("terms_once", lambda: Start().state("size_kv", shot(), shot(), budget()), []),
    ("terms_once", lambda: Start().state("size_kv", shot(), shot(), budget(available_bytes=GIB + 1)), [("budget.counted_twice", "error")]),
    ("terms_once", lambda: Start().state("size_kv", shot(), shot(), budget(terms=(*budget().terms, BudgetTerm(term="margin", bytes=0, source="x")))), [("budget.counted_twice", "error")]),
    ("terms_once", lambda: Start().state("size_kv", shot(), shot(), budget(kv_bytes=3 * GIB)), [("budget.pinned_too_large", "warning")]),
    ("mapped_within_reserved", lambda: Start().state("commit_kv", shot(), shot(), events.ArenaMapped(mapped_bytes=9, reserved_bytes=9, **ARENA)), []),
    ("mapped_within_reserved", lambda: Start().state("commit_kv", shot(), shot()), []),
    ("mapped_within_reserved", lambda: Start().state("reserve_kv", shot(), shot(), events.ArenaMapped(mapped_bytes=10, reserved_bytes=9, **ARENA)), [("kv.unmapped_touch", "error")]),
    ("pool_fresh", lambda: Start().state("capture_graphs", shot(), shot(), opened("0.1", "graphs", "capture_graphs")), []),
    ("pool_fresh", lambda: torn_down(released("0.1", "throwaway_graphs")).state("capture_graphs", shot(), shot(), opened("0.1", "graphs", "capture_graphs")), [("capture.pool_reused", "error")]),
    ("graphs_as_estimated", lambda: Start().state("size_kv", shot(), shot(), budget()).state("capture_graphs", shot(GIB), shot(GIB + 120 * MIB), captured()), []),
    ("graphs_as_estimated", lambda: Start().state("capture_graphs", shot(GIB), shot(3 * GIB), captured()), []),
    ("graphs_as_estimated", lambda: Start().state("size_kv", shot(), shot(), budget()).state("capture_graphs", shot(GIB), shot(2 * GIB), captured()), [("graphs.estimate_short", "warning")]),
    ("graphs_as_estimated", lambda: Start().state("size_kv", shot(), shot(), budget(terms=budget().terms[:2], available_bytes=GIB + 164 * MIB)).state("capture_graphs", shot(GIB), shot(2 * GIB), captured()), [("graphs.not_reserved", "warning")]),
    ("graphs_as_estimated", lambda: Start().state("size_kv", shot(), shot(), budget()).state("capture_graphs", shot(GIB), shot(GIB), captured()), [("graphs.estimate_long", "warning")]),
    ("graphs_as_estimated", lambda: Start().state("teardown", shot(), shot(), events.EstimateMade(estimate="graphs", method="release", recurring_bytes=0)).state("size_kv", shot(), shot(), budget()).state("capture_graphs", shot(GIB), shot(GIB), captured()), [("graphs.estimate_long", "note")]),
    ("addresses_live", lambda: Start().state("allocate_kv", shot(), shot(), probe("kv_addresses", addresses=[1, 2])).state("verify", shot(), shot(), probe("kv_addresses", addresses=[1, 2])), []),
    ("addresses_live", lambda: Start().state("verify", shot(), shot(), probe("kv_addresses", addresses=[1, 2])), []),
    ("addresses_live", lambda: Start().state("reserve_kv", shot(), shot(), probe("kv_addresses", addresses=[1, 2])).state("verify", shot(), shot(), probe("kv_addresses", addresses=[1, 3])), [("kv.addresses_moved", "error")]),
    ("replay_equals_eager", lambda: Start().state("verify", shot(), shot(), probe("replay", equal=True)), []),
    ("replay_equals_eager", lambda: Start().state("verify", shot(), shot()), []),
    ("replay_equals_eager", lambda: Start().state("verify", shot(), shot(), events.ProbeRecorded(probe="replay", result={"equal": False}, skipped="fakes")), []),
    ("replay_equals_eager", lambda: Start().state("verify", shot(), shot(), probe("replay", equal=False, size=4)), [("verify.replay_differs", "error")]),
    ("within_request", lambda: Start().state("size_kv", shot(), shot(), budget()).state("verify", shot(), shot(2 * GIB - 60 * MIB)), []),
    ("within_request", lambda: Start().state("verify", shot(), shot(9 * GIB)), []),
    ("within_request", lambda: Start().state("size_kv", shot(), shot(), budget()).state("verify", shot(), shot(2 * GIB + 1)), [("budget.overrun", "warning")]),
    ("within_request", lambda: Start().state("size_kv", shot(), shot(), budget()).state("verify", shot(), shot(2 * GIB - 80 * MIB)), [("budget.unused", "note")]),
    ("within_request", lambda: Start().state("size_kv", shot(), shot(), budget()).state("verify", shot(), shot(GIB)), [("budget.unused", "warning")]),
    ("within_request", lambda: Start().state("size_kv", shot(), shot(), budget(kv_bytes=GIB // 2)).state("verify", shot(), shot(GIB)), []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "start", "expected"), CASES, ids=[f"{case[0]}-{at}" for at, case in enumerate(CASES)]
)
def test_each_check_says_what_it_should(
    check: str, start: Callable[[], Start], expected: list[tuple[str, str]]
) -> None:
    """Held on a good start, broken on a bad one, silent where nothing was measured."""
    assert start().judged(check) == expected


def test_every_check_is_tried_both_ways() -> None:
    """No check stands in the list above with only one of its sides."""
    for check in CHECKS:
        outcomes = {bool(expected) for name, _, expected in CASES if name == check.name}
        assert outcomes == {True, False}, check.name


def test_a_held_pool_names_its_holder() -> None:
    """Path and kind of what the probe found are in the message."""
    start = torn_down(
        opened("0.2", "profiling_kv", "x"),
        released("0.2", "profiling_kv", use_count=1, left_bytes=9),
        probe("holders_profiling_kv", holders=[HOLDER]),
    )
    run = start.fold()
    assert run.current is not None
    (finding,) = [finding for judged in judge(run.current, run) for finding in judged.findings]
    assert "engine.Layer.view (attribute)" in finding.message


def test_only_wrong_results_fail_a_start_by_themselves() -> None:
    """The list of checks that stop a start in the default mode."""
    assert {check.name for check in CHECKS if check.on_broken == "fail"} == {
        "pools_gone", "weights_same", "mapped_within_reserved", "pool_fresh", "addresses_live", "replay_equals_eager",
    }  # fmt: skip


class _QuickDevice(SimulatedDevice):
    def settle(self, *, clear_workspaces: bool = False) -> Settled:
        return Settled(polls=1, late_return_bytes=0, duration_ns=0, workspaces_cleared=clear_workspaces)


def start_with(mode: Any, body: Callable[[Bootstrap, Any], None], state: str = "verify") -> Bootstrap:
    """One state of a free plan with that body."""
    device = _QuickDevice(GIB, costs=Costs.none())
    boot = Bootstrap(plan=observed(), journal=None, device=device, discover=False, progress=False, mode=mode)
    with boot.state(state) as step:
        body(boot, step)
    return boot


def differs(_: Bootstrap, step: Any) -> None:
    step.probe("replay", {"equal": False})


def copies(boot: Bootstrap, step: Any) -> None:
    step.note(checkpoint_bytes=1)
    boot.device.malloc(256 * MIB)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mode", "state", "body", "fails"),
    [
        ("default", "verify", differs, True),
        ("observe", "verify", differs, False),
        ("strict", "verify", differs, True),
        ("default", "load_weights", copies, False),
        ("observe", "load_weights", copies, False),
        ("strict", "load_weights", copies, True),
    ],
)
def test_modes_decide_what_a_broken_contract_does(
    mode: str, state: str, body: Callable[[Bootstrap, Any], None], fails: bool
) -> None:
    """Errors of hard checks fail by default, warnings in ``strict`` only, nothing in ``observe``."""
    if not fails:
        boot = start_with(mode, body, state)
        (judged,) = [judged for _, judged in boot.history.checks if judged.findings]
        assert not judged.failed
        return
    with pytest.raises(CheckFailed) as caught:
        start_with(mode, body, state)
    assert caught.value.findings[0].state == state
    assert caught.value.findings[0].code in str(caught.value)


def test_notes_never_fail_a_start() -> None:
    """Even ``strict`` lets notes pass."""

    def neighbour(boot: Bootstrap, step: Any) -> None:
        assert step.state == "init_device"

    device = _QuickDevice(GIB, costs=Costs.none(), neighbours={"pid 7": MIB})
    boot = Bootstrap(plan=observed(), journal=None, device=device, discover=False, progress=False, mode="strict")
    with boot.state("init_device") as step:
        neighbour(boot, step)
    codes = [finding.code for _, judged in boot.history.checks for finding in judged.findings]
    assert "device.neighbour_present" in codes


def test_a_failed_check_is_a_failed_state_with_its_category() -> None:
    """The journal says that a contract failed it, after what the check said."""
    device = _QuickDevice(GIB, costs=Costs.none())
    boot = Bootstrap(plan=observed(), journal=None, device=device, discover=False, progress=False)
    with pytest.raises(CheckFailed), boot.state("verify") as step:
        step.probe("replay", {"equal": False})
    visit = boot.history.current
    assert visit is not None
    assert visit.failed is not None
    assert visit.failed.category == "check"
    assert any(judged.failed for _, judged in boot.history.checks)


def test_judging_is_pure() -> None:
    """Judged twice, an edge says the same, and the history is as it was."""
    run = CASES[-1][1]().fold()
    assert run.current is not None
    before = repr(run)
    first: list[Judged] = judge(run.current, run)
    assert first == judge(run.current, run)
    assert repr(run) == before
    assert checks.CHECKS is CHECKS
