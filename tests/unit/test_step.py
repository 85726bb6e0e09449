"""The open state as its body sees it: pools, and what is said of them; peaks."""

from __future__ import annotations

import warnings

import pytest

from startup_fsm import step as steps
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.following import FollowingDevice
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import observed, single_capture
from startup_fsm.testing import counting_start, verdict_of


def sized(**options):
    """A start that has sized a KV cache and is before its allocation."""
    boot, engine = counting_start(plan=observed(), device=FollowingDevice(4 * GIB), **options)
    with boot.state("profile_activations"):
        pass
    return boot, boot.kv_budget(engine.block)


class TestPool:
    def test_none_where_there_is_an_arena(self):
        """The KV cache of this plan is made of buffers, and that is said."""
        boot, _ = counting_start(plan=single_capture(), mode="observe")
        with boot.state("reserve_kv") as step, pytest.raises(ValueError, match="lies in an arena") as caught:
            step.pool()

        assert "step.kv_buffers" in str(caught.value)
        assert boot.history.pools == []

    def test_a_purpose_of_ones_own_has_a_pool_everywhere(self):
        """Beside the arena there may be others."""
        boot, _ = counting_start(plan=single_capture(), mode="observe")
        with boot.state("reserve_kv") as step:
            assert step.pool("tables").purpose == "tables"

    def test_a_simulated_cache_beyond_this_machine_is_warned_of(self, monkeypatch):
        """Tensors of one's own would take its memory: a decision and a warning say so, with what to do."""
        monkeypatch.setattr(steps, "host_available_bytes", lambda: 1 * GIB)
        boot, budget = sized()
        with (
            boot.state("allocate_kv") as step,
            pytest.warns(RuntimeWarning, match=r"this machine has 1\.00 GiB .*requested_bytes"),
        ):
            step.pool()

        (said,) = [each for _, each in boot.history.decisions if each.decision == "warned_of_host"]
        assert said.inputs == {"kv_bytes": budget.kv_bytes, "available_bytes": 1 * GIB}

    def test_buffers_are_not_warned_of(self, monkeypatch):
        """The device makes them so that only what is touched is memory."""
        monkeypatch.setattr(steps, "host_available_bytes", lambda: 1 * GIB)
        boot, budget = sized()
        with warnings.catch_warnings(), boot.state("allocate_kv") as step:
            warnings.simplefilter("error")
            step.kv_buffers(1, budget.block_bytes, budget.blocks)

    def test_a_cache_that_this_machine_has_is_not_warned_of(self, monkeypatch):
        """Neither is one where Linux does not tell."""
        for room in (64 * GIB, None):
            monkeypatch.setattr(steps, "host_available_bytes", lambda room=room: room)
            boot, _ = sized()
            with warnings.catch_warnings(), boot.state("allocate_kv") as step:
                warnings.simplefilter("error")
                step.pool()


def test_peaks_begin_with_the_state():
    """Each state has its own, whatever one before it needed."""
    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(plan=observed(), device=device, journal=None, discover=False, knobs=Knobs())
    with boot.state("load_weights"):
        device.free(device.malloc(512 * MIB))
        device.allocator.empty_cache()
    with boot.state("warmup"):
        device.free(device.malloc(64 * MIB))

    first, second = boot.history.visits
    assert first.after.reserved_peak_bytes == 512 * MIB
    assert second.before.reserved_peak_bytes == 0
    assert second.after.reserved_peak_bytes == 64 * MIB


class TestFailure:
    """What a body raised, and where."""

    def test_a_host_without_memory(self):
        """The CPU allocator's own words are host memory that ran out, and the advice is to ask for less of it."""
        boot, _ = counting_start(plan=observed(), device=FollowingDevice(80 * GIB))
        with pytest.raises(RuntimeError), boot, boot.state("allocate_kv"):
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"
            )

        verdict = verdict_of(boot)
        assert (verdict.outcome, verdict.findings[0].finding.code) == ("oom", "host.out_of_memory")
        (change,) = verdict.advice[0].changes
        assert (change.setting, change.direction) == ("requested_bytes", "lower")

    def test_an_allocation_that_fails_is_shown_where_the_engine_made_it(self):
        """Not where the device refused it, nor within torch."""
        torch = pytest.importorskip("torch")
        boot, _ = counting_start(plan=observed(), device=FollowingDevice(1 * GIB))
        with pytest.raises(torch.OutOfMemoryError), boot, boot.state("warmup"):
            torch.empty(2 * GIB, dtype=torch.uint8)

        where = boot.history.last("warmup").failed.where
        assert where[-1].partition(":")[0] == __file__
        assert "torch.empty" in where[-1]


def test_an_overrun_says_what_took_more():
    """By state: the cache beyond its blocks, and the first step beyond the headroom."""
    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(plan=observed(), device=device, journal=None, discover=False, knobs=Knobs(requested_bytes=2 * GIB))
    with boot.state("profile_activations"):
        device.free(device.malloc(64 * MIB))
    budget = boot.kv_budget(MIB)
    with boot.state("allocate_kv"):
        device.malloc(budget.kv_bytes + 100 * MIB)
    with boot.state("verify"):
        device.malloc(300 * MIB)

    (found,) = [each.finding for each in verdict_of(boot).findings if each.finding.code == "budget.overrun"]
    # The device gives whole pages.
    assert "allocate_kv took 101.00 MiB more than its blocks" in found.message
    assert "verify 236.00 MiB more than the headroom" in found.message
