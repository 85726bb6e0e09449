"""The trace: held against a checker of its format, and against what `time` says of the same start."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from startup_fsm.budget import Knobs
from startup_fsm.cli import main
from startup_fsm.codec import CODEC
from startup_fsm.events import (
    CheckJudged,
    Event,
    FigureRead,
    GraphCaptured,
    HookFailed,
    HookRan,
    OomObserved,
    Origin,
    PartEntered,
    RanksAgreed,
    Record,
    RunFinished,
    RunStarted,
    StateEntered,
    StateFailed,
    StateLeft,
)
from startup_fsm.findings import Finding
from startup_fsm.fold import fold
from startup_fsm.journal import Journal
from startup_fsm.memory import GIB, MIB
from startup_fsm.reading import read_starts
from startup_fsm.reports.perfetto import trace_of
from startup_fsm.reports.trace_slices import Slice, nested
from startup_fsm.starts import Process, Start
from startup_fsm.testing import counting_start
from startup_fsm.verdicts import judge

RUN = "20300101T000000Z-00000000"
PHASES = set("MBECistf")
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name"}
HOSTILE = "\x1b[31mred\u202e\ud800\r\n\u2028end"

Track = tuple[int, int]
Span = tuple[dict[str, Any], int, int]


def ns(ts: float) -> int:
    """Microseconds with fractions as whole ns; nothing may be lost."""
    whole = round(ts * 1_000)
    assert whole / 1_000 == ts
    return whole


def checked(trace: dict[str, Any]) -> dict[Track, list[Span]]:
    """Hold a trace against the format; its slices by track, each with its begin and end in ns."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    json.dumps(trace, allow_nan=False)
    last, stacks = 0.0, defaultdict[Track, list[tuple[dict[str, Any], int]]](list)
    slices: dict[Track, list[Span]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phase = event["ph"]
        assert phase in PHASES
        assert type(event["pid"]) is int
        if phase == "M":
            assert event["name"] in METADATA
            assert event["args"]
            continue
        assert event["ts"] >= last, "events are sorted by time"
        last = event["ts"]
        track = event["pid"], event.get("tid", 0)
        if phase == "B":
            assert event["name"]
            assert isinstance(event["args"], dict)
            stacks[track].append((event, ns(event["ts"])))
        elif phase == "E":
            begin, began = stacks[track].pop()
            slices[track].append((begin, began, ns(event["ts"])))
        elif phase == "C":
            assert all(type(value) in (int, float) for value in event["args"].values())
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert stacks[track], "a flow passes through a slice"
            flows[event["id"]].append(event)
    assert not any(stacks.values()), "every begin has its end"
    for stations in flows.values():
        assert [each["ph"] for each in stations] == ["s", *"t" * (len(stations) - 2), "f"]
        assert len({(each["name"], each["cat"]) for each in stations}) == 1
        assert stations[-1]["bp"] == "e"
    return slices


def process(*events: Event, rank: int = 0, t: list[int | None] | None = None, origin: Origin | None = None) -> Process:
    """One process with an event every millisecond, or at the times given."""
    times = [seq * 1_000_000 for seq in range(len(events))] if t is None else t
    records = tuple(
        Record(
            run=RUN,
            process=f"rank-{rank:05d}",
            rank=rank,
            seq=seq,
            t=times[seq],
            kind=event.kind,
            event=event,
            origin=origin,
        )
        for seq, event in enumerate(events)
    )
    return Process(journal=Journal("j", records), history=fold(records))


def trace(*processes: Process) -> dict[str, Any]:
    """Of one start."""
    start = Start(run=RUN, attempt=1, source="journal", origin="j", is_whole=True, processes=processes)
    return trace_of([start], [judge(start.sources, source="journal", origin="j")])


def named(trace: dict[str, Any], phase: str, category: str = "") -> list[dict[str, Any]]:
    """Events of one phase, and of one category."""
    return [each for each in trace["traceEvents"] if each["ph"] == phase and (not category or each["cat"] == category)]


class Slow:
    """A hook at every moment."""

    name = "slow"

    def before_state(self, **future: Any) -> None:
        pass

    def after_state(self, **future: Any) -> None:
        pass

    def on_event(self, **future: Any) -> None:
        pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A start that is ready, with hooks and 51 graphs, and one that ran out of memory."""
    root = tmp_path_factory.mktemp("runs")
    boot, engine = counting_start(journal=root / "ready", hooks=[Slow()], engine={"sizes": range(1, 52)})
    boot.run(engine)
    knobs = Knobs(utilization=1.0, graph_estimate="none")
    boot, engine = counting_start(journal=root / "oom", knobs=knobs, engine={"row": 16 * MIB})
    with pytest.raises(RuntimeError):
        boot.run(engine)
    return {"ready": root / "ready", "oom": root / "oom"}


def traced(path: Path, tmp_path: Path) -> dict[str, Any]:
    """As the verb writes it."""
    output = tmp_path / "trace.json"
    assert main(["trace", str(path), "-o", str(output)]) == 0
    return orjson.loads(output.read_bytes())


def timed(path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Processes as `time --json` has them."""
    capsys.readouterr()
    assert main(["time", str(path), "--json"]) == 0
    return [each for start in json.loads(capsys.readouterr().out)["starts"] for each in start["processes"]]


@pytest.mark.parametrize("which", ["ready", "oom"])
def test_same_totals_as_time(runs, which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each visit of a state takes what `time` says, and so does the whole; nothing is rounded."""
    made = traced(runs[which], tmp_path)
    (times,) = timed(runs[which], capsys)
    spans = checked(made)[1, 1]
    states = [(each["name"], began, end - began) for each, began, end in spans if each["cat"] == "state"]
    (whole,) = [end - began for each, began, end in spans if each["cat"] == "start"]
    (totals,) = made["otherData"]["processes"]

    assert states == [(each["state"], each["began_ns"], each["duration_ns"]) for each in times["states"]]
    assert whole == times["total_ns"] == totals["total_ns"]
    assert times["unattributed_ns"] == totals["unattributed_ns"] == whole - sum(took for _, _, took in states)


def test_slices_lie_in_each_other(runs, tmp_path: Path):
    """A start holds states, states hold parts and captures; hooks have tracks of their own."""
    made = traced(runs["ready"], tmp_path)
    slices = checked(made)
    around: dict[str, Counter[str]] = defaultdict(Counter)
    for each, began, end in slices[1, 1]:
        inside = [
            other
            for other, start, stop in slices[1, 1]
            if other is not each and start <= began and end <= stop and other["cat"] != each["cat"]
        ]
        around[each["cat"]].update(other["cat"] for other in inside)
    captures = [each["args"] for each, _, _ in slices[1, 1] if each["cat"] == "capture"]
    tracks = {each["args"]["name"] for each in named(made, "M") if each["name"] == "thread_name"}

    assert around["state"]["start"] == 10
    assert around["part"]["state"] == 2
    assert around["capture"]["state"] == len(captures) == 102
    assert {each["name"] for each, _, _ in slices[1, 1] if each["cat"] == "start"} == {"start: ready"}
    assert tracks == {"states", "hook slow", "hook slow, on_event summed up"}


def test_captures_and_hooks_keep_what_they_took(runs, tmp_path: Path):
    """The arguments of captures and hooks add up to what the journal says of them."""
    made = traced(runs["ready"], tmp_path)
    (start,) = read_starts(runs["ready"])
    history = start.processes[0].history
    captures = [event.duration_ns for visit in history.visits for _, event in visit.captures]

    assert sum(each["args"]["duration_ns"] for each in named(made, "B", "capture")) == sum(captures)
    assert sum(each["args"]["duration_ns"] for each in named(made, "B", "hook")) == sum(
        event.duration_ns for _, event in history.hooks
    )
    assert sum(each["args"]["count"] for each in named(made, "B", "hook")) == sum(
        event.count for _, event in history.hooks
    )


def test_counters_are_the_accounts(runs, tmp_path: Path):
    """At each reading the accounts and what is free add up to the device."""
    made = traced(runs["ready"], tmp_path)
    (start,) = read_starts(runs["ready"])
    shots = [record for record in start.processes[0].journal.records if record.kind == "snapshot_taken"]
    sums: dict[float, int] = Counter()
    for each in named(made, "C"):
        sums[each["ts"]] += each["args"]["bytes"]

    assert set(sums.values()) == {4 * GIB}
    assert sorted(sums) == sorted({record.t / 1_000 for record in shots})
    assert {each["name"] for each in named(made, "C")} >= {"torch pool kv", "outside torch", "free"}


def test_findings_are_instants(runs, tmp_path: Path):
    """Each finding of the verdict stands where it shows; an error goes across its rank."""
    made = traced(runs["oom"], tmp_path)
    (start,) = read_starts(runs["oom"])
    verdict = judge(start.sources, source="journal", origin=None)
    marks = named(made, "i", "finding")
    (failed,) = [each for each, _, _ in checked(made)[1, 1] if each["args"].get("ended") == "failed"]

    assert sorted(each["name"] for each in marks) == sorted(each.finding.code for each in verdict.findings)
    assert {each["s"] for each in marks if each["args"]["severity"] == "error"} == {"p"}
    assert failed["args"]["category"] == "oom"
    assert "oom_observed" in {each["name"] for each in named(made, "i", "event")}


def ranks(*walls: int | None) -> list[Process]:
    """Ranks that agree twice, each with a clock of its own."""
    events: list[Event] = [
        StateEntered(state="size_kv"),
        RanksAgreed(topic="blocks", agreed=7, offers={"rank 0": 9, "rank 1": 7}, decided_by="rank 1"),
        RanksAgreed(topic="blocks", agreed=6),
        StateLeft(state="size_kv"),
        RunFinished(end="ready"),
    ]
    return [process(RunStarted(wall_ns=wall), *events, rank=rank) for rank, wall in enumerate(walls)]


def test_agreements_are_flows():
    """What ranks agreed on is one flow through all of them, in the order of time; the second time is another."""
    made = trace(*ranks(5_000_000, 0, 2_500_001))
    checked(made)
    flows: dict[int, list[tuple[str, int, int]]] = defaultdict(list)
    for phase in "stf":
        for each in named(made, phase):
            flows[each["id"]].append((phase, each["pid"], ns(each["ts"])))

    assert list(flows.values()) == [
        [("s", 2, 2_000_000), ("t", 3, 4_500_001), ("f", 1, 7_000_000)],
        [("s", 2, 3_000_000), ("t", 3, 5_500_001), ("f", 1, 8_000_000)],
    ]


def test_one_rank_alone_has_no_flow():
    """An agreement of which one journal is known is a slice without a flow."""
    made = trace(*ranks(0))
    checked(made)

    assert named(made, "s") == []
    assert [each["name"] for each in named(made, "B", "agreement")] == ["agree on blocks"] * 2


def test_ranks_are_on_one_line_of_time():
    """A rank whose journal began later stands later; one without a wall clock begins with the first."""
    slices = checked(trace(*ranks(1_790_000_000_000_000_000, 1_790_000_000_002_000_000, None)))

    assert [slices[pid, 1][-1][1] for pid in (1, 2, 3)] == [0, 2_000_000, 0]
    assert trace(*ranks(7, 9))["otherData"]["wall_ns"] == 7


def test_starts_of_one_path():
    """All starts are in it; those without a clock follow each other."""
    events = RunStarted(source="vllm"), StateEntered(state="load_weights"), StateLeft(state="load_weights")
    starts = [
        Start(run=f"log-{at}", attempt=1, source="vllm", origin="l", is_whole=True, processes=(process(*events),))
        for at in range(2)
    ]
    made = trace_of(starts, [judge(each.sources, source="vllm", origin="l") for each in starts])
    slices = checked(made)

    assert slices[1, 1][-1][1:] == (0, 2_000_000)
    assert slices[2, 1][-1][1:] == (2_000_000, 4_000_000)
    assert [each["args"]["name"] for each in named(made, "M") if each["name"] == "process_name"] == [
        "rank 0, log-0 attempt 1",
        "rank 0, log-1 attempt 1",
    ]


def test_start_that_was_killed():
    """A state that was never left is open to the last event."""
    killed = process(RunStarted(), StateEntered(state="load_weights"), PartEntered(state="load_weights", part="draft"))
    made = trace(killed)
    (part, state, start) = checked(made)[1, 1]

    assert [each[0]["name"] for each in (part, state, start)] == ["draft", "load_weights", "start: incomplete"]
    assert state[1:] == (1_000_000, 2_000_000)
    assert state[0]["args"]["ended"] == "open"


def test_times_in_whole_seconds():
    """The log of an engine has seconds, and many events in one: slices without length still lie in each other."""
    second = 1_000_000_000
    origin = Origin(source="vllm", line=3)
    events: list[Event] = [
        RunStarted(source="vllm", engine="vllm"),
        StateEntered(state="load_weights"),
        FigureRead(figure="weights_bytes", value=GIB),
        StateLeft(state="load_weights"),
        StateEntered(state="size_kv"),
        PartEntered(state="size_kv", part="request_fits"),
        StateLeft(state="size_kv"),
        StateEntered(state="capture_graphs"),
        RunFinished(end="ready"),
    ]
    made = trace(process(*events, t=[0, 0, second, second, second, second, second, second, 2 * second], origin=origin))
    spans = [(each["name"], began // second, end // second) for each, began, end in checked(made)[1, 1]]

    assert spans == [
        ("load_weights", 0, 1),
        ("request_fits", 1, 1),
        ("size_kv", 1, 1),
        ("capture_graphs", 1, 2),
        ("start: ready", 0, 2),
    ]
    assert [(each["name"], each["args"]) for each in named(made, "C")] == [("weights_bytes", {"bytes": GIB})]


def test_source_without_time():
    """Where nothing has a time there is nothing to draw, and that is no error."""
    made = trace(process(RunStarted(source="vllm"), StateEntered(state="load_weights"), t=[None, None]))

    assert checked(made) == {}
    assert made["otherData"]["processes"][0]["total_ns"] == 0


def test_hooks_that_overlap():
    """A hook that failed at its deadline, and returned after all, lies in what it took in the end."""
    made = trace(
        process(
            RunStarted(),
            StateEntered(state="verify"),
            HookFailed(hook="h", moment="before_state", policy="warn", error="late", duration_ns=500_000),
            HookRan(hook="h", moment="before_state", state="verify", duration_ns=1_600_000),
            HookRan(hook="h", moment="on_event", state="verify", duration_ns=9_000_000, count=3),
            HookRan(hook="h", moment="on_event", state="verify", duration_ns=9_000_000, count=3),
        )
    )
    slices = checked(made)

    assert [each[1:] for each in slices[1, 2]] == [(1_500_000, 2_000_000), (1_400_000, 3_000_000)]
    assert [each[1:] for each in slices[1, 3]] == [(0, 4_000_000), (4_000_000, 5_000_000)]


def test_captures_stay_in_their_state():
    """A capture that says it took longer than its state has lasted is cut, and its arguments keep what it said."""
    graph = GraphCaptured(state="capture_graphs", size=8, pool="0.1", duration_ns=90_000_000)
    made = trace(process(RunStarted(), StateEntered(state="capture_graphs"), graph, graph))
    spans = [each for each in checked(made)[1, 1] if each[0]["cat"] == "capture"]

    assert [each[1:] for each in spans] == [(1_000_000, 2_000_000), (2_000_000, 3_000_000)]
    assert {each[0]["args"]["duration_ns"] for each in spans} == {90_000_000}


def test_nothing_hostile_is_in_it():
    """Texts of a journal are cleaned at any depth, and the trace can be written."""
    finding = Finding(code=HOSTILE, severity="error", state=HOSTILE, message=HOSTILE)
    made = trace(
        process(
            RunStarted(engine=HOSTILE, device=HOSTILE, host=HOSTILE, label=HOSTILE),
            StateEntered(state=HOSTILE, edge=HOSTILE),
            PartEntered(state=HOSTILE, part=HOSTILE),
            GraphCaptured(state=HOSTILE, size=1, pool=HOSTILE, part=HOSTILE),
            RanksAgreed(topic=HOSTILE, agreed={HOSTILE: [HOSTILE]}, offers={HOSTILE: HOSTILE}),
            HookFailed(hook=HOSTILE, moment=HOSTILE, policy=HOSTILE, error=HOSTILE),
            CheckJudged(check=HOSTILE, state=HOSTILE, findings=(finding,)),
            OomObserved(message=HOSTILE, state=HOSTILE),
            StateFailed(state=HOSTILE, error_type=HOSTILE, category=HOSTILE, message=HOSTILE),
        )
    )
    checked(made)
    bad = ("Cc", "Cf", "Cs", "Zl", "Zp")

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for name, each in value.items():
                yield name
                yield from texts(each)
        elif isinstance(value, list):
            for each in value:
                yield from texts(each)
        elif isinstance(value, str):
            yield value

    assert not [text for text in texts(made) if any(unicodedata.category(each) in bad for each in text)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 4)), max_size=14))
@settings(max_examples=200)
def test_any_slices_are_nested(spans: list[tuple[int, int, int]]):
    """Whatever lies over each other comes out sorted, balanced, and properly nested; begins stay where they are."""
    slices = [
        Slice(begin=begin, end=begin + took, level=level, name="x", category="c", args={})
        for begin, took, level in spans
    ]
    events = list(nested(slices, 1, 1))
    found = checked({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}})[1, 1] if events else []

    assert sorted(began for _, began, _ in found) == sorted(begin for begin, _, _ in spans)
    for _, began, end in found:
        assert all(end <= start or stop <= began or (start <= began and end <= stop) or (began <= start and stop <= end) for _, start, stop in found)  # fmt: skip


def test_verb(runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It says what it wrote on stderr; with `-` the trace is on stdout; with --json what was written is data."""
    output = tmp_path / "trace.json"
    assert main(["trace", str(runs["ready"]), "-o", str(output)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"written: {output}, ")
    assert main(["trace", str(runs["ready"]), "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == orjson.loads(output.read_bytes())
    assert main(["trace", str(runs["ready"]), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(output)


def test_unwritable_output(runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A file that cannot be written is an error with a hint, and nothing is left behind."""
    assert main(["trace", str(runs["ready"]), "-o", str(tmp_path / "none" / "trace.json")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/none/trace.json: No such file or directory\nhint: ")
    assert list(tmp_path.iterdir()) == []


def test_attempts_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each attempt of a run is a process of the trace, on its place of the clock."""
    for _ in range(2):
        monkeypatch.setenv("STARTUP_FSM_RUN", RUN)
        monkeypatch.setenv("STARTUP_FSM_RUN_OWNER", "0")
        boot, engine = counting_start(journal=tmp_path, rank=0)
        boot.run(engine)
    made = traced(tmp_path / RUN, tmp_path)
    slices = checked(made)

    assert [each["args"]["name"] for each in named(made, "M") if each["name"] == "process_name"] == [
        f"rank 0, {RUN} attempt 1",
        f"rank 0, {RUN} attempt 2",
    ]
    assert slices[2, 1][-1][1] >= slices[1, 1][-1][2]


def test_unreadable(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """PATH is read as everywhere: what is no start is exit code 4, and nothing is written."""
    (tmp_path / "x").write_bytes(CODEC.encode(process(RunStarted()).journal.records[0])[:20])
    assert main(["trace", str(tmp_path / "x"), "-o", "-"]) == 4
    assert capsys.readouterr().out == ""
