"""What a start does where a device cannot do what the plan wants, or cannot tell what happened."""

import pytest

from startup_fsm.budget import Knobs
from startup_fsm.devices.costs import Costs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import single_capture, throwaway
from startup_fsm.states import State
from startup_fsm.testing import counting_start, verdict_of


def no_virtual_memory(*_, **__):
    raise NotImplementedError("this device has no virtual memory management")


class TestWithoutVirtualMemory:
    """The plan `single_capture` on a device that cannot reserve a range."""

    def test_it_goes_on_as_throwaway(self, monkeypatch):
        """By its own edges, logged, to a start that is ready without a finding above a note."""
        boot, engine = counting_start(plan=single_capture())
        monkeypatch.setattr(boot.device, "reserve", no_virtual_memory)

        boot.run(engine)
        verdict = verdict_of(boot)

        assert verdict.outcome == "ready"
        assert [visit.state for visit in boot.history.visits][3:] == [
            "reserve_kv", "bootstrap_kv", "capture_throwaway", "teardown", "size_kv", "allocate_kv", "capture_graphs",
            "verify",
        ]  # fmt: skip
        assert boot.history.violations == []
        assert boot.history.recoveries[0][1].edge == "without_arena"
        assert {each.finding.severity for each in verdict.findings} <= {"note"}

    def test_it_says_why(self, monkeypatch):
        """The journal holds what the device could not do."""
        boot, engine = counting_start(plan=single_capture())
        monkeypatch.setattr(boot.device, "reserve", no_virtual_memory)

        boot.run(engine)

        failed = boot.history.last("reserve_kv").failed
        assert failed.category == "unsupported"
        assert "no virtual memory" in failed.message


class BlindDevice(SimulatedDevice):
    """Cannot tell this process's bytes from those of others, as without NVML."""

    def snapshot(self, *, settled=False):
        import attrs

        return attrs.evolve(super().snapshot(settled=settled), process_bytes=None, tenants=())


def blind_start(move):
    """A start on such a device while another process moves in `profile_activations`."""
    device = BlindDevice(4 * GIB, neighbours={"other": GIB // 2})

    class Engine(CountingEngine):
        def profile_activations(self, step):
            super().profile_activations(step)
            move(device)

    boot, _ = counting_start(device=device, knobs=Knobs(utilization=0.9))
    boot.run(Engine(device=device))
    return boot, verdict_of(boot)


@pytest.mark.parametrize(
    "move",
    [
        lambda device: device.neighbour_takes("other", GIB),
        lambda device: device.neighbour_frees("other", GIB // 4),
    ],
    ids=["takes", "frees"],
)
def test_drift(move):
    """Where nobody can be named, memory that we cannot have moved ourselves is drift, and never aborts a start."""
    boot, verdict = blind_start(move)

    assert verdict.outcome == "ready"
    assert verdict.findings[0].finding.code == "device.drift"
    assert verdict.findings[0].finding.state == "profile_activations"
    assert boot.history.violations == []


def test_no_drift():
    """Our own kernels and graphs are no drift."""
    _, verdict = blind_start(id)

    assert "device.drift" not in {each.finding.code for each in verdict.findings}


def test_warmup_is_a_state_of_its_own():
    """A plan with `warmup` runs the engine's method of that name before anything is measured."""

    class Engine(CountingEngine):
        def warmup(self, step):
            self.warmed = step.state
            self._work(self.activations)

    plan = throwaway().insert(State.named("warmup"), after="load_weights")
    boot, _ = counting_start(plan=plan)
    engine = Engine(device=boot.device)
    boot.run(engine)

    assert engine.warmed == "warmup"
    assert [visit.state for visit in boot.history.visits][:4] == [
        "init_device",
        "load_weights",
        "warmup",
        "profile_activations",
    ]


class TestCards:
    """Costs that were measured on a card."""

    def test_it_is_known(self):
        """The calibration holds costs outside torch only, and says where it is from."""
        costs = Costs.of_card("nvidia-h200")

        assert 500 * MIB < costs.context_bytes < 800 * MIB
        assert costs.workspace_bytes == 32 * MIB

    def test_it_is_not_known(self):
        """A card that nobody measured is refused with those that somebody did."""
        with pytest.raises(ValueError, match="'abacus' is none of nvidia-h200"):
            Costs.of_card("abacus")


class TestWithoutGraphs:
    """A start whose graphs could not be captured and that may go on without."""

    @pytest.mark.parametrize(("plan", "source"), [(throwaway, "allocate_kv"), (single_capture, "reserve_kv")])
    def test_it_stays_without_them_when_it_goes_back(self, plan, source):
        """A retry after it takes the same edge again; it is not used up by the first time."""
        made = plan(retries=2, allow_eager=True)

        assert made.allows(source, "without_graphs", taken=3)
        assert not plan(retries=2).allows(source, "without_graphs")

    def test_an_arena_has_one_layout(self):
        """A second call for buffers in the same state is refused before anything is lost."""

        class Engine(CountingEngine):
            def allocate_kv(self, step, blocks):
                super().allocate_kv(step, blocks)
                step.kv_buffers(1, self.block, blocks)

        boot, _ = counting_start(plan=single_capture())
        with pytest.raises(ValueError, match="kv_buffers was called twice in reserve_kv"):
            boot.run(Engine(device=boot.device))


def test_a_negative_estimate_is_no_bonus(monkeypatch):
    """Where something else moved while we measured, nothing is added to the KV cache, and a finding says so."""
    from startup_fsm import estimators

    monkeypatch.setattr(estimators, "total", lambda *_: -GIB)
    boot, engine = counting_start()
    boot.run(engine)
    verdict = verdict_of(boot)

    assert {term.term: term.bytes for term in boot.history.budgets[0][1].terms}["graphs"] == 0
    assert "graphs.estimate_negative" in {each.finding.code for each in verdict.findings}
