"""Advice: whatever value it names, a start that takes it becomes ready; what would change nothing is not said."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from startup_fsm.advice import advise
from startup_fsm.budget import Knobs
from startup_fsm.findings import SETTINGS, Advice, Change, Finding
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import eager, single_capture
from startup_fsm.testing import counting_start, verdict_of
from startup_fsm.verdict import Verdict

KNOBS = {
    "requested_bytes": "requested_bytes",
    "gpu_memory_utilization": "utilization",
    "graph_estimate": "graph_estimate",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
}


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@attrs.frozen(kw_only=True)
class Case:
    """A start that goes wrong."""

    knobs: Knobs = attrs.field(factory=Knobs)
    engine: dict[str, Any] = attrs.field(factory=dict)
    plan: Any = None
    total_bytes: int = 4 * GIB

    def verdict(self) -> Verdict:
        boot, engine = counting_start(
            total_bytes=self.total_bytes, engine=self.engine, knobs=self.knobs, plan=self.plan, progress=False
        )
        try:
            boot.run(engine)
        except Exception:  # noqa: BLE001 - what it was is in the verdict
            assert boot.history.position == "ended"
        return verdict_of(boot)

    def after(self, change: Change) -> Case:
        """The same start with one piece of advice taken."""
        if change.setting in KNOBS:
            return attrs.evolve(self, knobs=attrs.evolve(self.knobs, **{KNOBS[change.setting]: change.to}))
        if change.setting == "max_model_len":
            return attrs.evolve(self, engine=self.engine | {"tokens": change.to})
        if change.setting == "enforce_eager":
            return attrs.evolve(self, plan=eager())
        raise AssertionError(f"no way to apply {change}")


BIG_ROWS = {"row": 4 * MIB}
CASES = {
    "budget too small": Case(knobs=Knobs(utilization=0.25)),
    "budget too small, odd device": Case(knobs=Knobs(utilization=0.3), total_bytes=3 * GIB + 7 * MIB + 13),
    "request too long, memory left": Case(knobs=Knobs(utilization=0.5), engine={"tokens": 20_000}),
    "request too long": Case(engine={"tokens": 100_000}),
    "graphs not reserved": Case(knobs=Knobs(utilization=1.0, graph_estimate="none"), engine=BIG_ROWS),
    "estimate short": Case(knobs=Knobs(utilization=1.0, graph_share=0.5), engine={"row": 8 * MIB}),
    "estimate given short": Case(knobs=Knobs(utilization=1.0, graph_estimate=MIB), engine=BIG_ROWS),
    "pinned too small": Case(knobs=Knobs(kv_cache_memory_bytes=10 * MIB)),
    "pinned too large": Case(knobs=Knobs(kv_cache_memory_bytes=3 * GIB)),
    "pinned, graphs do not fit": Case(knobs=Knobs(utilization=1.0, kv_cache_memory_bytes=2_600 * MIB), engine=BIG_ROWS),
    "explicit request too small": Case(knobs=Knobs(requested_bytes=GIB)),
    "explicit request, graphs not reserved": Case(
        knobs=Knobs(requested_bytes=4 * GIB, graph_estimate="none"), engine=BIG_ROWS
    ),
    "single capture, too small": Case(knobs=Knobs(utilization=0.25), plan=single_capture()),
}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """The verdict of every case, computed once."""
    gc.freeze()
    return {name: case.verdict() for name, case in CASES.items()}


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_advised_value_makes_the_start_ready(name: str, verdicts: dict[str, Verdict]) -> None:
    """Every piece of advice that names a value is taken, alone, and is enough."""
    case, verdict = CASES[name], verdicts[name]
    assert verdict.outcome != "ready"
    assert verdict.findings[0].finding.severity == "error" or name.startswith("pinned")
    assert verdict.advice
    for advice in verdict.advice:
        (change,) = advice.changes
        assert change.setting in SETTINGS
        assert advice.because
        if change.to is None:
            continue
        after = case.after(change).verdict()
        assert after.outcome == "ready", (name, change, after.findings[:1])


def values(verdict: Verdict) -> dict[str, Any]:
    """Setting to direction and value."""
    return {change.setting: (change.direction, change.to) for advice in verdict.advice for change in advice.changes}


def only(verdict: Verdict, setting: str) -> Advice:
    """The advice on one setting."""
    (advice,) = [advice for advice in verdict.advice if advice.changes[0].setting == setting]
    return advice


def test_a_negative_budget_is_raised_and_no_further_than_needed(verdicts: dict[str, Verdict]) -> None:
    """The smallest utilization that fits, and a thousandth less does not."""
    verdict = verdicts["budget too small"]
    advice = only(verdict, "gpu_memory_utilization")
    (change,) = advice.changes
    assert change.direction == "raise"
    assert advice.interval is not None
    assert advice.interval[0] == change.to
    less = attrs.evolve(CASES["budget too small"].knobs, utilization=round(change.to - 0.001, 3))
    assert attrs.evolve(CASES["budget too small"], knobs=less).verdict().outcome != "ready"
    top = attrs.evolve(CASES["budget too small"].knobs, utilization=advice.interval[1])
    assert attrs.evolve(CASES["budget too small"], knobs=top).verdict().outcome == "ready"


def test_a_request_that_no_device_holds_is_made_shorter(verdicts: dict[str, Verdict]) -> None:
    """Where no utilization would do, only the length that fits is named; one block more does not fit."""
    verdict = verdicts["request too long"]
    assert "gpu_memory_utilization" not in values(verdict)
    direction, tokens = values(verdict)["max_model_len"]
    assert direction == "lower"
    longer = Case(engine={"tokens": tokens + 16}).verdict()
    assert longer.outcome == "error"
    assert longer.findings[0].finding.code == "budget.request_does_not_fit"


def test_pinned_bytes_are_moved_by_their_own_knob(verdicts: dict[str, Verdict]) -> None:
    """Where the KV bytes are explicit, utilization and estimate change nothing and are not advised."""
    for name in ("pinned too small", "pinned too large", "pinned, graphs do not fit"):
        advised = values(verdicts[name])
        assert "gpu_memory_utilization" not in advised, name
        assert "graph_estimate" not in advised, name
    assert values(verdicts["pinned too small"])["kv_cache_memory_bytes"] == ("raise", 64 * MIB)
    assert values(verdicts["pinned too large"])["kv_cache_memory_bytes"][0] == "lower"


def test_an_explicit_request_is_not_answered_by_a_share(verdicts: dict[str, Verdict]) -> None:
    """Explicit bytes win over the utilization, so turning it would change nothing."""
    for name in ("explicit request too small", "explicit request, graphs not reserved"):
        assert "gpu_memory_utilization" not in values(verdicts[name])


def test_weights_too_big_get_no_value() -> None:
    """No knob of memory helps where the weights exceed the device."""
    verdict = Case(engine={"weights": 5 * GIB}).verdict()
    advised = values(verdict)
    assert set(advised) == {"tensor_parallel_size", "quantization"}
    assert all(to is None for _, to in advised.values())


def test_a_good_start_gets_no_advice() -> None:
    """Nothing to say, nothing said."""
    assert Case().verdict().advice == ()


def test_one_word_on_each_setting(verdicts: dict[str, Verdict]) -> None:
    """A setting is advised once; two findings do not contradict each other."""
    for verdict in verdicts.values():
        settings = [change.setting for advice in verdict.advice for change in advice.changes]
        assert len(set(settings)) == len(settings)


def test_bytes_that_stay_unused_are_asked_for() -> None:
    """Where the request is bytes, the advice is bytes, and the start that takes it has a larger KV cache."""
    boot, _ = counting_start(knobs=Knobs(requested_bytes=3 * GIB))
    finding = Finding(code="budget.unused", severity="note", state="verify", message="unused", bytes=512 * MIB)
    with boot.state("init_device"):
        pass
    assert advise(finding, None, boot.history) == []

    boot, engine = counting_start(knobs=Knobs(requested_bytes=3 * GIB))
    boot.run(engine)
    (change,) = advise(finding, None, boot.history)[0].changes
    assert (change.setting, change.direction, change.before, change.to, change.unit) == (
        "requested_bytes", "raise", 3 * GIB, 3 * GIB + 512 * MIB, "bytes",
    )  # fmt: skip
