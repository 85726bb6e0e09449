"""The recovery ladder: every rung, in its order, bounded, in the journal, and what a new process takes over."""

from __future__ import annotations

import gc
import os

import pytest

from startup_fsm.budget import Knobs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import RestartRequired
from startup_fsm.events import RecoveryChosen
from startup_fsm.fold import RunState
from startup_fsm.identity import Continued, export_continued
from startup_fsm.ladder import Lessons
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import single_capture, throwaway
from startup_fsm.testing import counting_start, verdict_of

PLANS = {"throwaway": throwaway, "single_capture": single_capture}


@pytest.fixture(autouse=True)
def small_heap():
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


class Stubborn(CountingEngine):
    """Runs out in one state: so many times, or whenever it captures more rows than it may."""

    fails_in = "capture_graphs"
    times = 0
    most_rows = 1 << 30

    def capture(self, step, size):
        if step.state == self.fails_in and size > self.most_rows:
            self._run_out(step)
        self._maybe(step)
        super().capture(step, size)

    def allocate_kv(self, step, blocks):
        self._maybe(step)
        super().allocate_kv(step, blocks)

    def commit_kv(self, step, blocks):
        self._maybe(step)

    def verify(self, step):
        self._maybe(step)
        super().verify(step)

    def _maybe(self, step):
        if step.state == self.fails_in and self.times:
            self.times -= 1
            self._run_out(step)

    def _run_out(self, step):
        if step.state.startswith("capture"):
            step.capture(1, lambda: self.device.malloc(self.device.memory.free_bytes + MIB))
        self.device.malloc(self.device.memory.free_bytes + MIB)


def climbed(plan="throwaway", *, knobs=None, total=4 * GIB, **engine):
    """A start with an engine that runs out, what it raised, and the edges that it took."""
    device = SimulatedDevice(total)
    given = {"retries": 0, **(knobs or {})}
    made = PLANS[plan](**{name: given[name] for name in ("retries", "allow_eager", "fewer_sizes") if name in given})
    boot, _ = counting_start(device=device, knobs=Knobs(**given), plan=made)
    stubborn = Stubborn(device=device)
    for name, value in engine.items():
        setattr(stubborn, name, value)
    try:
        boot.run(stubborn)
        error = None
    except Exception as raised:  # noqa: BLE001 - any of them is what the test is about
        error = raised
    assert boot.history.violations == []
    return boot, error, [(chosen.state, chosen.edge) for _, chosen in boot.history.recoveries]


def sizes_captured(boot):
    """Sizes of the graphs that stayed."""
    last = boot.history.last("capture_graphs")
    return [] if last is None or last.left is None else [event.size for _, event in last.captures]


