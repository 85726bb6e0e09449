"""
Whole logs of real starts: vLLM 0.25.1 on one H200, with what was set, done to them and measured beside them.

A verdict is held against what is known from outside the log: how the start ended, what a neighbour did, how much of the
device was free at ready, what would have fitted.
"""

from __future__ import annotations

from typing import Final

import attrs
import pytest

from startup_fsm.memory import GIB, MIB
from tests.logs.verdicts_of import STARTED, advised, changes, codes, document_once, first_code, main_of, moves

#: The device, in MiB, and what a process holds there before it asks for anything.
TOTAL_MIB: Final = 143_155.9
CONTEXT_MIB: Final = 522.2
#: What two decimals of GiB, torch's cache and a driver may hide at ready.
SLACK_MIB: Final = 256

UTILIZATION, KV_BYTES = "gpu_memory_utilization", "kv_cache_memory_bytes"
LOWER, RAISE, WHO = f"{UTILIZATION} lower", f"{UTILIZATION} raise", "other_process investigate"


@attrs.frozen(kw_only=True)
class Started:
    """
    What is known of one start.

    Attributes:
        outcome: All that the text allows.
        state: Where it ended.
        parts: Any of these; empty where nothing says it.
        first: Codes of which one comes first; None for no finding above a note.
        cure: Moves of which one is among the first three items of advice; empty where there is none.
        never: Moves that make it worse.
        at_most: Settings and the largest value with which the start is known to fit.
        free_mib: Of the device, at ready.
        utilization: As it was set.
    """

    outcome: tuple[str, ...]
    state: str | None = None
    parts: tuple[str, ...] = ()
    first: tuple[str | None, ...]
    cure: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    at_most: dict[str, float] = attrs.field(factory=dict)
    free_mib: float | None = None
    utilization: float = 0.9


