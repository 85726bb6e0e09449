"""Diagnosis: outcome, failed state and causes of starts that really went wrong, in the promised form."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import orjson
import pytest

from startup_fsm import events
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.codec import CODEC
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.diagnose import diagnose
from startup_fsm.engine import Step
from startup_fsm.engines.counting import CountingEngine
from startup_fsm.errors import BudgetError, CheckFailed
from startup_fsm.events import Event, Record
from startup_fsm.figures import figures_of
from startup_fsm.findings import CODES
from startup_fsm.fold import RunState, fold
from startup_fsm.journal import read_journal
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import observed, single_capture
from startup_fsm.sources import Source
from startup_fsm.testing import counting_start, verdict_of
from startup_fsm.verdict import Verdict, report

SCHEMA = json.loads((Path(__file__).parents[1] / "doctor.schema.json").read_bytes())


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """A start collects garbage often; what is alive already need not be looked at each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def promised(*verdicts: Verdict) -> dict[str, Any]:
    """The JSON of verdicts, which keeps the promised schema whatever they say, and is plain."""
    data = orjson.loads(orjson.dumps(report(verdicts)))
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    return data  # type: ignore[no-any-return]


def run(**options: Any) -> Verdict:
    """A counting start to its end, and its verdict."""
    boot, engine = counting_start(progress=False, **options)
    try:
        boot.run(engine)
    except Exception:  # noqa: BLE001 - what it was is in the verdict
        assert boot.history.position == "ended"
    assert boot.history.violations == []
    verdict = verdict_of(boot)
    promised(verdict)
    return verdict


def codes(verdict: Verdict) -> list[tuple[str, str]]:
    """Codes and severities in their order."""
    assert all(each.finding.code in CODES for each in verdict.findings)
    return [(each.finding.code, each.finding.severity) for each in verdict.findings]


def tight(**knobs: Any) -> dict[str, Any]:
    """A start that takes the whole device."""
    return {"knobs": Knobs(utilization=1.0, **knobs), "engine": {"row": 4 * MIB}}