class TestRungs:
    """One rung alone, each switched on by its own knob."""

    @pytest.mark.parametrize(
        ("plan", "state", "edge"),
        [
            ("throwaway", "capture_graphs", "recover"),
            ("throwaway", "allocate_kv", "shrink"),
            ("throwaway", "verify", "shrink"),
            ("single_capture", "commit_kv", "shrink"),
            ("single_capture", "verify", "shrink"),
        ],
    )
    def test_a_smaller_kv_cache(self, plan, state, edge):
        """With retries the start goes back and sizes a smaller KV cache; every graph is there."""
        boot, error, edges = climbed(plan, knobs={"retries": 1}, fails_in=state, times=1)

        assert (error, edges) == (None, [(state, edge)])
        first, second = [computed.blocks for _, computed in boot.history.budgets]
        assert second < first
        assert sizes_captured(boot) == [16, 8, 4, 2, 1]

    @pytest.mark.parametrize(
        ("plan", "state"),
        [
            ("throwaway", "capture_throwaway"),
            ("throwaway", "capture_graphs"),
            ("throwaway", "verify"),
            ("single_capture", "capture_graphs"),
            ("single_capture", "verify"),
        ],
    )
    def test_fewer_sizes(self, plan, state):
        """With fewer_sizes the larger half is dropped, the rest is measured again, and the start is ready."""
        boot, error, edges = climbed(plan, knobs={"fewer_sizes": 1}, fails_in=state, times=1)

        assert (error, edges) == (None, [(state, "fewer_sizes")])
        assert sizes_captured(boot) == [2, 1]
        assert boot.history.recoveries[0][1].inputs["capture_sizes"] == [2, 1]
        if plan == "throwaway":
            assert boot.history.estimates[-1][1].of == 2
            assert "measure_again" in [visit.edge for visit in boot.history.visits]

    @pytest.mark.parametrize(
        ("plan", "state", "edge"),
        [
            ("throwaway", "capture_throwaway", "recover"),
            ("throwaway", "capture_graphs", "no_graphs"),
            ("throwaway", "verify", "no_graphs"),
            ("single_capture", "capture_graphs", "recover"),
            ("single_capture", "verify", "no_graphs"),
        ],
    )
    def test_no_graphs(self, plan, state, edge):
        """With allow_eager the start becomes ready without graphs, and says so."""
        boot, error, edges = climbed(plan, knobs={"allow_eager": True}, fails_in=state, times=1)

        assert (error, edges) == (None, [(state, edge)])
        assert boot.history.last("verify").edge in ("without_graphs", "advance")
        assert boot.history.recoveries[0][1].inputs["without_graphs"] is True
        assert "without_graphs" in [decision.decision for _, decision in boot.history.decisions]
        assert -next(t.bytes for t in boot.history.budgets[-1][1].terms if t.term == "graphs") == 0
        assert boot.device.snapshot().pool("graphs") is None

    @pytest.mark.parametrize("plan", PLANS)
    @pytest.mark.parametrize("state", ["capture_graphs", "verify"])
    def test_none_is_taken_unasked(self, plan, state):
        """Without knobs the start fails of what ran out."""
        _, error, edges = climbed(plan, fails_in=state, times=1)

        assert error is not None
        assert edges == []


class Spiking(CountingEngine):
    """Takes something in each first step that nobody was told of, of a size that fits no segment exactly."""

    spike = 401 * MIB + 700

    def verify(self, step):
        super().verify(step)
        self.device.malloc(self.spike)


def test_a_shortfall_covers_the_rounding_of_what_was_asked_for():
    """A step that needs the same again has it the second time, segments and pages included."""
    device = SimulatedDevice(4 * GIB)
    boot, _ = counting_start(
        device=device, knobs=Knobs(utilization=1.0, retries=1), plan=throwaway(retries=1), progress=False
    )
    boot.run(Spiking(device=device))

    assert [chosen.edge for _, chosen in boot.history.recoveries] == ["shrink"]
    assert verdict_of(boot).outcome == "ready"


class TestOrder:
    """Least loss first, and each no more often than it may."""

    def test_all_rungs_in_their_order(self):
        """A capture that never fits climbs the whole ladder and ends without graphs."""
        knobs = {"retries": 2, "fewer_sizes": 2, "allow_eager": True}
        boot, error, edges = climbed(knobs=knobs, most_rows=0)

        assert error is None
        taken = [edge for _, edge in edges]
        assert taken == sorted(taken, key=["recover", "fewer_sizes", "no_graphs"].index)
        assert taken[-3:] == ["fewer_sizes", "fewer_sizes", "no_graphs"]
        assert [chosen.taken for _, chosen in boot.history.recoveries if chosen.edge == "fewer_sizes"] == [1, 2]
        assert verdict_of(boot).outcome == "ready"

    def test_a_bound_is_a_bound(self):
        """When every rung is used up the start fails of what ran out last."""
        boot, error, edges = climbed(knobs={"fewer_sizes": 1}, most_rows=0)

        assert error is not None
        assert edges == [("capture_graphs", "fewer_sizes")]
        assert verdict_of(boot).failed_state == "capture_graphs"

    def test_the_sizes_that_fit_are_kept(self):
        """Sizes are dropped until those that are left fit."""
        boot, error, edges = climbed(knobs={"fewer_sizes": 5}, most_rows=1)

        assert error is None
        assert [edge for _, edge in edges] == ["fewer_sizes", "fewer_sizes"]
        assert sizes_captured(boot) == [1]

    def test_one_size_is_not_halved(self):
        """Of one size nothing can be dropped: the next rung is taken."""
        knobs = {"fewer_sizes": 5, "allow_eager": True}
        _, error, edges = climbed(knobs=knobs, most_rows=0, sizes=(4,))

        assert (error, edges) == (None, [("capture_graphs", "no_graphs")])

    def test_a_rung_that_the_numbers_refuse_is_passed_over(self):
        """Where no smaller KV cache would do, that is said, and fewer sizes are captured."""
        knobs = {"retries": 1, "fewer_sizes": 1}
        boot, error, edges = climbed(knobs=knobs, times=1, tokens=34_400)

        assert (error, edges) == (None, [("capture_graphs", "fewer_sizes")])
        assert "no_retry" in [decision.decision for _, decision in boot.history.decisions]