STARTS: Final = {
    # V2, a cold compile cache; two requests are served and a SIGTERM ends it cleanly.
    "ready": Started(
        outcome=("ready",),
        first=("graphs.not_reserved", "budget.overrun"),
        cure=(LOWER, f"{KV_BYTES} set"),
        never=(RAISE,),
        free_mib=12_955.125,
    ),
    # V1: 0.50 GiB estimated, 0.65 GiB taken.
    "ready_v1": Started(
        outcome=("ready",),
        first=("graphs.estimate_short", "budget.overrun", None),
        never=(RAISE,),
        free_mib=13_409.125,
    ),
    # No graphs.
    "ready_eager": Started(outcome=("ready",), first=(None, "budget.overrun"), never=(RAISE,), free_mib=13_945.125),
    # The same with colour codes in prefix, level, clock and file.
    "ready_eager_in_colour": Started(
        outcome=("ready",), first=(None, "budget.overrun"), never=(RAISE,), free_mib=13_945.125
    ),
    # The API server: its banner, a warning with a traceback after readiness, a SIGINT.
    "ready_server": Started(
        outcome=("ready",),
        first=("graphs.not_reserved", "budget.overrun"),
        cure=(LOWER, f"{KV_BYTES} set"),
        never=(RAISE,),
        free_mib=12_891.125,
    ),
    # V2; PIECEWISE is complete, FULL stops at the first of 51. At 0.9 it stands 1.33 GiB above its request.
    "capture_at_0996": Started(
        outcome=("oom",),
        state="capture_graphs",
        parts=("full",),
        first=("graphs.not_reserved", "capture.out_of_memory", "budget.overrun"),
        cure=(LOWER,),
        never=(RAISE,),
        at_most={UTILIZATION: 0.9905},
        utilization=0.996,
    ),
    # 0.09 GiB less is free than is requested.
    "utilization_just_above_free": Started(
        outcome=("error",),
        state="init_device",
        parts=("pre_load_check",),
        first=("device.not_enough_free",),
        cure=(LOWER, WHO),
        never=(RAISE,),
        at_most={UTILIZATION: 0.996},
        utilization=0.997,
    ),
    # 10.95 of 16.0 GiB; the engine estimates a length of 89728.
    "request_does_not_fit": Started(
        outcome=("error",),
        state="size_kv",
        parts=("request_fits",),
        first=("budget.request_does_not_fit",),
        cure=("max_model_len lower", RAISE),
        never=(LOWER, "max_model_len raise"),
        at_most={"max_model_len": 89_728},
        utilization=0.2,
    ),
    # 0.53 of 1.0 GiB; the last traceback is the API server's.
    "request_does_not_fit_server": Started(
        outcome=("error",),
        state="size_kv",
        parts=("request_fits",),
        first=("budget.request_does_not_fit",),
        cure=("max_model_len lower", RAISE),
        never=(LOWER, "max_model_len raise"),
        at_most={"max_model_len": 4_304},
        utilization=0.125,
    ),
    # 15.0 GiB of weights, and a request of 13.98 GiB of which the log does not tell the total.
    "no_available_memory": Started(
        outcome=("error",),
        state="size_kv",
        first=("budget.negative", "weights.exceed_request"),
        cure=(RAISE,),
        never=(LOWER,),
        utilization=0.1,
    ),
    # Another process held 40 GiB and its context from the beginning.
    "not_enough_free": Started(
        outcome=("error",),
        state="init_device",
        parts=("pre_load_check",),
        first=("device.not_enough_free", "device.neighbour_present"),
        cure=(WHO, LOWER),
        never=(RAISE,),
        at_most={UTILIZATION: 0.706},
    ),
    # 360 layers; this runner says nothing of its own on it.
    "weights_exceed_v2": Started(
        outcome=("oom",),
        state="load_weights",
        first=("weights.exceed_device",),
        cure=("tensor_parallel_size raise", "quantization set"),
        never=(RAISE, LOWER, "enforce_eager set"),
    ),
    # The same, and this runner says that it failed to load.
    "weights_exceed_v1": Started(
        outcome=("oom",),
        state="load_weights",
        first=("weights.exceed_device",),
        cure=("tensor_parallel_size raise", "quantization set"),
        never=(RAISE, LOWER, "enforce_eager set"),
    ),
    # 139.7 GiB pinned of 139.29 GiB that were free; of eight layers of 17.46 GiB seven fitted, and 10.99 GiB were left.
    "kv_pinned_too_large": Started(
        outcome=("oom",),
        state="allocate_kv",
        first=("budget.pinned_too_large", "kv.out_of_memory"),
        cure=(f"{KV_BYTES} lower", f"{KV_BYTES} set"),
        never=(f"{KV_BYTES} raise", RAISE),
        at_most={KV_BYTES: round((7 * 17.46 + 10.99) * GIB)},
    ),
    # Pinned so that PIECEWISE still fits; FULL stops at the first of 51.
    "kv_pinned_capture_dies": Started(
        outcome=("oom",),
        state="capture_graphs",
        parts=("full",),
        first=("budget.pinned_too_large", "capture.out_of_memory"),
        cure=(f"{KV_BYTES} lower", f"{KV_BYTES} set"),
        never=(f"{KV_BYTES} raise", RAISE),
        at_most={KV_BYTES: 131_600_000_000 - 11 * MIB},
    ),
    # 1,500,000 tokens of a step; inductor's tuning asks for 40.05 GiB, and 22.96 GiB are free.
    "profile_out_of_memory": Started(
        outcome=("oom",),
        state="profile_activations",
        parts=("compile", "autotune"),
        first=("profile.out_of_memory",),
        cure=("max_num_batched_tokens lower",),
        never=(RAISE, "max_num_batched_tokens raise"),
        at_most={"max_num_batched_tokens": 1_323_000},
    ),
    # Another process frees 20 GiB right after the weights are loaded.
    "neighbour_releases": Started(
        outcome=("error",),
        state="profile_activations",
        first=("device.neighbour_shrank",),
        cure=(WHO,),
        never=(RAISE, LOWER),
        utilization=0.7,
    ),
    # SIGKILL to the engine at 6 of 51: it leaves no word, and its parent one that says nothing.
    "sigkill_in_capture": Started(
        outcome=("error", "incomplete", "interrupted"),
        state="capture_graphs",
        parts=("piecewise",),
        first=("run.ended_without_trace", "run.ended_by_signal"),
        cure=("none investigate",),
        never=(RAISE, LOWER),
    ),
    # The forward of the first real step, after the capture.
    "max_num_seqs_8192": Started(
        outcome=("oom",),
        state="verify",
        parts=("kernel_warmup",),
        first=("graphs.not_reserved", "verify.out_of_memory", "profile.incomplete", "budget.overrun"),
        cure=(LOWER, "max_num_seqs lower"),
        never=(RAISE, "max_num_seqs raise"),
        at_most={UTILIZATION: 0.9892, "max_num_seqs": 4_096},
        utilization=0.99,
    ),
    # Another process, at first a context of 0.51 GiB, takes all but 60 MiB while PIECEWISE is captured.
    "neighbour_takes_in_capture": Started(
        outcome=("oom",),
        state="capture_graphs",
        parts=("piecewise",),
        first=("device.neighbour_grew", "device.neighbour_present", "capture.out_of_memory", "graphs.not_reserved"),
        cure=(WHO, LOWER),
        never=(RAISE,),
    ),
    # 1024 rows of the sampler ask for 502 MiB, and 227.12 MiB are free.
    "sampler_at_0996_v1": Started(
        outcome=("oom",),
        state="verify",
        parts=("sampler_warmup",),
        first=("graphs.estimate_short", "budget.overrun", "verify.out_of_memory"),
        cure=(LOWER, "max_num_seqs lower"),
        never=(RAISE, "max_num_seqs raise"),
        at_most={UTILIZATION: 0.994, "max_num_seqs": 512},
        utilization=0.996,
    ),
}

