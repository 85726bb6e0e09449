"""Engines that capture by themselves, into pools of their own: measured, compared, and proven gone all the same."""

from __future__ import annotations

import gc

import pytest

from startup_fsm.budget import Knobs, term
from startup_fsm.devices.costs import FORBIDDEN_WORDS
from startup_fsm.devices.holdings import SimulatedPool
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import CheckFailed, RestartRequired
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import observed, single_capture, throwaway
from startup_fsm.testing import counting_start, verdict_of

SIZES = (16, 8, 4, 2, 1)
#: What a graph of so many rows takes here.
ROW = 16 * MIB


class OwnCaptures(CountingEngine):
    """Opens a pool that nobody was told of, and keeps what it captures there."""

    leaks = False
    seed, early = 0, None
    into_ours = False
    in_pool = True
    fails_in = None
    number = 100

    def __init__(self, **given):
        super().__init__(**given)
        self.held = []

    def capture(self, step, size):
        if step.state == self.fails_in:
            self.fails_in = None
            raise RuntimeError(FORBIDDEN_WORDS)
        if self.into_ours:
            pool = step.pool()
        elif self.early is not None:
            pool = self.early
        else:
            OwnCaptures.number += 1
            pool = SimulatedPool(self.device, (7, OwnCaptures.number), "nobody was told")
        with pool:
            self.held.append((pool, self.device.buffers(1, size * ROW)))

    def profile_activations(self, step):
        super().profile_activations(step)
        if self.seed:
            self.early = SimulatedPool(self.device, (7, 1), "nobody was told")
            with self.early:
                self.seeded = self.device.buffers(1, self.seed)

    def allocate_kv(self, step, blocks):
        if self.in_pool:
            super().allocate_kv(step, blocks)
        else:
            self._kv = self.device.buffers(1, blocks * self.block)

    def verify(self, step):
        if self.fails_in == "verify":
            self.fails_in = None
            self.device.malloc(self.device.memory.free_bytes + MIB)
        super().verify(step)

    def release_graphs(self):
        left = self.held[:1] if self.leaks else []
        for pool, buffers in self.held[len(left) :]:
            buffers.clear()
            if not self.into_ours:
                pool.release()
        self.early = None
        self.held = left


def started(plan=None, *, knobs=None, mode="default", apart=True, **attributes):
    """A start of such an engine: the boot, and what it raised."""
    device = SimulatedDevice(4 * GIB)
    boot, _ = counting_start(device=device, plan=plan or throwaway(), knobs=knobs, mode=mode)
    engine = OwnCaptures(device=device, sizes=SIZES)
    for name, value in attributes.items():
        setattr(engine, name, value)
    if not apart:
        budget = boot.kv_budget
        boot.kv_budget = lambda size, **given: budget(size, **{**given, "graphs": False})
    try:
        boot.run(engine)
    except Exception as error:  # noqa: BLE001 - what came of it is what the tests are about
        return boot, error
    return boot, None


@pytest.fixture(autouse=True)
def small_heap():
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


