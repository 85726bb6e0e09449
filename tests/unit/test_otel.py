"""Starts as OpenTelemetry spans, live and afterwards, through the SDK's own exporter in memory."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import host_attributes, process_attributes
from opentelemetry.semconv.attributes import error_attributes, exception_attributes, service_attributes
from opentelemetry.trace import StatusCode

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.events import (
    BudgetComputed,
    CheckJudged,
    Event,
    HookFailed,
    OomObserved,
    Origin,
    RanksAgreed,
    Record,
    RunFinished,
    RunStarted,
    SnapshotTaken,
    StateEntered,
    StateFailed,
    StateLeft,
)
from startup_fsm.findings import Finding
from startup_fsm.fold import fold
from startup_fsm.integrations import otel_spans
from startup_fsm.integrations.otel import Tracing, export, resource_attributes
from startup_fsm.journal import Journal
from startup_fsm.memory import GIB, MIB, Snapshot
from startup_fsm.plan import observed
from startup_fsm.reading import read_starts
from startup_fsm.starts import Process, Start
from startup_fsm.testing import counting_start, verdict_of

ROOT = Path(__file__).parents[2]
RUN = "20300101T000000Z-00000000"
WALL = 1_900_000_000_000_000_000
STATES = [
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


@pytest.fixture
def memory() -> InMemorySpanExporter:
    """Where spans go."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(memory: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """An application's own tracer provider."""
    made = TracerProvider(resource=Resource.create({"service.name": "app"}), shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(memory))
    yield made
    made.shutdown()


class Beside:
    """Another hook."""

    name = "beside"

    def before_state(self, **future: Any) -> None:
        pass


def process(*events: Event, rank: int = 0, times: Sequence[int | None] | None = None, **origin: Any) -> Process:
    """One process with an event every second."""
    records = tuple(
        Record(
            run=RUN,
            process=f"rank-{rank:05d}",
            rank=rank,
            seq=seq,
            t=seq * 10**9 if times is None else times[seq],
            kind=event.kind,
            event=event,
            origin=Origin(**origin) if origin else None,
        )
        for seq, event in enumerate(events)
    )
    return Process(journal=Journal("j", records), history=fold(records))


def start(*processes: Process) -> Start:
    """All of them."""
    return Start(run=RUN, attempt=1, source="journal", origin="j", is_whole=True, processes=processes)


def exported(*starts: Start) -> tuple[ReadableSpan, ...]:
    """Their spans, in the order in which they ended."""
    memory = InMemorySpanExporter()
    count = export(starts, memory)
    spans = memory.get_finished_spans()
    assert count == len(spans)
    return spans


def short_start(hook: Tracing, *, ends: bool = True) -> Bootstrap:
    """A start of one state."""
    boot = Bootstrap(
        plan=observed(), journal=None, device=SimulatedDevice(GIB), hooks=[hook], discover=False, progress=False
    )
    with boot.state("verify"):
        pass
    if ends:
        boot.finish()
    return boot