@pytest.mark.parametrize("plan", ["throwaway", "single_capture", "eager"])
@pytest.mark.parametrize("utilization", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("row", [4096, 512 * 1024, 4 * MIB])
def test_without_a_fault_nothing_is_above_a_note(plan: str, utilization: float, row: int) -> None:
    """Every plan comes to ready in its order, within its request, and nothing is worth a warning."""
    from startup_fsm.plan import PLANS

    verdict = run(plan=PLANS[plan](), knobs=Knobs(utilization=utilization), engine={"row": row})
    assert verdict.outcome == "ready"
    assert [each for each in codes(verdict) if each[1] != "note"] == []
    assert verdict.exit_code == 0
    figures = verdict.figures
    assert figures["used_peak_bytes"] <= figures["requested_bytes"]
    assert sum(each.bytes for each in verdict.ledger) == figures["total_bytes"] - _free(verdict)


def _free(verdict: Verdict) -> int:
    """Free bytes by the ledger: what no account holds."""
    return int(verdict.figures["total_bytes"]) - sum(each.bytes for each in verdict.ledger)


@pytest.mark.parametrize(
    ("options", "outcome", "state", "part", "first"),
    [
        ({"knobs": Knobs(utilization=0.25)}, "error", "size_kv", None, "budget.negative"),
        ({"knobs": Knobs(utilization=0.1)}, "error", "size_kv", None, "weights.exceed_request"),
        ({"engine": {"tokens": 100_000}}, "error", "size_kv", None, "budget.request_does_not_fit"),
        (tight(graph_estimate="none"), "oom", "capture_graphs", None, "graphs.not_reserved"),
        ({"knobs": Knobs(utilization=1.0, graph_share=0.5), "engine": {"row": 8 * MIB}}, "oom", "capture_graphs", None, "graphs.estimate_short"),
        ({"engine": {"weights": 5 * GIB}}, "oom", "load_weights", None, "weights.exceed_device"),
        ({"engine": {"activations": 5 * GIB}}, "oom", "profile_activations", None, "profile.out_of_memory"),
        ({"engine": {"block": 512 * MIB}}, "oom", "bootstrap_kv", None, "kv.out_of_memory"),
        ({"engine": {"row": GIB}}, "oom", "capture_throwaway", None, "capture.out_of_memory"),
        ({"knobs": Knobs(kv_cache_memory_bytes=3 * GIB)}, "oom", "allocate_kv", None, "budget.pinned_too_large"),
    ],
)  # fmt: skip
def test_faults_are_told_by_what_happened(
    options: dict[str, Any], outcome: str, state: str, part: str | None, first: str
) -> None:
    """Outcome, state and the first finding of a start that went wrong."""
    verdict = run(**options)
    assert (verdict.outcome, verdict.failed_state, codes(verdict)[0][0]) == (outcome, state, first)
    assert verdict.part == part
    assert verdict.exit_code == 3
    assert verdict.missing_bytes is not None
    assert verdict.missing_bytes > 0
    assert verdict.findings[0].evidence


@pytest.mark.parametrize("knobs", [{"graph_estimate": "none"}, {"graph_share": 0.5}, {"graph_estimate": MIB}])
@pytest.mark.parametrize("total", [4 * GIB, 5 * GIB + 3 * MIB])
def test_with_retries_a_start_reaches_ready_and_says_why(knobs: dict[str, Any], total: int) -> None:
    """By the plan's own edges, with a smaller KV cache; what failed before is a warning, not an error."""
    boot, engine = counting_start(total_bytes=total, **tight(retries=3, **knobs))
    boot.run(engine)
    verdict = verdict_of(boot)
    promised(verdict)
    assert verdict.outcome == "ready"
    assert verdict.failed_state is None
    assert codes(verdict)[0][0] in ("graphs.not_reserved", "graphs.estimate_short")
    assert all(severity != "error" for _, severity in codes(verdict))
    blocks = [computed.blocks for _, computed in boot.history.budgets]
    assert blocks == sorted(blocks, reverse=True)
    assert len(set(blocks)) > 1
    assert len(boot.history.recoveries) == len(blocks) - 1
    assert {chosen.edge for _, chosen in boot.history.recoveries} <= {"recover", "shrink"}
    assert boot.history.violations == []


class Greedy(CountingEngine):
    """Verifies more than any budget knows."""

    def verify(self, step: Step) -> None:
        self.device.malloc(self.device.memory.free_bytes + 2 * MIB)


class Hopeless(CountingEngine):
    """Verifies more than any device has."""

    def verify(self, step: Step) -> None:
        self.device.malloc(64 * GIB)


@pytest.mark.parametrize(("kind", "visits"), [(Greedy, 3), (Hopeless, 1)])
def test_retries_end(kind: type[CountingEngine], visits: int) -> None:
    """
    After their bound, or at once where no smaller KV cache would do; either way the start died of what really ran
    out, not of sizing for it.
    """
    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(journal=None, device=device, discover=False, progress=False, knobs=Knobs(retries=2))
    with pytest.raises(RuntimeError, match="out of memory"):
        boot.run(kind(device=device))
    verdict = verdict_of(boot)
    promised(verdict)
    assert (verdict.outcome, verdict.failed_state) == ("oom", "verify")
    assert codes(verdict)[-1] == ("verify.out_of_memory", "error") or codes(verdict)[0][0] == "verify.out_of_memory"
    assert len(boot.history.visits_of("verify")) == visits
    assert boot.history.violations == []
    said = [each.decision for _, each in boot.history.decisions]
    assert said.count("no_retry") == (kind is Hopeless)


class Faulty(CountingEngine):
    """Something goes wrong in a state of choice."""

    fault: Callable[[Faulty, str], None] = staticmethod(lambda *_: None)

    def load_weights(self, step: Step) -> None:
        self.fault(self, "load_weights")
        super().load_weights(step)

    def profile_activations(self, step: Step) -> None:
        super().profile_activations(step)
        self.fault(self, "profile_activations")

    def allocate_kv(self, step: Step, blocks: int) -> None:
        self.fault(self, step.state)
        super().allocate_kv(step, blocks)

    def capture(self, step: Step, size: int) -> None:
        self.fault(self, step.state)
        super().capture(step, size)

    def verify(self, step: Step) -> None:
        with step.part("sampler_warmup"):
            self.fault(self, "verify")
        super().verify(step)


def faulty(fault: Callable[[Faulty, str], None], **options: Any) -> tuple[Verdict, Bootstrap]:
    """A start with that fault."""
    device = SimulatedDevice(4 * GIB)
    engine = Faulty(device=device, **options.pop("engine", {}))
    object.__setattr__(engine, "fault", fault) if hasattr(type(engine), "__slots__") else setattr(
        engine, "fault", fault
    )
    boot = Bootstrap(journal=None, device=device, discover=False, progress=False, **options)
    try:
        boot.run(engine)
    except Exception:  # noqa: BLE001 - what it was is in the verdict
        assert boot.history.position == "ended"
    verdict = verdict_of(boot)
    promised(verdict)
    return verdict, boot


def test_a_neighbour_that_takes_is_named() -> None:
    """Between the budget and the KV cache another process took what was sized."""

    def take(engine: Faulty, state: str) -> None:
        if state == "allocate_kv":
            engine.device.neighbour_takes("pid 4711", engine.device.memory.free_bytes - GIB)

    verdict, _ = faulty(take)
    assert (verdict.outcome, verdict.failed_state) == ("oom", "allocate_kv")
    assert codes(verdict)[0] == ("device.neighbour_grew", "error")
    assert "pid 4711" in verdict.findings[0].finding.message
    advised = {change.setting: change.to for advice in verdict.advice for change in advice.changes}
    assert advised["other_process"] is None
    assert 0 < advised["gpu_memory_utilization"] < 0.9


def test_a_neighbour_that_frees_ends_nothing() -> None:
    """Memory that comes back while we profile is nobody's fault, and is said."""
    device = SimulatedDevice(4 * GIB, neighbours={"pid 7": GIB})

    class Watched(CountingEngine):
        def profile_activations(self, step: Step) -> None:
            super().profile_activations(step)
            self.device.neighbour_frees("pid 7")

    boot = Bootstrap(journal=None, device=device, discover=False, progress=False, knobs=Knobs(utilization=0.5))
    boot.run(Watched(device=device))
    verdict = verdict_of(boot)
    promised(verdict)
    assert verdict.outcome == "ready"
    assert codes(verdict)[0][0] == "device.neighbour_shrank"
    assert verdict.exit_code == 0


def test_an_engine_error_is_not_about_memory() -> None:
    """What the engine raised is named with its type and place."""

    def fail(_: Faulty, state: str) -> None:
        if state == "capture_throwaway":
            raise KeyError("metadata")

    verdict, _ = faulty(fail)
    assert (verdict.outcome, verdict.failed_state) == ("error", "capture_throwaway")
    assert codes(verdict)[0] == ("state.raised", "error")
    assert verdict.findings[0].finding.reason == "KeyError"
    assert any("test_diagnose.py" in str(each.get("text")) for each in verdict.findings[0].evidence)
    assert verdict.missing_bytes is None


def test_an_operation_that_may_not_be_captured() -> None:
    """CUDA's words are read as what they say."""

    def fail(engine: Faulty, state: str) -> None:
        if state == "capture_throwaway":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    verdict, _ = faulty(fail)
    assert codes(verdict)[0] == ("capture.failed", "error")
    assert {change.setting for advice in verdict.advice for change in advice.changes} == {"none", "enforce_eager"}


def test_the_sampler_that_was_not_profiled() -> None:
    """A part of verify that no profile covered, and that does not fit, is an incomplete profile."""

    class Hungry(CountingEngine):
        def profile_activations(self, step: Step) -> None:
            self._work(self.activations)

        def verify(self, step: Step) -> None:
            with step.part("sampler_warmup"):
                self._work(2 * GIB)

    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(journal=None, device=device, discover=False, progress=False, knobs=Knobs(utilization=0.95))
    with pytest.raises(RuntimeError, match="out of memory"):
        boot.run(Hungry(device=device))
    verdict = verdict_of(boot)
    assert (verdict.outcome, verdict.failed_state, verdict.part) == ("oom", "verify", "sampler_warmup")
    assert codes(verdict)[0] == ("profile.incomplete", "error")


def test_a_kv_cache_that_stays_is_a_failed_contract() -> None:
    """A buffer of the profiling KV cache that somebody keeps fails teardown, with the state and the code."""
    kept: list[Any] = []

    class Hoarder(CountingEngine):
        def release_kv(self) -> None:
            kept.extend(self._kv[:1])
            super().release_kv()

    device = SimulatedDevice(4 * GIB)
    boot = Bootstrap(journal=None, device=device, discover=False, progress=False)
    with pytest.raises(CheckFailed, match=r"teardown\.kv_alive"):
        boot.run(Hoarder(device=device))
    verdict = verdict_of(boot)
    assert (verdict.outcome, verdict.failed_state) == ("error", "teardown")
    assert codes(verdict)[0] == ("teardown.kv_alive", "error")
    kept.clear()


def killed_in(state: str, **facts: Any) -> Source:
    """A journal that stops inside a state."""
    boot, _ = counting_start(plan=observed())
    with boot.state("init_device"):
        pass
    records = [record(events.StateEntered(state=state), 1_000)]
    for each in records:
        boot.history.apply(each)
    return Source(run=boot.history, **facts)


def record(event: Event, seq: int = 0, t: int | None = 0) -> Record:
    return Record(run="r", process="p", seq=seq, t=t, kind=event.kind, event=event)


def test_a_journal_that_stops_is_incomplete() -> None:
    """Killed without a trace, still running, or stuck: told by who holds the file and by the stacks."""
    verdict = diagnose([killed_in("allocate_kv")])
    assert (verdict.outcome, verdict.failed_state) == ("incomplete", "allocate_kv")
    assert codes(verdict)[0] == ("run.ended_without_trace", "error")
    assert verdict.exit_code == 3
    running = diagnose([killed_in("allocate_kv", is_alive=True)])
    assert (running.outcome, running.failed_state, codes(running)) == ("running", None, [])
    stuck = diagnose([killed_in("allocate_kv", stacks=("a.py:1 main", "b.py:2 wait"))])
    assert (stuck.outcome, codes(stuck)[0]) == ("hang", ("state.stalled", "error"))
    assert any(each.get("text") == "b.py:2 wait" for each in stuck.findings[0].evidence)
    for each in (verdict, running, stuck):
        promised(each)


def test_a_stall_that_went_on_is_a_warning() -> None:
    """A state that passed its deadline and was left after all ended ready."""
    boot, engine = counting_start()
    boot.run(engine)
    boot.history.stalls.append((5, events.StateStalled(state="load_weights", deadline_ns=10**9, stack=("a: b",))))
    verdict = verdict_of(boot)
    assert verdict.outcome == "ready"
    assert codes(verdict) == [("state.stalled", "warning")]


def test_a_signal_is_an_interruption() -> None:
    """Ctrl-C in a state."""
    boot, _ = counting_start(plan=observed())
    with pytest.raises(KeyboardInterrupt), boot.state("load_weights"):
        raise KeyboardInterrupt
    boot.fail("interrupted")
    verdict = verdict_of(boot)
    promised(verdict)
    assert (verdict.outcome, verdict.failed_state) == ("interrupted", "load_weights")
    assert codes(verdict)[0] == ("run.ended_by_signal", "error")


def test_what_an_embedding_declared_is_said() -> None:
    """A start that was declared failed between two states says with what reason."""
    boot, _ = counting_start(plan=observed())
    with boot.state("load_weights"):
        pass
    boot.fail("the licence server said no")
    verdict = verdict_of(boot)
    promised(verdict)
    assert (verdict.outcome, verdict.failed_state) == ("error", "load_weights")
    assert codes(verdict) == [("state.raised", "error")]
    assert "the licence server said no" in verdict.findings[0].finding.message


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (("torn", "line 9, byte 5: no JSON", None), ("journal.torn", "note")),
        (("broken", "line 2, byte 5: no JSON", 3), ("journal.torn", "warning")),
        (("gap", "line 2, byte 5: seq 4", 4), ("journal.gap", "warning")),
        (("order", "line 2, byte 5: seq 4", 4), ("journal.gap", "warning")),
    ],
)
def test_what_is_wrong_with_the_file_is_said(problem: tuple[str, str, int | None], expected: tuple[str, str]) -> None:
    """Problems of the journal are findings with their place, and do not change the outcome."""
    boot, engine = counting_start()
    boot.run(engine)
    verdict = diagnose([Source(run=boot.history, problems=(problem,))])
    promised(verdict)
    assert verdict.outcome == "ready"
    assert codes(verdict) == [expected]
    assert verdict.problems == (problem[1],)