every = pytest.mark.parametrize("name", sorted(STARTS))


def verdict(name):
    """What is said of a start."""
    return main_of(document_once(STARTED / f"{name}.log"))


def test_every_log_is_known():
    """There is no log of which nothing is known, and no knowledge without a log."""
    assert sorted(path.stem for path in STARTED.glob("*.log")) == sorted(STARTS)


@every
def test_one_start_of_one_process(name):
    """A log is one start of vLLM 0.25.1 with one rank, whatever its server and its engine print."""
    told, found = document_once(STARTED / f"{name}.log"), verdict(name)
    assert len(told["runs"]) == 1
    assert (found["source"], found["engine_version"], found["ranks"]) == ("vllm", "0.25.1", 1)
    assert found["figures"][UTILIZATION] == STARTS[name].utilization


@every
def test_end(name):
    """Outcome, state and part are those of the start."""
    known, found = STARTS[name], verdict(name)
    assert found["outcome"] in known.outcome
    assert found["failed_state"] == known.state
    assert not known.parts or found["part"] in known.parts


@every
def test_first_finding(name):
    """The first finding is the cause that is known; a ready start has no error."""
    known, found = STARTS[name], verdict(name)
    assert first_code(found) in known.first
    if known.outcome == ("ready",):
        assert all(each["severity"] != "error" for each in found["findings"])


@every
def test_cure(name):
    """One of the first three items of advice is what helps, and none is what makes it worse."""
    known, found = STARTS[name], verdict(name)
    assert not set(moves(found)) & set(known.never)
    assert not known.cure or set(moves(found, first=3)) & set(known.cure)


@pytest.mark.parametrize("name", sorted(name for name, known in STARTS.items() if known.at_most))
def test_values_fit(name):
    """Every value that the advice gives a setting would have fitted, and at least one is given."""
    known, found = STARTS[name], verdict(name)
    given = {setting: value for setting in known.at_most if (value := advised(found, setting)) is not None}
    assert given
    for setting, value in given.items():
        assert 0 < value <= known.at_most[setting]


@pytest.mark.parametrize("name", sorted(name for name, known in STARTS.items() if known.free_mib is not None))
def test_advice_at_ready_leads_to_the_request(name):
    """
    A start that stands above its request is told less, and never more; the KV bytes that it is told bring it back.

    Used is what the device had no more at ready; the context was there before the engine looked.
    """
    known, found = STARTS[name], verdict(name)
    used, allowed = TOTAL_MIB - known.free_mib, TOTAL_MIB * known.utilization + CONTEXT_MIB
    assert used > TOTAL_MIB * known.utilization
    for change in changes(found):
        if change["setting"] == UTILIZATION:
            assert change["direction"] == "lower"
            assert "to" not in change or change["to"] < known.utilization
    told = advised(found, KV_BYTES)
    if told is not None:
        less = found["figures"]["kv_available_bytes"] - told
        assert less > 0
        assert used - less / MIB < allowed + SLACK_MIB


def test_colours_change_nothing():
    """The same start in colour has the same verdict, but for its clocks and places."""
    plain, coloured = verdict("ready_eager"), verdict("ready_eager_in_colour")
    assert codes(plain) == codes(coloured)
    assert moves(plain) == moves(coloured)
    assert plain["figures"].keys() == coloured["figures"].keys()


def test_neighbour_is_named():
    """The process that took memory in the capture is named by its pid, with what it holds."""
    found = verdict("neighbour_takes_in_capture")
    spoken = [each["message"] for each in found["findings"]] + [each["because"] for each in found["advice"]]
    assert any("4186" in text for text in spoken)
    assert any("14.39 GiB" in text or "14.38 GiB" in text for text in spoken)


def test_killed_engine_is_no_fault_of_memory():
    """A kill leaves no advice on memory, and evidence that its own last line was a bar at 6 of 51."""
    found = verdict("sigkill_in_capture")
    assert moves(found) == ["none investigate"]
    assert found["part"] == "piecewise"
