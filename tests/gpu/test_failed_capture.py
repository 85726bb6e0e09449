"""A capture that fails: what torch leaves broken, and the repair that is proven."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.gpu


def test_cripples_the_cache(child):
    """After a failed capture of plain torch the cache cannot be emptied, until two private calls end it."""
    found = child("crippled")
    assert found["error"]
    assert found["stream_left_current"]
    assert (found["use_count"], found["empties"]) == (2, False)
    assert (found["use_count_ended"], found["empties_ended"]) == (1, True)


def test_cripples_random_numbers(child):
    """After it the default generator counts as captured, until it gets a new state."""
    found = child("crippled")
    assert "outside graph capture" in found["random"]
    assert "outside graph capture" in found["random_ended"]
    assert found["random_new_state"] is None


def test_abandoned(child):
    """While a failed capture counts as open, the end of any MemPool aborts the process."""
    found = child("abandoned")
    assert "survived" not in found
    assert found["exit_code"] == -signal.SIGABRT


def test_forbidden_operation(child):
    """An operation that no capture may do has the category capture, and the repair is proven."""
    found = child("forbidden")
    assert found["category"] == "capture"
    assert found["proven"]
    assert found["evidence"]["pool_reserved_bytes"] == 0


def test_error_of_the_body(child):
    """An error of the body's own stays what it is; there is nothing to repair, and that is proven too."""
    found = child("own_error")
    assert (found["type"], found["category"]) == ("KeyError", None)
    assert found["proven"]


def test_out_of_memory(child):
    """Memory that runs out inside a capture has the category oom, whatever the end of the capture raised."""
    found = child("out_of_memory")
    assert (found["category"], found["tried_bytes"]) == ("oom", 1 << 40)
    assert found["proven"]


@pytest.mark.parametrize("name", ["forbidden", "own_error", "out_of_memory"])
def test_goes_on(child, name):
    """After a failed capture of ours other graphs replay, the stream is the old one, and the cache empties at once."""
    found = child(name)
    assert found["stream_restored"]
    assert found["empties_at_once"]
    assert found["other_graph_right"]
    assert found["empties"]
    assert found["random"]
    assert found["captures_random"]