class TestEstimate:
    """What comes back when such graphs die is what is reserved for the next ones."""

    @pytest.mark.parametrize("seed", [0, 32 * MIB], ids=["new pools", "one that held memory before"])
    def test_measured_by_release(self, seed, monkeypatch):
        """The bytes of the pools, whoever opened them, and whenever."""
        if seed:
            # The model takes whoever holds a pool for a graph; torch knows its graphs.
            monkeypatch.setattr(SimulatedDevice, "has_graphs", lambda *_: False)
        boot, error = started(seed=seed)

        assert error is None
        (_, made), (_, budget) = boot.history.estimates[-1], boot.history.budgets[-1]
        assert made.method == "release"
        assert made.recurring_bytes == sum(SIZES) * ROW
        assert made.kv_bytes == 40 * MIB
        assert -term(budget, "graphs") == made.recurring_bytes
        assert verdict_of(boot).outcome == "ready"
        assert [each.finding.code for each in verdict_of(boot).findings] == []

    def test_a_profiling_cache_in_none_of_our_pools_comes_back_with_them(self):
        """Nobody can tell what was which: it is reserved for graphs, and none of it is lost to them."""
        boot, error = started(in_pool=False)

        assert error is None
        assert boot.history.estimates[-1][1].recurring_bytes == sum(SIZES) * ROW + 32 * MIB

    def test_captured_into_our_pool(self):
        """The pool of the state is there for it, also without our call."""
        boot, error = started(into_ours=True)

        assert error is None
        assert boot.history.estimates[-1][1].recurring_bytes == sum(SIZES) * ROW
        assert boot.measurement.has_real_graphs
        assert verdict_of(boot).figures["graph_actual_bytes"] == sum(SIZES) * ROW

    def test_captured_in_two_visits(self):
        """What the first of them captured is not forgotten by the second, which captures nothing."""
        device = SimulatedDevice(4 * GIB)
        boot, _ = counting_start(device=device, plan=observed())
        engine = OwnCaptures(device=device, sizes=SIZES)
        with boot.state("capture_throwaway") as step:
            engine.capture(step, 16)
        with boot.state("capture_throwaway"):
            pass
        with boot.state("teardown"):
            engine.release_graphs()

        assert boot.history.estimates[-1][1].recurring_bytes == 16 * ROW

    def test_the_actual_is_compared(self):
        """Graphs that take more than was reserved are a finding, as they are for graphs of ours."""
        boot, error = started(knobs=Knobs(graph_estimate="none", utilization=0.8))

        assert error is None
        (found,) = [each.finding for each in verdict_of(boot).findings if each.finding.code.startswith("graphs.")]
        assert (found.code, found.observed, found.expected) == ("graphs.not_reserved", sum(SIZES) * ROW, 0)

    def test_what_the_engine_reserves_is_not_for_them(self):
        """Graphs that outgrow what was reserved for them are found, whatever else was."""
        boot, error = started(
            knobs=Knobs(graph_estimate=16 * MIB, utilization=0.8), reserve_bytes=lambda: {"draft": 500 * MIB}
        )

        assert error is None
        assert term(boot.history.budgets[-1][1], "draft") == -500 * MIB
        assert "graphs.estimate_short" in [each.finding.code for each in verdict_of(boot).findings]

    def test_an_engine_that_has_room_for_them_elsewhere_says_so(self):
        """Without a term of their own nothing is compared, and no term says that none are missing."""
        boot, error = started(apart=False, reserve_bytes=lambda: {"graphs of mine": sum(SIZES) * ROW})

        assert error is None
        graphs = next(each for each in boot.history.budgets[-1][1].terms if each.term == "graphs")
        assert (graphs.bytes, graphs.source) == (0, "not charged apart")
        assert [each.finding.code for each in verdict_of(boot).findings] == []

    def test_of_a_few_sizes(self):
        """What the largest took is charged for each: one by one it is not known."""
        boot, error = started(knobs=Knobs(graph_method="linear", graph_sample=2))

        assert error is None
        (_, made) = boot.history.estimates[-1]
        assert (made.seen, made.of) == (2, len(SIZES))
        assert made.recurring_bytes == (16 + 8) * ROW * len(SIZES) // 2

    def test_captured_before_sizing(self):
        """Under single_capture they stand in what we use, and nothing is reserved for them."""
        boot, error = started(single_capture())

        assert error is None
        graphs = next(each for each in boot.history.budgets[-1][1].terms if each.term == "graphs")
        assert (graphs.bytes, graphs.source) == (0, "captured already")

    def test_a_second_try_reserves_for_them_again(self):
        """After a real capture that ran out they are gone, and the next budget knows what they take."""
        boot, error = started(throwaway(retries=1), knobs=Knobs(retries=1), fails_in="verify")

        assert error is None
        first, second = [-term(budget, "graphs") for _, budget in boot.history.budgets]
        assert first == second == sum(SIZES) * ROW
        assert boot.measurement.has_real_graphs

    def test_engines_that_capture_nothing_have_no_estimate(self):
        """A state that was passed through with nothing in it is no measure of graphs."""
        device = SimulatedDevice(4 * GIB)
        boot, _ = counting_start(device=device)
        for state in ("init_device", "load_weights", "profile_activations", "bootstrap_kv", "capture_throwaway"):
            with boot.state(state):
                pass
        with boot.state("teardown"):
            pass

        assert boot.history.estimates == []


class TestTeardown:
    """Pools that came with the graphs must be gone with them."""

    def test_a_graph_that_stays_is_named(self):
        """With its pool, its bytes, and where it was read."""
        _, error = started(leaks=True)

        assert isinstance(error, CheckFailed)
        (found,) = error.findings
        assert (found.code, found.state, found.bytes) == ("teardown.graphs_alive", "teardown", 16 * ROW)
        assert "the engine's own pool 7." in found.message

    def test_workspaces_are_not_cleared_under_it(self):
        """What it may have baked in stays."""
        boot, _ = started(leaks=True, mode="observe")

        cleared = {
            probe.inputs["label"]: probe.result["workspaces_cleared"]
            for visit in boot.history.visits
            for _, probe in visit.probes.values()
            if probe.probe == "settle"
        }
        assert cleared["F0"]
        assert not cleared["F2"]

    def test_it_is_not_taken_for_one_that_stays(self):
        """Under observe the start goes on: what the real graphs will take is reserved all the same."""
        boot, error = started(leaks=True, mode="observe")

        assert error is None
        graphs = next(each for each in boot.history.budgets[-1][1].terms if each.term == "graphs")
        assert graphs.source == "measured by release"

    def test_what_stays_without_a_graph_is_a_warning(self, monkeypatch):
        """Such as a pool that somebody else opened meanwhile: nothing of it can be replayed."""
        monkeypatch.setattr(SimulatedDevice, "has_graphs", lambda *_: False)
        boot, error = started(leaks=True)

        assert error is None
        (found,) = [each.finding for each in verdict_of(boot).findings if each.finding.code == "teardown.pool_held"]
        assert (found.severity, found.bytes) == ("warning", 16 * ROW)


class TestRepair:
    """A capture of the engine's own that fails is followed by the same proof."""

    def test_proven(self):
        """The allocator works, and the start goes on."""
        boot, error = started(throwaway(allow_eager=True), knobs=Knobs(allow_eager=True), fails_in="capture_throwaway")

        assert error is None
        _, repair = boot.history.last("recover_allocator").probes["repair"]
        assert repair.result["proven"]
        assert repair.inputs["pool"] is None

    def test_not_proven(self):
        """A capture that is still open leaves an allocator that only a new process cures."""
        device = SimulatedDevice(4 * GIB)
        boot, _ = counting_start(
            device=device, plan=throwaway(allow_eager=True), knobs=Knobs(allow_eager=True), discover=False
        )
        engine = OwnCaptures(device=device, sizes=SIZES)

        def crippling(step, size):
            device.allocator.begin_allocate_to_pool((7, 1), frozenset({1}))
            raise RuntimeError(FORBIDDEN_WORDS)

        engine.capture = crippling
        with pytest.raises(RestartRequired, match="a pool of the engine's own"):
            boot.run(engine)