def one(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    """The only span of a name."""
    (found,) = [span for span in spans if span.name == name]
    return found


def children(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> list[ReadableSpan]:
    """Of one span, by their begin."""
    own = [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]
    return sorted(own, key=lambda span: (span.start_time, span.end_time))


def of(span: ReadableSpan, name: str) -> Any:
    """An attribute of ours."""
    return (span.attributes or {})[f"startup_fsm.{name}"]


def test_a_start_afterwards(tmp_path: Path):
    """The start, below it its states, below them captures and hooks, all with the times of the journal."""
    boot, engine = counting_start(journal=tmp_path, hooks=[Beside()])
    boot.run(engine)
    (read,) = read_starts(tmp_path)
    history = read.processes[0].history
    spans = exported(read)
    root = one(spans, "startup")
    states = children(spans, root)
    wall = history.started.wall_ns

    assert root.parent is None
    (ended,) = [record.t for record in read.processes[0].journal.records if record.kind == "run_finished"]
    assert (root.start_time, root.end_time) == (wall, wall + ended)
    assert [span.name for span in states] == STATES
    assert [(span.start_time, span.end_time) for span in states] == [
        (wall + visit.entered_t, wall + visit.ended_t) for visit in history.visits
    ]
    below = {span.name: [each.name for each in children(spans, span)] for span in states}
    assert below["capture_graphs"] == ["hook beside", *["capture"] * 5]
    assert all(names[0] == "hook beside" for names in below.values())
    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert of(root, "outcome") == "ready"
    assert of(root, "knob.gpu_memory_utilization") == 0.9


def test_captures_have_sizes_and_bytes(tmp_path: Path):
    """A capture lasts as long as the journal says, and ends when it was recorded."""
    boot, engine = counting_start(journal=tmp_path)
    boot.run(engine)
    (read,) = read_starts(tmp_path)
    last = read.processes[0].history.last("capture_graphs")
    spans = exported(read)
    captures = children(spans, one(spans, "capture_graphs"))

    assert [of(span, "size") for span in captures] == [16, 8, 4, 2, 1]
    assert [span.end_time - span.start_time for span in captures] == [event.duration_ns for _, event in last.captures]
    assert [of(span, "pool_delta_bytes") for span in captures] == [event.pool_delta_bytes for _, event in last.captures]


def test_memory_is_told_at_every_reading(tmp_path: Path):
    """Each snapshot is an event of its state; its last is on the state itself, account by account."""
    boot, engine = counting_start(journal=tmp_path)
    boot.run(engine)
    (read,) = read_starts(tmp_path)
    visit = read.processes[0].history.last("teardown")
    spans = exported(read)
    teardown = one(spans, "teardown")
    told = [event for event in teardown.events if event.name == "startup_fsm.memory"]

    assert {event.attributes["startup_fsm.memory.label"] for event in told} >= {"enter", "F1b", "F2", "leave"}
    assert of(teardown, "memory.free_bytes") == visit.after.free_bytes
    names = [name for name in teardown.attributes if name.startswith("startup_fsm.memory.account.")]
    assert sum(teardown.attributes[name] for name in names) == visit.after.used_bytes
    assert "startup_fsm.memory.account.outside_torch" in names


def test_a_start_that_failed(tmp_path: Path):
    """Its state has the exception, the start has the headline of the verdict; both are errors."""
    knobs = Knobs(utilization=1.0, graph_estimate="none")
    boot, engine = counting_start(journal=tmp_path, knobs=knobs, engine={"row": 16 * MIB})
    with pytest.raises(RuntimeError):
        boot.run(engine)
    spans = exported(*read_starts(tmp_path))
    root, failed = one(spans, "startup"), one(spans, "capture_graphs")
    (thrown,) = [event for event in failed.events if event.name == "exception"]

    assert root.status.status_code is failed.status.status_code is StatusCode.ERROR
    assert root.status.description.startswith("out of memory in capture_graphs: graphs.not_reserved: ")
    assert root.attributes["error.type"] == "graphs.not_reserved"
    assert (of(root, "outcome"), of(root, "failed_state")) == ("oom", "capture_graphs")
    assert failed.attributes["error.type"] == thrown.attributes["exception.type"]
    assert thrown.attributes["exception.message"].startswith(failed.status.description)
    assert "_decode" in thrown.attributes["exception.stacktrace"]
    assert thrown.timestamp == failed.end_time
    codes = [event.attributes["startup_fsm.finding.code"] for event in root.events if event.name.endswith(".finding")]
    assert codes == [each.finding.code for each in verdict_of(boot).findings]
    assert [span.status.status_code for span in spans if span.name == "load_weights"] == [StatusCode.UNSET]


def test_a_start_that_was_killed():
    """What was open ends with the last event, is marked as unfinished, and is an error; so is the start."""
    begun = [RunStarted(wall_ns=WALL), StateEntered(state="load_weights"), OomObserved(state="load_weights")]
    spans = exported(start(process(*begun)))
    root, state = one(spans, "startup"), one(spans, "load_weights")

    assert (state.start_time, state.end_time) == (WALL + 10**9, WALL + 2 * 10**9)
    assert of(state, "unfinished") is of(root, "unfinished") is True
    assert state.status.description == "ended without a trace: incomplete"
    assert root.status.description == (
        "incomplete in load_weights: run.ended_without_trace: the journal stops inside load_weights; nothing says why"
    )


def test_a_start_that_is_still_running():
    """A start that has a writer is unfinished and no error."""
    begun = process(RunStarted(wall_ns=WALL), StateEntered(state="load_weights"))
    alive = Process(journal=begun.journal, history=begun.history, is_alive=True)
    spans = exported(start(alive))

    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert {of(span, "unfinished") for span in spans} == {True}
    assert of(one(spans, "startup"), "outcome") == "running"


def test_a_failure_that_was_answered():
    """A state that failed is an error; the start that went on from it and came to ready is none."""
    events = [
        RunStarted(wall_ns=WALL),
        StateEntered(state="allocate_kv"),
        StateFailed(state="allocate_kv", error_type="torch.OutOfMemoryError", category="oom", message="m"),
        StateEntered(state="allocate_kv", visit=2),
        StateLeft(state="allocate_kv", visit=2),
        RunFinished(end="ready"),
    ]
    spans = exported(start(process(*events)))

    assert [span.status.status_code for span in spans] == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.UNSET]
    assert [of(span, "visit") for span in spans[:2]] == [1, 2]


def test_ranks_are_one_trace():
    """Several processes: a span for the run, below it one for each, on one clock, each with a resource of its own."""

    def rank(number: int, *more: Event) -> Process:
        begun = RunStarted(
            wall_ns=WALL + number, engine="demo", engine_version="1.2", host=f"host-{number}", pid=number
        )
        return process(begun, StateEntered(state="verify"), *more, rank=number)  # fmt: skip

    failed = StateFailed(state="verify", error_type="E", category="raised", message="it broke")
    spans = exported(start(rank(0, StateLeft(state="verify"), RunFinished(end="ready")), rank(1, failed)))
    run = one(spans, "run")
    starts = children(spans, run)

    assert run.parent is None
    assert (run.start_time, run.end_time) == (WALL, WALL + 3 * 10**9)
    assert run.status.description.startswith("failed in verify, rank 1: state.raised: ")
    assert [(span.name, of(span, "rank"), span.start_time) for span in starts] == [
        ("startup", 0, WALL),
        ("startup", 1, WALL + 1),
    ]
    assert [span.status.status_code for span in starts] == [StatusCode.UNSET, StatusCode.ERROR]
    assert {span.context.trace_id for span in spans} == {run.context.trace_id}
    assert [
        {name: value for name, value in span.resource.attributes.items() if not name.startswith("telemetry.")}
        for span in starts
    ] == [
        {
            "service.name": "demo",
            "service.version": "1.2",
            "service.instance.id": f"{RUN}/rank-0000{number}.1",
            "host.name": f"host-{number}",
            "process.pid": number,
        }
        for number in range(2)
    ]


def test_exported_twice_it_is_the_same_trace():
    """Ids follow from run and attempt, so a journal that is exported again is no second trace."""
    given = start(process(RunStarted(wall_ns=WALL), StateEntered(state="verify"), StateLeft(state="verify")))
    first, second = exported(given), exported(given)

    assert [span.context for span in first] == [span.context for span in second]
    assert len({span.context.span_id for span in first}) == len(first)


def test_a_log_without_a_wall_clock():
    """Where the source has no wall clock its last event counts as now, which is said."""
    read = process(
        RunStarted(source="vllm", engine="vllm"),
        StateEntered(state="load_weights"),
        StateLeft(state="load_weights"),
        times=[0, None, 5 * 10**9],
        source="vllm",
        line=1,
    )
    spans = exported(start(read))
    root, state = one(spans, "startup"), one(spans, "load_weights")

    assert of(root, "clock") == "inferred"
    assert root.end_time - root.start_time == 5 * 10**9
    assert state.start_time == root.start_time
    assert root.status.status_code is StatusCode.ERROR


def test_quiet_ranks_of_a_log_are_no_errors():
    """Of a log whose start came to ready, a rank that said no more is unfinished, not failed."""

    def rank(number: int, *more: Event) -> Process:
        return process(
            RunStarted(source="vllm", label=f"TP{number}"), StateEntered(state="verify"), *more, rank=number, source="vllm", line=1
        )  # fmt: skip

    spans = exported(start(rank(0, StateLeft(state="verify"), RunFinished(end="ready")), rank(1)))
    ranks = {of(span, "rank"): span for span in children(spans, one(spans, "run"))}

    assert {span.status.status_code for span in spans} == {StatusCode.UNSET}
    assert of(ranks[1], "unfinished") is True
    assert "startup_fsm.unfinished" not in ranks[0].attributes


def test_events_of_a_state():
    """Findings, decisions and the like are events of the state in which they came, with their own times."""
    finding = Finding(code="budget.unused", severity="note", state="size_kv", message="m", bytes=MIB)
    sized = BudgetComputed(
        available_bytes=GIB, block_bytes=MIB, blocks=1024, kv_bytes=GIB, requested_bytes=GIB, total_bytes=GIB, reachable_bytes=GIB
    )  # fmt: skip
    events = [
        RunStarted(wall_ns=WALL),
        StateEntered(state="size_kv"),
        sized,
        RanksAgreed(topic="blocks", agreed=1024, decided_by="rank 0"),
        CheckJudged(check="c", state="size_kv", findings=(finding,)),
        StateLeft(state="size_kv"),
    ]
    state = one(exported(start(process(*events))), "size_kv")
    told = {event.name.removeprefix("startup_fsm."): event for event in state.events}

    assert told["budget_computed"].attributes["startup_fsm.blocks"] == 1024
    assert told["ranks_agreed"].attributes["startup_fsm.decided_by"] == "rank 0"
    assert told["finding"].attributes["startup_fsm.finding.bytes"] == MIB
    assert told["finding"].attributes["startup_fsm.check"] == "c"
    assert [event.timestamp - WALL for event in state.events] == [2 * 10**9, 3 * 10**9, 4 * 10**9]


def test_a_hook_that_failed():
    """The span of a hook that raised is an error; that of its state is none."""
    failed = HookFailed(hook="lease", moment="before_state", policy="warn", error="E: gone", duration_ns=10**8)
    events = [RunStarted(wall_ns=WALL), StateEntered(state="verify"), failed, StateLeft(state="verify")]
    spans = exported(start(process(*events)))
    hook = one(spans, "hook lease")

    assert hook.status.description == "E: gone"
    assert hook.end_time - hook.start_time == 10**8
    assert one(spans, "verify").status.status_code is StatusCode.UNSET


def test_texts_and_numbers_that_the_wire_cannot_hold():
    """Lone surrogates, very long texts and integers beyond 64 bits are brought to what can be sent."""
    bad = "\ud800" + "x" * 10_000
    events = [
        RunStarted(wall_ns=WALL, engine=bad, host=bad, pid=1 << 70, knobs={bad: bad, "n": 1 << 70, "list": [1]}),
        StateEntered(state=bad),
        SnapshotTaken(state=bad, label=bad, snapshot=Snapshot(total_bytes=GIB, free_bytes=0)),
        CheckJudged(check=bad, state=bad, findings=(Finding(code=bad, severity="error", message=bad),)),
        StateFailed(state=bad, error_type=bad, category=bad, message=bad, where=(bad,)),
    ]
    for span in exported(start(process(*events))):
        found = [
            span.name,
            span.status.description or "",
            *span.attributes.values(),
            *span.resource.attributes.values(),
        ]
        found += [value for event in span.events for value in (event.name, *event.attributes.values())]
        for value in found:
            if isinstance(value, str):
                value.encode()
                assert len(value) < 2_100
            else:
                assert not isinstance(value, int) or abs(value) < 1 << 63


def test_what_the_environment_says_of_sampling_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    """An export of what is over is whole, however the tracing of this process is set."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "1")

    assert len(exported(start(process(RunStarted(wall_ns=WALL), StateEntered(state="verify"))))) == 2


class Refusing(SpanExporter):
    """An exporter that fails."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def test_an_exporter_that_fails():
    """It is said, with which start it was."""
    with pytest.raises(RuntimeError, match=f"refused the 1 spans of run {RUN}, attempt 1"):
        export([start(process(RunStarted()))], Refusing())


def test_live(memory: InMemorySpanExporter, provider: TracerProvider, tmp_path: Path):
    """The hook makes the spans of a start while it runs; they are those of its journal, but for other hooks."""
    boot, engine = counting_start(journal=tmp_path, hooks=[Tracing(provider), Beside()])
    boot.run(engine)
    live = memory.get_finished_spans()
    later = exported(*read_starts(tmp_path))

    def told(spans: Sequence[ReadableSpan]) -> list[tuple[Any, ...]]:
        return sorted((span.name, span.start_time, span.end_time) for span in spans if not span.name.startswith("hook"))

    assert told(live) == told(later)
    root = one(live, "startup")
    assert (root.attributes["host.name"], root.attributes["process.pid"]) == (os.uname().nodename, os.getpid())
    assert root.resource.attributes["service.name"] == "app"
    assert of(root, "outcome") == "ready"
    assert boot.history.hook_failures == []
    assert {event.hook for _, event in boot.history.hooks} == {"otel", "beside"}


def test_live_failure(memory: InMemorySpanExporter, provider: TracerProvider):
    """A start that fails ends its spans with what the doctor would say."""
    knobs = Knobs(utilization=1.0, graph_estimate="none")
    boot, engine = counting_start(hooks=[Tracing(provider)], knobs=knobs, engine={"row": 16 * MIB})
    with pytest.raises(RuntimeError):
        boot.run(engine)
    root = one(memory.get_finished_spans(), "startup")

    assert root.status.status_code is StatusCode.ERROR
    assert root.status.description == otel_spans.headline(verdict_of(boot))


def test_live_start_that_is_given_up(memory: InMemorySpanExporter, provider: TracerProvider):
    """A start without an end is closed by hand, or by the next start of the same hook; it is unfinished."""
    hook = Tracing(provider)
    short_start(hook, ends=False)
    assert [span.name for span in memory.get_finished_spans()] == ["verify"]
    short_start(hook)
    hook.close()
    hook.close()
    first, second = [span for span in memory.get_finished_spans() if span.name == "startup"]

    assert of(first, "unfinished") is True
    assert "startup_fsm.unfinished" not in second.attributes


def test_live_parents(memory: InMemorySpanExporter, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch):
    """A start is part of the span that is open, else of what TRACEPARENT names, else of what was given."""

    def parent_of(hook: Tracing) -> int | None:
        memory.clear()
        short_start(hook)
        root = one(memory.get_finished_spans(), "startup")
        return None if root.parent is None else root.parent.span_id

    tracer = provider.get_tracer("test")
    assert parent_of(Tracing(provider)) is None
    monkeypatch.setenv("TRACEPARENT", f"00-{7:032x}-{9:016x}-01")
    assert parent_of(Tracing(provider)) == 9
    with tracer.start_as_current_span("around") as around:
        assert parent_of(Tracing(provider)) == around.get_span_context().span_id
    given = trace.set_span_in_context(around, Context())
    assert parent_of(Tracing(provider, context=given)) == around.get_span_context().span_id
    monkeypatch.setenv("TRACEPARENT", "nonsense")
    assert parent_of(Tracing(provider)) is None


def test_live_without_a_provider():
    """Where an application has set up nothing, the hook costs nothing and breaks nothing."""
    boot = short_start(Tracing())

    assert boot.history.hook_failures == []
    assert [event.hook for _, event in boot.history.hooks] == ["otel", "otel"]


def test_names_are_those_of_the_conventions():
    """Names that the semantic conventions have are used as they have them."""
    assert (otel_spans.SERVICE_NAME, otel_spans.SERVICE_VERSION, otel_spans.SERVICE_INSTANCE_ID) == (
        service_attributes.SERVICE_NAME,
        service_attributes.SERVICE_VERSION,
        "service.instance.id",
    )
    assert otel_spans.HOST_NAME == host_attributes.HOST_NAME
    assert otel_spans.PROCESS_PID == process_attributes.PROCESS_PID
    assert otel_spans.ERROR_TYPE == error_attributes.ERROR_TYPE
    assert (otel_spans.EXCEPTION_TYPE, otel_spans.EXCEPTION_MESSAGE, otel_spans.EXCEPTION_STACKTRACE) == (
        exception_attributes.EXCEPTION_TYPE,
        exception_attributes.EXCEPTION_MESSAGE,
        exception_attributes.EXCEPTION_STACKTRACE,
    )


def test_resource_of_a_lost_beginning():
    """Of a journal whose beginning is lost only the instance is known."""
    assert resource_attributes(process(StateEntered(state="verify"))) == {
        "service.instance.id": "None/None.1",
    }


def test_without_the_extra(tmp_path: Path):
    """Where OpenTelemetry is not installed, importing the hook says what to install."""
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError('no', name='opentelemetry')\n")
    script = """
        try:
            import startup_fsm.integrations.otel
        except ImportError as error:
            print(error)
    """
    command = [sys.executable, "-c", "import textwrap; exec(textwrap.dedent('''" + script + "'''))"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    assert ran.stdout == (
        "tracing starts needs opentelemetry, which is not installed\nhint: pip install 'startup-fsm[otel]'\n"
    )


def test_importing_the_package_imports_nothing():
    """The package of integrations asks for no extra."""
    assert importlib.import_module("startup_fsm.integrations").__doc__
