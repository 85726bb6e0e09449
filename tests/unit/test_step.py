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
from startup_fsm.testing import counting_start


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
