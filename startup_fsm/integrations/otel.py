"""
Starts in OpenTelemetry: a hook that traces a start while it runs, and an exporter for journals of starts that are over.

    pip install 'startup-fsm[otel]'

A process that is killed exports nothing that was open; its journal, exported afterwards, has it all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

from startup_fsm.errors import EngineImportError

try:
    from opentelemetry import trace
    from opentelemetry.context import Context, get_current
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    from startup_fsm.integrations.otel_spans import (
        OURS,
        SERVICE_INSTANCE_ID,
        SERVICE_NAME,
        SERVICE_VERSION,
        Spans,
        Value,
        conclude,
        place_attributes,
        text,
    )
except ImportError as missing:
    _MISSING: Final = f"tracing starts needs {missing.name}, which is not installed"
    raise EngineImportError(_MISSING, hint="pip install 'startup-fsm[otel]'") from missing

from startup_fsm.diagnose import diagnose
from startup_fsm.events import Record, RunFinished, RunStarted
from startup_fsm.fold import RunState
from startup_fsm.sources import Source
from startup_fsm.starts import Process, Start
from startup_fsm.verdict import Verdict
from startup_fsm.verdicts import judge

#: Name of the instrumentation scope.
SCOPE: Final = "startup_fsm"

#: Variable by which a launcher hands the trace that it is in to the processes that it starts.
TRACEPARENT: Final = "TRACEPARENT"

#: Events of a span, attributes of each.
_MOST: Final = 4_096


class Tracing:
    """
    A hook: the start as a span with its states, as it runs, through the tracer provider of the application.

    The parent is the span that is open where the start begins, else the one that the variable ``TRACEPARENT`` names.
    Hooks are not told of each other: their spans are only in what :func:`export` makes of the journal.

    Args:
        provider: Where spans go; None takes the global one.
        context: What the start is a part of; None takes what is said above.
    """

    name = "otel"
    policy = "warn"  # a start is worth more than its trace

    def __init__(self, provider: trace.TracerProvider | None = None, *, context: Context | None = None) -> None:
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=provider)
        self._context = context
        self._spans: Spans | None = None
        self._history = RunState()

    def on_event(self, *, record: Record, **future: Any) -> None:
        """One more event of the start."""
        event = record.event
        if isinstance(event, RunStarted):
            self.close()
            # The provider's resource is the application's: where the start runs is said on its span.
            self._history = RunState()
            self._spans = Spans(self._tracer, parent=self._parent(), attributes=place_attributes(event))
        self._history.apply(record)
        if self._spans is None:
            return
        self._spans.take(record)
        if isinstance(event, RunFinished):
            self._end()

    def _parent(self) -> Context:
        if self._context is not None:
            return self._context
        here = get_current()
        if not trace.get_current_span(here).get_span_context().is_valid and TRACEPARENT in os.environ:
            return TraceContextTextMapPropagator().extract({"traceparent": os.environ[TRACEPARENT]}, here)
        return here

    def _end(self) -> None:
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.close(diagnose([Source(run=self._history)]))

    def close(self) -> None:
        """End the spans of a start that was given up without an end; harmless when repeated."""
        spans, self._spans = self._spans, None
        if spans is not None:
            spans.close(None)


def export(starts: Iterable[Start], exporter: SpanExporter) -> int:
    """
    Export starts that were read, with the times that their journals have; how many spans there were.

    The same journal gives the same trace and span ids. A start of several processes is one trace: a span for the run,
    below it one for each process. Where a log has no wall clock, its last event counts as now.

    Args:
        starts: As :func:`startup_fsm.reading.read_starts` gives them.
        exporter: Where they go; the caller shuts it down.

    Raises:
        RuntimeError: The exporter refuses them.
    """
    count = 0
    for start in starts:
        spans = _spans_of(start)
        if exporter.export(spans) is not SpanExportResult.SUCCESS:
            msg = f"the exporter refused the {len(spans)} spans of run {start.run}, attempt {start.attempt}"
            raise RuntimeError(msg)
        count += len(spans)
    return count


def _spans_of(start: Start) -> Sequence[ReadableSpan]:
    memory, ids = InMemorySpanExporter(), _Ids(start)
    whole = judge(start.sources, source=start.source, origin=start.origin)
    walls, is_inferred = _walls(start)
    clock: dict[str, Value] = {f"{OURS}.clock": "inferred"} if is_inferred else {}
    run, parent = None, Context()
    if len(start.processes) > 1:
        name: dict[str, Value] = {f"{OURS}.run": text(start.run), f"{OURS}.attempt": start.attempt, **clock}
        instance = {SERVICE_INSTANCE_ID: text(f"{start.run}.{start.attempt}")}
        tracer = _tracer(memory, ids, Resource.create({**_service(start.processes[0]), **instance}))
        run = tracer.start_span("run", parent, attributes=name, start_time=min(walls))
        parent = trace.set_span_in_context(run, parent)
    ends = []
    for process, wall in zip(start.processes, walls, strict=True):
        tracer = _tracer(memory, ids, Resource.create(resource_attributes(process)))
        spans = Spans(tracer, parent=parent, wall_ns=wall, attributes=clock)
        for record in process.journal.records:
            spans.take(record)
        spans.close(whole if run is None else _own(process, start))
        ends.append(spans.end_ns)
    if run is not None:
        conclude(run, whole, max(ends))
        run.end(max(ends))
    return memory.get_finished_spans()


def _own(process: Process, start: Start) -> Verdict | None:
    """On one process among others; None where its log only says no more of it."""
    own = judge([process.as_source()], source=start.source, origin=start.origin)
    return None if own.outcome == "incomplete" and process.as_source().is_imported else own


def _walls(start: Start) -> tuple[list[int], bool]:
    """Wall clocks at ``t = 0`` of all processes, ns since the epoch, and whether they had to be made up."""
    told = [None if each.history.started is None else each.history.started.wall_ns for each in start.processes]
    known = [wall for wall in told if wall is not None]
    last = max((each.history.last_t or 0 for each in start.processes), default=0)
    first = min(known) if known else time.time_ns() - last
    return [first if wall is None else wall for wall in told], not known


def resource_attributes(process: Process) -> dict[str, Value]:
    """What the semantic conventions call the process that was started, for the resource of its spans."""
    started, history = process.history.started, process.history
    instance = text(f"{history.run}/{history.process}.{history.attempt}")
    place = {} if started is None else place_attributes(started)
    return {**_service(process), SERVICE_INSTANCE_ID: instance, **place}


def _service(process: Process) -> dict[str, Value]:
    started = process.history.started
    found = {} if started is None else {SERVICE_NAME: started.engine, SERVICE_VERSION: started.engine_version}
    return {name: text(value) for name, value in found.items() if value}


def _tracer(exporter: SpanExporter, ids: IdGenerator, resource: Resource) -> trace.Tracer:
    # Of its own in all: what the environment says of sampling and limits is meant for what happens now.
    limits = SpanLimits(max_events=_MOST, max_span_attributes=_MOST, max_event_attributes=_MOST)
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=resource,
        shutdown_on_exit=False,
        id_generator=ids,
        span_limits=limits,
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer(SCOPE)


class _Ids(IdGenerator):
    """Ids that follow from the run: whoever exports a journal twice has one trace."""

    def __init__(self, start: Start) -> None:
        self._name = f"{start.run}|{start.attempt}"
        self._count = 0

    def generate_span_id(self) -> int:
        """The next of this start."""
        self._count += 1
        return self._digest(f"{self._name}|{self._count}", 8)

    def generate_trace_id(self) -> int:
        """That of the run and attempt."""
        return self._digest(self._name, 16)

    def _digest(self, name: str, size: int) -> int:
        return int.from_bytes(blake2b(name.encode("utf-8", "backslashreplace"), digest_size=size).digest()) or 1
