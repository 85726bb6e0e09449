"""
The recovery ladder: what a start may do about a failure, least loss first, each rung by an edge of the plan.

    a smaller KV cache        the edges that go back to sizing          the knob retries
    fewer capture sizes       the edges fewer_sizes                     the knob fewer_sizes
    no graphs                 the edges no_graphs, and recover          the knob allow_eager

What a failed try taught stands in ``recovery_chosen``, so that a new process can go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from startup_fsm.errors import JournalError
from startup_fsm.events import DecisionMade, Event
from startup_fsm.fold import RunState, Visit, fold
from startup_fsm.journal import file_name, read_journal
from startup_fsm.measurement import Measurement
from startup_fsm.plan import FEWER_SIZES, NO_GRAPHS, Edge, Plan


@attrs.frozen(kw_only=True)
class Lessons:
    """
    What the tries of a start have taught.

    Attributes:
        sizes: Capture sizes that are left; None for all.
        without_graphs: Whether the graphs were given up.
        learned_graphs, shortfall: See ``Measurement``; bytes.
    """

    sizes: tuple[int, ...] | None = None
    without_graphs: bool = False
    learned_graphs: int = 0
    shortfall: int = 0

    @classmethod
    def of(cls, history: RunState) -> Lessons:
        """From the recoveries of an earlier attempt."""
        sizes: tuple[int, ...] | None = None
        without_graphs, learned, shortfall = False, 0, 0
        for _, chosen in history.recoveries:
            inputs = chosen.inputs
            given = inputs.get("capture_sizes")
            if isinstance(given, Sequence) and all(type(size) is int for size in given):
                sizes = tuple(given)
            without_graphs |= inputs.get("without_graphs") is True
            learned, shortfall = _number(inputs.get("learned_graph_bytes")), _number(inputs.get("shortfall_bytes"))
        return cls(sizes=sizes, without_graphs=without_graphs, learned_graphs=learned, shortfall=shortfall)

    def apply(self, measurement: Measurement) -> None:
        """Let a start go on with them."""
        measurement.learned_graphs = max(measurement.learned_graphs, self.learned_graphs)
        measurement.shortfall = max(measurement.shortfall, self.shortfall)
        if self.sizes is not None:
            measurement.sizes = tuple(size for size in measurement.sizes if size in self.sizes)
        if self.without_graphs:
            measurement.sizes = ()


def lessons_before(directory: Path, process: str, attempt: int) -> Lessons:
    """What the attempt before this one taught a process; nothing where its journal cannot be read."""
    try:
        journal = read_journal(directory / file_name(process, attempt - 1))
    except JournalError:
        return Lessons()
    return Lessons.of(fold(journal.records))


def rung(
    failed: Visit, history: RunState, plan: Plan, measurement: Measurement, record: Callable[[Event], None]
) -> Edge | None:
    """The edge that this process would take after a failed visit; None where there is none, or none is left."""
    cause = "" if failed.failed is None else failed.failed.category
    for edge in plan.recoveries(failed.state, cause):
        if not plan.allows(edge.source, edge.name, taken=history.edges_taken[edge.source, edge.name]):
            continue
        if edge.name == FEWER_SIZES or gives_up_graphs(edge, plan):
            if _has_graphs_to_give(edge, measurement):
                return edge
            continue
        lacking = measurement.lacking(history.budgets[-1][1]) if history.budgets else 0
        if cause != "oom" or lacking <= 0:
            return edge
        # It would only fail while sizing, and hide what really ran out.
        inputs = {"edge": edge.name, "lacking_bytes": lacking, **measurement.lessons()}
        reason = "no smaller KV cache would do"
        record(DecisionMade(decision="no_retry", reason=reason, state=edge.source, inputs=inputs))
    return None


def _has_graphs_to_give(edge: Edge, measurement: Measurement) -> bool:
    if edge.name == FEWER_SIZES and len(measurement.sizes) == 1:
        return False
    return edge.source != "verify" or measurement.has_real_graphs


def gives_up_graphs(edge: Edge, plan: Plan) -> bool:
    """Whether a start that takes this edge goes on without graphs."""
    if edge.name == NO_GRAPHS or edge.source == "capture_throwaway":
        return edge.name != FEWER_SIZES
    # A capture before sizing is not tried again with a smaller KV cache.
    return edge.source == "capture_graphs" and edge.name == "recover" and plan.state("reserve_kv") is not None


def climb(edge: Edge, plan: Plan, measurement: Measurement) -> dict[str, object]:
    """Apply what an edge means for the tries that follow; what they go on with, for the journal."""
    if edge.name == FEWER_SIZES:
        # The largest are dropped: they take most, and one of them did not fit. What the others take is measured again.
        kept = len(measurement.sizes) // 2
        measurement.sizes = measurement.sizes[len(measurement.sizes) - kept :]
        measurement.learned_graphs, measurement.recurring = 0, None
    inputs: dict[str, object] = dict(measurement.lessons())
    if edge.name == FEWER_SIZES:
        inputs["capture_sizes"] = list(measurement.sizes)
    if gives_up_graphs(edge, plan):
        inputs["without_graphs"] = True
    return inputs


def _number(value: object) -> int:
    return value if type(value) is int else 0
