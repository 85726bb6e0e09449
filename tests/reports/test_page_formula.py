"""The budget formula of the page is the one of the package: the same table, the same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from startup_fsm.budget import Knobs, compute
from startup_fsm.events import BudgetTerm
from startup_fsm.memory import GIB, MIB
from startup_fsm.reports.page.budget_table import FORMULA, OPERATIONS, evaluate
from startup_fsm.reports.page.sizings import graph_choices, inputs_of, of_journal, of_log
from startup_fsm.testing import counting_start
from startup_fsm.what_if import Sizing, changed, sizing_of_journal
from tests.reports.page_grid import grid


def test_grid_size():
    """The grid has a thousand points, fitting ones and others, with and without every choice."""
    points = [point for point, _ in grid()]
    results = [compute(point) for point in points]

    assert len(points) == 1_000
    assert {point.pinned is None for point in points} == {True, False}
    assert {point.most_blocks is None for point in points} == {True, False}
    assert {point.needed_blocks is None for point in points} == {True, False}
    assert 100 < sum(result.missing_bytes > 0 for result in results) < 900
    assert any(result.available_bytes < 0 for result in results)


def test_table_is_the_formula():
    """On every point of the grid the table gives what the package computes."""
    for point, inputs in grid():
        computed, said = compute(point), evaluate(inputs)
        assert said["available"] == computed.available_bytes, point
        assert said["blocks"] == computed.blocks, point
        assert said["kv"] == computed.kv_bytes, point
        assert said["missing"] == computed.missing_bytes, point
        assert said["requested"] == computed.requested_bytes, point


def test_exact_in_a_browser():
    """No number on the way is beyond what a browser holds exactly."""
    largest = max(abs(value) for _, inputs in grid() for value in evaluate(inputs).values() if value is not None)

    assert largest < 1 << 53


def test_table_is_closed():
    """Every step is of a known operation and uses inputs, numbers and earlier steps only."""
    known = set(next(grid())[1])
    for name, operation, operands in FORMULA:
        assert operation in OPERATIONS
        assert all(each in known for each in operands if isinstance(each, str)), name
        known.add(name)


@pytest.fixture(scope="module")
def history() -> Any:
    """The fold of a start that came to ready."""
    boot, engine = counting_start(knobs=Knobs(utilization=0.8))
    boot.run(engine)
    return boot.history


def test_recorded_budget(history: Any):
    """From a journal the formula gives the recorded budget again."""
    seq, computed = history.budgets[-1]
    again = evaluate(inputs_of(computed, history))
    made = of_journal(history)

    assert again["available"] == computed.available_bytes
    assert again["blocks"] == computed.blocks
    assert again["needed"] == computed.needed_bytes
    assert made is not None
    assert made["is_exact"]
    assert made["choices"] == graph_choices(computed, seq, history)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.93, 1.0])
def test_other_share(history: Any, share: float):
    """With another share it gives what the verb what-if gives."""
    inputs = inputs_of(history.budgets[-1][1], history) | {"utilization": share}
    sized = sizing_of_journal(history)
    assert sized is not None

    assert evaluate(inputs)["available"] == changed(sized, {"gpu_memory_utilization": share}).available_bytes


def test_choices_of_graphs(history: Any):
    """Fewer sizes need less, down to none; nothing needs more than what all sizes took."""
    seq, computed = history.budgets[-1]
    choices = graph_choices(computed, seq, history)
    sizes = [choice["bytes"] for choice in choices if "estimated" in choice["label"]]

    assert choices[0]["label"] == "as this start reserved"
    assert choices[-1] == {"label": "none: eager", "bytes": 0, "need": 0}
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) <= choices[0]["need"]


def test_graphs_that_nobody_reserved():
    """Where nothing was reserved, the choice says what the graphs took all the same."""
    boot, engine = counting_start(knobs=Knobs(utilization=0.5, graph_estimate="none"))
    boot.run(engine)
    seq, computed = boot.history.budgets[-1]
    first, all_sizes, *_ = graph_choices(computed, seq, boot.history)

    assert first["bytes"] == 0
    assert first["need"] > 0
    assert all_sizes["bytes"] == all_sizes["need"] == first["need"]


def test_log():
    """A log that prints its terms is computed with them, and says what it takes for granted."""
    sized = Sizing(
        share=0.9, base_bytes=80 * GIB, available_bytes=math.floor(0.9 * 80 * GIB) - 20 * GIB, tokens=400_000,
        longest_tokens=8_192, reachable_bytes=79 * GIB, later_bytes=600 * MIB, assumed=("nobody else is there",),
        terms=(
            BudgetTerm(term="weights", bytes=-18 * GIB, source="printed"),
            BudgetTerm(term="activation", bytes=-2 * GIB, source="printed"),
        ),
    )  # fmt: skip
    made = of_log(sized)

    assert made is not None
    assert made["is_exact"]
    assert made["charged"] == "weights, activation"
    assert made["choices"][0] == {"label": "as this start reserved", "bytes": 0, "need": 600 * MIB}
    assert evaluate(made["inputs"])["fits"] == 1
    assert of_log(Sizing(available_bytes=1)) is None
