"""Two starts side by side: which is worse, what made it so, and what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest

from startup_fsm.budget import Knobs
from startup_fsm.diff import Difference, difference
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import CheckFailed
from startup_fsm.events import Record, RunFinished, RunStarted, StateEntered, StateLeft
from startup_fsm.findings import Finding
from startup_fsm.fold import fold
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import eager, throwaway
from startup_fsm.reading import read_starts
from startup_fsm.sources import Source
from startup_fsm.testing import counting_start, verdict_of
from startup_fsm.verdict import RankedFinding, Verdict
from startup_fsm.verdicts import judge

STARTED = Path(__file__).parents[1] / "logs" / "started"
S = 1_000_000_000


def counted(**options: Any) -> tuple[Sequence[Source], Verdict]:
    """A start of the counting engine, however it ends, and its verdict."""
    boot, engine = counting_start(**options)
    with contextlib.suppress(Exception):
        boot.run(engine)
    return [Source(run=boot.history)], verdict_of(boot)


def logged(name: str) -> tuple[Sequence[Source], Verdict]:
    """A start of a log that an engine wrote on a card."""
    start = read_starts(STARTED / f"{name}.log")[-1]
    return start.sources, judge(start.sources, source=start.source, origin=start.origin)


def compared(a: tuple[Sequence[Source], Verdict], b: tuple[Sequence[Source], Verdict]) -> Difference:
    """A and B."""
    return difference(*a, *b)


@pytest.fixture(scope="module")
def good() -> tuple[Sequence[Source], Verdict]:
    """A start of the counting engine that is ready."""
    return counted()


def test_the_same_start_twice(good):
    """A start is no worse than itself, and nothing of it differs."""
    found = compared(good, good)

    assert (found.worse, found.finding, found.ties) == (None, None, ())
    assert (found.settings, found.versions, found.environment, found.plan, found.device) == ((), (), (), (), ())
    assert (found.budget, found.figures, found.only_a, found.only_b) == ((), (), (), ())
    assert {each.longer_ns for each in found.states} == {0}
    assert {account.moved_bytes for each in found.states for account in each.accounts} == {0}


#: What is done wrong, the code that it ends with, what it is tied to, and bytes that the numbers show.
FAULTS = {
    "share lowered": (
        {"knobs": Knobs(utilization=0.3)},
        "budget.negative",
        ("setting", "gpu_memory_utilization"),
        "lowered from 0.9 to 0.3 asks for 2.40 GiB less of the device",
    ),
    "longer requests": (
        {"engine": {"tokens": 64 * 1024}},
        "budget.request_does_not_fit",
        ("setting", "max_model_len"),
        "raised from 1024 to 65536: one longest request needs 4.00 GiB, 64.00 MiB in A",
    ),
    "nothing reserved": (
        {"knobs": Knobs(utilization=1.0, graph_estimate="none"), "engine": {"sizes": range(1, 40), "row": MIB}},
        "graphs.not_reserved",
        ("setting", "graph_estimate"),
        "graph_estimate none, not given in A: 0 B reserved for the graphs",
    ),
    "larger weights": (
        {"engine": {"weights": 8 * GIB}},
        "weights.exceed_device",
        ("figure", "weights_bytes"),
        "the weights have 8.00 GiB, 512.00 MiB in A",
    ),
    "smaller device": (
        {"total_bytes": GIB},
        "weights.exceed_device",
        ("device", "total_bytes"),
        "the device has 1.00 GiB, 4.00 GiB in A",
    ),
    "larger step": ({"engine": {"activations": 8 * GIB}}, "profile.out_of_memory", None, "differs"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("is_second", [True, False])
def test_the_cause_comes_first(good, name: str, *, is_second: bool):
    """Whichever of the two it is, the worse one is named with its cause, tied to what differs."""
    options, code, tied, text = FAULTS[name]
    bad = counted(**options)
    found = compared(good, bad) if is_second else compared(bad, good)

    assert found.worse == ("b" if is_second else "a")
    assert found.why.startswith(f"{code} in ")
    assert found.finding is not None
    assert found.finding.finding.code == code
    assert (found.only_b if is_second else found.only_a)[0] is found.finding
    assert (None if not found.ties else (found.ties[0].kind, found.ties[0].name)) == tied
    assert all(tie.bytes > 0 for tie in found.ties[:1])
    if is_second:
        assert text in found.why


#: Two logs of starts on one card, the good one first: the code, and the cause in words.
LOGS = {
    ("ready", "capture_at_0996"): (
        "graphs.not_reserved in size_kv: gpu_memory_utilization raised from 0.9 to 0.996 leaves 13.42 GiB less of the"
        " device beside the request, 572.62 MiB of 139.80 GiB, and the graphs took 1,013.76 MiB in A"
    ),
    ("ready_v1", "sampler_at_0996_v1"): (
        "verify.out_of_memory in verify: gpu_memory_utilization raised from 0.9 to 0.996 leaves 13.42 GiB less of the"
        " device beside the request, 572.62 MiB of 139.80 GiB; 274.88 MiB were missing"
    ),
    ("ready", "kv_pinned_too_large"): (
        "budget.pinned_too_large in size_kv: kv_cache_memory_bytes 139.70 GiB, not given in A, 30.89 GiB more than in A"
    ),
    ("ready", "not_enough_free"): (
        "device.not_enough_free in init_device: 98.77 GiB were free at the start, at least 125.82 GiB in A"
    ),
    ("ready", "no_available_memory"): (
        "budget.negative in size_kv: nothing is left for the KV cache; gpu_memory_utilization lowered from 0.9 to 0.1,"
        " though no number of both shows it"
    ),
    ("ready", "profile_out_of_memory"): (
        "profile.out_of_memory in profile_activations: the largest step does not fit; max_num_batched_tokens 1500000,"
        " not given in A, though no number of both shows it"
    ),
    ("ready", "weights_exceed_v2"): (
        "weights.exceed_device in load_weights: the weights have at least 139.05 GiB, 15.00 GiB in A"
    ),
}


@pytest.mark.parametrize(("good_log", "bad_log"), LOGS)
def test_logs(good_log: str, bad_log: str):
    """Of two text logs the cause is named with the setting that differs, and the numbers of both."""
    found = compared(logged(good_log), logged(bad_log))

    assert (found.worse, found.why) == ("b", LOGS[good_log, bad_log])
    assert compared(logged(bad_log), logged(good_log)).worse == "a"


def test_what_logs_cannot_tell():
    """A log has no snapshots, whole seconds, and figures that only one of them prints: all of it is said."""
    found = compared(logged("ready"), logged("capture_at_0996"))
    unseen = "\n".join(found.unseen)

    assert "bytes by account: a text log has figures where its engine prints them, and no snapshots" in unseen
    assert "parts of a second in B: its log has whole ones" in unseen
    assert "figures that only A tells: graph_actual_bytes" in unseen
    assert all(not each.accounts for each in found.states)


def test_a_log_against_a_journal(good):
    """What has snapshots on one side only has their bytes on that side, and no difference."""
    found = compared(logged("ready"), good)
    loaded = next(each for each in found.states if each.state == "load_weights")

    assert {(each.a_after, each.moved_bytes) for each in loaded.accounts} == {(None, None)}
    assert any(each.b_after for each in loaded.accounts)
    assert any("an engine's are by its own definition" in each for each in found.unseen)


def test_figures_within_their_resolution_are_the_same():
    """0.01 GiB of two printed figures is what their digits hide."""
    (sources, verdict), name = logged("ready"), "weights_bytes"
    near, far = (
        attrs.evolve(verdict, figures=verdict.figures | {name: verdict.figures[name] + more * MIB}) for more in (10, 11)
    )

    assert not compared((sources, verdict), (sources, near)).figures
    (found,) = compared((sources, verdict), (sources, far)).figures
    assert (found.name, found.b - found.a) == (name, 11 * MIB)
    assert found.resolution == pytest.approx(0.01 * GIB, abs=2)


def test_states_are_compared_one_by_one(good):
    """Time, graphs, and bytes by account before and after, of a state; what one of them leaves out is None."""
    found = compared(good, counted(plan=eager(), engine={"weights": GIB}))
    states = {each.state: each for each in found.states}
    loaded = next(each for each in states["load_weights"].accounts if each.account == "torch pool default")

    assert list(states)[:4] == ["init_device", "load_weights", "profile_activations", "bootstrap_kv"]
    assert (loaded.a_before, loaded.b_before) == (0, 0)
    assert loaded.moved_bytes == 512 * MIB
    assert states["capture_graphs"].b is None
    assert states["capture_graphs"].a is not None
    assert states["capture_graphs"].a.captures == 5
    assert states["capture_graphs"].a.captured_bytes > 0
    assert ("plan", "throwaway", "eager") in {(each.name, each.a, each.b) for each in found.plan}
    assert any(each.account == "transient peak" for each in states["profile_activations"].accounts)


def test_states_of_the_second_stand_in_their_place(good):
    """A state that only the second start has stands behind the one that came before it."""
    found = compared(counted(plan=eager()), good)

    assert [each.state for each in found.states] == [
        "init_device",
        "load_weights",
        "profile_activations",
        "bootstrap_kv",
        "capture_throwaway",
        "teardown",
        "size_kv",
        "allocate_kv",
        "capture_graphs",
        "verify",
    ]


def test_a_smaller_kv_cache_is_worse(good):
    """Both ready with the same findings: the smaller KV cache is worse, and the share that made it so is named."""
    found = compared(good, counted(knobs=Knobs(utilization=0.8)))

    assert found.worse == "b"
    assert found.why.startswith("the KV cache is 410.00 MiB smaller: ")
    assert "gpu_memory_utilization lowered from 0.9 to 0.8 asks for 409.60 MiB less of the device" in found.why
    assert found.finding is None


def test_the_term_that_grew(good):
    """Where no setting differs, the term of the budget that took most more is named."""
    found = compared(good, counted(engine={"sampler": 600 * MIB}))

    assert found.worse == "b"
    assert "headroom takes 600.00 MiB more: 728.00 MiB, 128.00 MiB in A" in found.why
    assert ("headroom", -128 * MIB, -728 * MIB) in {(each.name, each.a, each.b) for each in found.budget}


def ready(rank: int | None = None, load_s: float = 10.0, **started: Any) -> Source:
    """A start that loads and is ready, without any reading of memory."""
    end = round(load_s * S)
    events = [
        (0, RunStarted(**started)),
        (0, StateEntered(state="load_weights")),
        (end, StateLeft(state="load_weights")),
        (end, StateEntered(state="verify")),
        (end + S, StateLeft(state="verify")),
        (end + S, RunFinished(end="ready", state="verify")),
    ]
    name = "engine-1" if rank is None else f"rank-{rank:05d}"
    records = [
        Record(run="run", process=name, rank=rank, seq=seq, t=t, kind=each.kind, event=each)
        for seq, (t, each) in enumerate(events)
    ]
    return Source(run=fold(records))


def judged(*sources: Source) -> tuple[Sequence[Source], Verdict]:
    """Sources and what is said of them."""
    return sources, judge(sources, source="journal", origin=None)


@pytest.mark.parametrize(("load_s", "worse"), [(10, None), (12.1, None), (12.3, "b"), (7, "a")])
def test_a_longer_start_is_worse(load_s: float, worse: str | None):
    """Both alike but for their time: longer by more than a fifth and a second is worse, and the state is named."""
    found = compared(judged(ready()), judged(ready(load_s=load_s)))

    assert found.worse == worse
    if worse == "b":
        assert found.why == "B takes 13.3 s in its states, A 11.0 s: load_weights took 2.3 s longer"


def said(verdict: Verdict, *findings: tuple[str, str, str], **more: Any) -> Verdict:
    """The verdict with other findings: code, severity, state."""
    found = [
        RankedFinding(finding=Finding(code=code, severity=severity, state=state, message=f"{code} here"))  # type: ignore[arg-type]
        for code, severity, state in findings
    ]
    return attrs.evolve(verdict, findings=tuple(found), **more)


@pytest.mark.parametrize(
    ("a", "b", "worse", "code"),
    [
        ([], [("workspace.grew", "warning", "verify")], "b", "workspace.grew"),
        ([], [("workspace.grew", "note", "verify")], None, None),
        ([("workspace.grew", "warning", "verify")], [("workspace.grew", "error", "verify")], "b", "workspace.grew"),
        ([("workspace.grew", "error", "verify")], [("workspace.grew", "warning", "verify")], "a", "workspace.grew"),
        (
            [("workspace.grew", "warning", "verify")],
            [("workspace.grew", "warning", "verify"), ("device.drift", "warning", "size_kv")],
            "b",
            "device.drift",
        ),
        (
            [("graphs.estimate_short", "warning", "size_kv")],
            [("graphs.estimate_short", "error", "size_kv"), ("verify.replay_differs", "error", "verify")],
            "b",
            "verify.replay_differs",
        ),
        (
            [],
            [("device.drift", "warning", "size_kv"), ("kv.addresses_moved", "error", "verify")],
            "b",
            "kv.addresses_moved",
        ),
    ],
)
def test_the_first_finding_that_the_other_lacks(a: list[Any], b: list[Any], worse: str | None, code: str | None):
    """Errors come before warnings, what the other does not have at all before what it takes less gravely."""
    sources, verdict = judged(ready())
    found = compared((sources, said(verdict, *a)), (sources, said(verdict, *b)))

    assert found.worse == worse
    assert (None if found.finding is None else found.finding.finding.code) == code


def failing(state: str, code: str) -> Verdict:
    """Of a start that failed in a state."""
    return said(judged(ready())[1], (code, "error", state), outcome="error", failed_state=state)


def test_of_two_that_failed_the_earlier_is_worse():
    """Whoever came further is better."""
    sources = [ready()]
    early, late = failing("size_kv", "budget.negative"), failing("verify", "verify.out_of_memory")

    assert compared((sources, early), (sources, late)).worse == "a"
    assert compared((sources, late), (sources, early)).why.startswith("budget.negative in size_kv: ")
    assert compared((sources, late), (sources, late)).why == "both end alike: A failed in verify, B failed in verify"


def test_neither_is_worse():
    """Two failures in one state, each of its own, are no better than each other."""
    sources = [ready()]
    a, b = failing("verify", "verify.replay_differs"), failing("verify", "verify.out_of_memory")
    found = compared((sources, a), (sources, b))

    assert found.worse is None
    assert found.why == (
        "neither is worse: A failed in verify (verify.replay_differs), B failed in verify (verify.out_of_memory)"
    )


def test_versions_and_devices():
    """Versions, variables, device and host that differ are listed; what explains nothing is not brought up for it."""
    a = judged(ready(host="a", device="card 1", versions={"torch": "2.11"}, environment={"X": "1"}, engine="e"))
    sources, verdict = judged(ready(host="b", device="card 1", versions={"torch": "2.12"}, engine="e"))
    found = compared(a, (sources, said(verdict, ("verify.replay_differs", "error", "verify"))))

    assert [(each.name, each.a, each.b) for each in found.versions] == [("torch", "2.11", "2.12")]
    assert [(each.name, each.a, each.b) for each in found.environment] == [("X", "1", None)]
    assert [each.name for each in found.device] == ["host"]
    assert found.why.endswith("torch, X differ, and no number ties any of them to that")


def test_a_version_that_reserves_nothing():
    """Where the engine's version differs and with it what is reserved for graphs, the version is named."""
    (sources, verdict), (bad, bad_verdict) = counted(), counted(knobs=Knobs(utilization=1.0, graph_estimate="none"))
    versions = [attrs.evolve(each, engine_version=name) for each, name in ((verdict, "1"), (bad_verdict, "2"))]
    same = bad[0].run.started
    assert same is not None
    del same.knobs["graph_estimate"]  # type: ignore[attr-defined]
    broken = said(versions[1], ("graphs.not_reserved", "error", "size_kv"))
    found = compared((sources, versions[0]), (bad, broken))

    assert (found.ties[0].kind, found.ties[0].name) == ("version", "engine_version")
    assert "engine_version changed from 1 to 2: 0 B reserved for the graphs" in found.why