def ranks(*options: dict[str, Any]) -> list[Source]:
    """One start with a process for each."""
    sources = []
    for rank, each in enumerate(options):
        boot, engine = counting_start(rank=rank, progress=False, **each)
        try:
            boot.run(engine)
        except Exception:  # noqa: BLE001 - what it was is in the verdict
            assert boot.history.position == "ended"
        sources.append(Source(run=boot.history))
    return sources


def test_the_rank_that_failed_decides() -> None:
    """Outcome, figures and state are of the rank that failed; every rank has its figures."""
    verdict = diagnose(ranks({}, {"engine": {"weights": 5 * GIB}}, {}))
    data = promised(verdict)
    assert (verdict.outcome, verdict.failed_state, verdict.failed_rank) == ("oom", "load_weights", "rank 1")
    assert verdict.ranks == 3
    assert set(verdict.figures_by_rank) == {"rank 0", "rank 1", "rank 2"}
    assert verdict.figures == verdict.figures_by_rank["rank 1"]
    assert verdict.findings[0].rank == "rank 1"
    assert data["main"] == 0


def test_a_rank_that_only_followed_does_not_decide() -> None:
    """A rank that failed because a peer failed comes after the one that failed for a reason of its own."""
    first, second = ranks({}, {"engine": {"tokens": 100_000}})
    followed = RunState(run="r", rank=0, process="rank-00000", started=first.run.started)
    followed.peer_failures.append((3, events.PeerFailed(peer="rank-00001", state="size_kv", reason="x")))
    verdict = diagnose([Source(run=followed), second])
    promised(verdict)
    assert verdict.failed_rank == "rank 1"
    assert ("ranks.peer_failed", "error") in codes(verdict)