class TestLessons:
    """What a new process goes on with."""

    def test_they_come_from_the_recoveries(self):
        """The last word on sizes and bytes, and whether graphs were ever given up."""
        history = RunState()
        chosen = [
            {"learned_graph_bytes": 7, "shortfall_bytes": 0},
            {"learned_graph_bytes": 0, "shortfall_bytes": 5, "capture_sizes": [2, 1]},
            {"learned_graph_bytes": "many", "shortfall_bytes": 9, "without_graphs": True, "capture_sizes": "none"},
        ]
        history.recoveries = [
            (seq, RecoveryChosen(state="verify", edge="e", target="t", reason="", taken=1, inputs=inputs))
            for seq, inputs in enumerate(chosen)
        ]

        assert Lessons.of(history) == Lessons(sizes=(2, 1), without_graphs=True, learned_graphs=0, shortfall=9)
        assert Lessons.of(RunState()) == Lessons()

    @pytest.mark.parametrize(
        ("knobs", "expected"),
        [
            ({"retries": 1}, [16, 8, 4, 2, 1]),
            ({"fewer_sizes": 1}, [2, 1]),
            ({"allow_eager": True}, []),
        ],
    )
    def test_the_next_attempt_applies_them(self, tmp_path, monkeypatch, knobs, expected):
        """After a capture that could not be repaired a new process of the same run goes on one rung further."""
        monkeypatch.setenv("STARTUP_FSM_CONTINUED", "")
        device = SimulatedDevice(4 * GIB)
        boot, _ = counting_start(device=device, knobs=Knobs(**knobs), journal=tmp_path)
        monkeypatch.setattr(device, "repair", lambda pool: unproven(device, pool))
        stubborn = Stubborn(device=device)
        stubborn.times = 1
        with pytest.raises(RestartRequired):
            boot.run(stubborn)

        recorder = boot.recorder
        export_continued(
            Continued(
                run=recorder.run, process=recorder.process, rank=recorder.rank, attempt=2, restarts=1, reason="crippled"
            )
        )
        again, engine = counting_start(knobs=Knobs(**knobs), journal=tmp_path)
        again.run(engine)

        assert (again.recorder.run, again.recorder.process, again.recorder.attempt) == (recorder.run, "rank-00000", 2)
        assert again.history.attempts[0].reason == "crippled"
        assert sizes_captured(again) == expected
        assert again.history.budgets[-1][1].blocks != boot.history.budgets[-1][1].blocks
        assert "STARTUP_FSM_CONTINUED" not in os.environ

    def test_a_journal_that_cannot_be_read_teaches_nothing(self, tmp_path, monkeypatch):
        """The new process then starts as the first one did."""
        monkeypatch.setenv("STARTUP_FSM_CONTINUED", "")
        export_continued(Continued(run="r", process="rank-00003", rank=3, attempt=2, restarts=1))
        boot, engine = counting_start(journal=tmp_path)
        boot.run(engine)

        assert boot.lessons == Lessons()
        assert boot.path.name == "rank-00003.2.jsonl"


def unproven(device, pool):
    """A repair whose proof fails; the pool is gone all the same."""
    from startup_fsm.devices.base import Repair
    from startup_fsm.devices.repair import repair

    return Repair(proven=False, evidence=repair(device, pool).evidence)