def test_deadlines_and_bounds_are_part_of_a_plan():
    """A deadline, or the bound of an edge, that differs is one row."""
    found = compared(
        counted(plan=throwaway(retries=1)), counted(plan=throwaway(retries=2).with_deadlines({"verify": 5}))
    )
    rows = {each.name: (each.a, each.b) for each in found.plan}

    assert rows["deadline of verify"] == (None, "5 s")
    assert rows["verify, shrink"] == ("recover to teardown, 1 times", "recover to teardown, 2 times")


def test_the_rank_that_failed_is_compared():
    """Of starts with many ranks the states of the rank that failed are compared, in both."""
    ranks = [ready(rank, load_s=10 + rank) for rank in range(4)]
    sources, verdict = judged(*ranks)
    broken = said(
        verdict, ("state.raised", "error", "verify"), outcome="error", failed_state="verify", failed_rank="rank 2"
    )
    found = compared((sources, verdict), (sources, broken))

    assert found.compared == ("rank 2", "rank 2")
    assert found.states[0].a is not None
    assert found.states[0].a.duration_ns == 12 * S
    assert "other processes of B: the states of rank 2 are compared" in found.unseen


def test_check_that_failed_a_start(good):
    """A start that a check ended is worse by that check's finding."""

    class Engine(CountingEngine):
        def release_kv(self) -> None:
            """Kept."""

    boot, engine = counting_start()
    with pytest.raises(CheckFailed):
        boot.run(Engine(device=engine.device))
    found = compared(good, ([Source(run=boot.history)], verdict_of(boot)))

    assert found.why.startswith("teardown.kv_alive in teardown: ")
    assert found.why.endswith("; no setting, version, plan or device differs")


def test_as_data(good):
    """Everything is plain data; findings have code, place and message."""
    data = orjson.loads(orjson.dumps(compared(good, counted(knobs=Knobs(utilization=0.3))).as_data()))

    assert data["worse"] == "b"
    assert data["finding"]["code"] == data["only_b"][0]["code"] == "budget.negative"
    assert data["ties"][0]["name"] == "gpu_memory_utilization"
    assert {"name": "gpu_memory_utilization", "a": 0.9, "b": 0.3} in data["settings"]
    assert [each["state"] for each in data["states"]][:2] == ["init_device", "load_weights"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -5, 10**30, True, "0.9", [0.9]])
def test_settings_that_make_no_sense(good, value: Any):
    """A journal may hold any setting: a share that is none ties nothing, and breaks nothing."""
    sources, verdict = good
    run = fold([])
    run.started = attrs.evolve(sources[0].run.started, knobs={"gpu_memory_utilization": value, "capture_sizes": value})
    figures = dict(verdict.figures) | ({"total_bytes": value} if isinstance(value, float) else {})
    worse = attrs.evolve(said(verdict, ("graphs.not_reserved", "error", "size_kv")), figures=figures)

    assert compared(good, ([Source(run=run)], worse)).worse == "b"
