"""Estimators: what all graphs take, from a few."""

import pytest

from startup_fsm.budget import Knobs
from startup_fsm.estimators import Captured, every_rule, first_plus_outputs, linear, size_proportional, total
from startup_fsm.memory import MIB
from startup_fsm.testing import counting_start, verdict_of

FIRST = Captured(size=512, pool=900 * MIB, kept=125 * MIB, outside=72 * MIB)
SECOND = Captured(size=256, pool=64 * MIB, kept=62 * MIB, outside=2 * MIB)
SIZES = (512, 256, 128, 64)


def test_first_plus_outputs():
    """After the first graph only outputs grow the pool, by their rows."""
    assert first_plus_outputs([FIRST], SIZES) == 900 * MIB + round(125 * MIB * 448 / 512)


def test_size_proportional():
    """The second graph says what a row takes."""
    assert size_proportional([FIRST, SECOND], SIZES) == (900 + 64 + 32 + 16) * MIB


def test_size_proportional_from_one():
    """From one graph alone it falls back to outputs."""
    assert size_proportional([FIRST], SIZES) == first_plus_outputs([FIRST], SIZES)


def test_linear():
    """The rule of vLLM multiplies the second graph, driver included, by the number of graphs."""
    assert linear([FIRST, SECOND], SIZES) == (900 + 72 + 3 * (64 + 2)) * MIB


def test_linear_has_a_floor():
    """It takes at least 1 MiB for a graph."""
    small = Captured(size=256, pool=0, kept=0, outside=0)

    assert linear([FIRST, small], SIZES) == (900 + 72 + 3) * MIB


def test_all_sizes_need_no_rule():
    """With every size captured the estimate is what came back."""
    assert total("linear", [FIRST, SECOND], (512, 256), 987 * MIB) == 987 * MIB


def test_what_is_no_pool_comes_once():
    """A workspace that came back is not multiplied; the driver's part goes by the graphs that are still to come."""
    returned = (900 + 64 + 32) * MIB

    assert total("size_proportional", [FIRST, SECOND], SIZES, returned) == (900 + 64 + 32 + 16 + 32 + 2 * 2) * MIB


def test_every_rule_keeps_the_truth():
    """All rules are held against the same actual figure."""
    said = every_rule([FIRST, SECOND], (512, 256), 1_000 * MIB)

    assert said["all"] == 1_000 * MIB
    assert set(said) == {"all", "first_plus_outputs", "size_proportional", "linear"}


@pytest.mark.parametrize(
    ("method", "seen"), [("all", 5), ("first_plus_outputs", 1), ("size_proportional", 2), ("linear", 2)]
)
def test_a_start_says_how_many_it_saw(method, seen):
    """The journal says by which rule, from how many of how many sizes, and how far off it was at the end."""
    boot, engine = counting_start(knobs=Knobs(graph_method=method))
    boot.run(engine)

    estimate = boot.history.estimates[-1][1]
    compared = boot.history.last("capture_graphs").probes["estimators"][1].result

    assert (estimate.seen, estimate.of) == (seen, 5)
    assert compared["estimated_bytes"] == estimate.recurring_bytes
    assert abs(compared["estimated_bytes"] - compared["actual_bytes"]) <= 64 * MIB
    assert verdict_of(boot).outcome == "ready"


def test_a_method_that_does_not_exist():
    """A wrong knob is refused by name."""
    with pytest.raises(ValueError, match="graph_method: 'guess' is none of"):
        Knobs(graph_method="guess")