def test_all_ranks_ready_is_ready() -> None:
    """Then rank 0 speaks."""
    verdict = diagnose(ranks({}, {}))
    assert (verdict.outcome, verdict.failed_rank, verdict.exit_code) == ("ready", None, 0)
    assert verdict.figures == verdict.figures_by_rank["rank 0"]


def judged(*findings: events.judged.Finding, seq: int = 5) -> RunState:
    """A ready start in which a check said that."""
    state = fold([record(events.RunStarted()), record(events.StateEntered(state="verify"), 1)])
    state.checks.append((seq, events.CheckJudged(check="c", state="verify", findings=findings)))
    state.finished = (9, events.RunFinished(end="ready"))
    return state


def finding(code: str, severity: Any, **facts: Any) -> events.judged.Finding:
    return events.judged.Finding(code=code, severity=severity, message="m", **facts)


def test_findings_are_ranked_by_time_then_severity_then_bytes() -> None:
    """The earliest violated invariant first; at one place errors before warnings, then the larger; notes last."""
    state = judged(
        finding("device.drift", "note", evidence=(0,)),
        finding("budget.overrun", "warning", evidence=(4,), bytes=1),
        finding("budget.unused", "warning", evidence=(4,), bytes=2),
        finding("verify.replay_differs", "error", evidence=(4,)),
        finding("weights.second_copy", "warning", evidence=(2,)),
        finding("ranks.uneven", "error"),
        finding("weights.second_copy", "warning", evidence=(3,)),
    )
    assert [code for code, _ in codes(diagnose([Source(run=state)]))] == [
        "weights.second_copy",
        "verify.replay_differs",
        "budget.unused",
        "budget.overrun",
        "ranks.uneven",
        "device.drift",
    ]


def test_a_ready_start_with_an_error_finding_exits_with_two() -> None:
    """In mode observe a broken contract leaves the start ready and the verdict not clean."""
    verdict = diagnose([Source(run=judged(finding("verify.replay_differs", "error")))])
    assert (verdict.outcome, verdict.exit_code) == ("ready", 2)


def test_the_main_run_is_the_last_that_failed() -> None:
    """Of several starts the last that failed, else the last; none of none."""
    good, bad = run(), run(engine={"tokens": 100_000})
    assert promised(bad, good, bad, good)["main"] == 2
    assert promised(good, good)["main"] == 1
    assert promised()["main"] is None


def test_figures_are_those_of_the_contract() -> None:
    """Every figure has a name of the shared list and is a number that was measured."""
    figures = run().figures
    assert figures["total_bytes"] == 4 * GIB
    assert figures["weights_bytes"] == 512 * MIB
    assert figures["requested_bytes"] == int(4 * GIB * 0.9)
    assert figures["kv_cache_bytes"] == figures["gpu_blocks"] * MIB
    assert figures["graph_recurring_bytes"] <= figures["graph_actual_bytes"] + 4 * MIB
    assert all(type(value) in (int, float) for value in figures.values())
    assert figures_of(RunState()) == {}


def test_a_source_that_is_not_known_is_unknown() -> None:
    """An importer of a later version does not break the promise of the schema."""
    state = fold([record(events.RunStarted(source="lmdeploy")), record(events.RunFinished(end="ready"), 1)])
    assert diagnose([Source(run=state)]).source == "unknown"
    promised(diagnose([Source(run=state)]))


def test_a_verdict_from_the_file_is_that_of_the_live_start(tmp_path: Path) -> None:
    """What the doctor reads is what the start knew: the journal holds all of it."""
    for name, options in {
        "ready": {},
        "oom": tight(graph_estimate="none"),
        "arena": {"plan": single_capture()},
    }.items():
        boot, engine = counting_start(journal=tmp_path / name, progress=False, **options)
        try:
            boot.run(engine)
        except RuntimeError:
            assert name == "oom"
        assert boot.path is not None
        history = fold(read_journal(boot.path).records)
        assert history == boot.history
        assert diagnose([Source(run=history)]) == verdict_of(boot)


def test_budget_errors_carry_their_arithmetic() -> None:
    """The exception of the live start says the same as the verdict."""
    boot, engine = counting_start(engine={"tokens": 100_000})
    with pytest.raises(BudgetError) as caught:
        boot.run(engine)
    verdict = verdict_of(boot)
    assert caught.value.code == codes(verdict)[0][0]
    assert caught.value.missing_bytes == verdict.missing_bytes
    assert caught.value.fits["max_model_len"] == verdict.figures["estimated_max_model_len"]
    (change,) = [each for advice in verdict.advice for each in advice.changes if each.setting == "max_model_len"]
    assert change.to == caught.value.fits["max_model_len"]


def test_hostile_values_keep_the_promise() -> None:
    """A journal that holds odd but well-typed values still gives a verdict of the promised form."""
    lines = [
        events.RunStarted(plan=observed().as_data(), knobs={"gpu_memory_utilization": "much", "max_model_len": [1]}),
        events.StateEntered(state="smörgåsbord \ud800"),
        events.NoteAdded(note={"checkpoint_bytes": "1", "block_tokens": None}),
        events.ProbeRecorded(probe="replay", result={"equal": None}, skipped="\x00"),
        events.CheckJudged(check="c", state="x", findings=(finding("device.drift", "error", observed=float("nan")),)),
    ]
    records = [CODEC.decode(CODEC.encode(record(event, seq))) for seq, event in enumerate(lines)]
    verdict = diagnose([Source(run=fold(records))])
    promised(verdict)
    assert verdict.outcome == "incomplete"
    assert attrs.asdict(verdict)["failed_state"].startswith("smörgåsbord")
