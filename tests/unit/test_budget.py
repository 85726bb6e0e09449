"""The budget: every term once, and an advised utilization that really fits."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from startup_fsm.budget import (
    LEAST_MARGIN,
    MOST_DRIFT,
    Inputs,
    Knobs,
    adds_up,
    compute,
    headroom_bytes,
    margin_bytes,
    term,
    utilization_for,
)
from startup_fsm.memory import GIB, MIB

SIZES = st.integers(0, 200 * GIB)


def inputs(**changes: Any) -> Inputs:
    """A device of 10 GiB of which 9 are asked for and 2 are used by us."""
    return Inputs(
        **{
            "total": 10 * GIB,
            "requested": 9 * GIB,
            "used_by_us": 2 * GIB,
            "free_settled": 8 * GIB,
            "free_now": 8 * GIB,
            "graphs": 512 * MIB,
            "headroom": 256 * MIB,
            "margin": 64 * MIB,
            "block_bytes": 3 * MIB,
            **changes,
        }
    )


ARBITRARY = st.builds(
    Inputs,
    total=st.integers(1, 200 * GIB),
    requested=SIZES,
    used_by_us=SIZES,
    free_settled=SIZES,
    free_now=SIZES,
    graphs=SIZES,
    headroom=SIZES,
    margin=SIZES,
    shortfall=SIZES,
    reserve=st.dictionaries(st.sampled_from(["masks", "draft"]), SIZES),
    mapped=SIZES,
    block_bytes=st.integers(1, 2 * GIB),
    needed_blocks=st.none() | st.integers(0, 10_000),
    pinned=st.none() | st.integers(1, 200 * GIB),
    most_blocks=st.none() | st.integers(0, 10_000),
)


@given(ARBITRARY)
def test_terms_add_up_whatever_goes_in(given_inputs: Inputs) -> None:
    """The identity holds for any numbers, each term stands once, and blocks never exceed what there is."""
    computed = compute(given_inputs)
    names = [each.term for each in computed.terms]
    assert len(set(names)) == len(names)
    assert adds_up(computed) == 0
    assert sum(each.bytes for each in computed.terms) == computed.available_bytes
    assert computed.kv_bytes == computed.blocks * computed.block_bytes
    assert computed.blocks >= 0
    assert computed.missing_bytes >= 0 or given_inputs.most_blocks is not None
    if given_inputs.pinned is None:
        assert computed.kv_bytes <= max(0, computed.available_bytes)
    if given_inputs.most_blocks is not None:
        assert computed.blocks <= given_inputs.most_blocks
    if not computed.missing_bytes:
        assert computed.blocks >= max(1, given_inputs.needed_blocks or 1)
    # Independently: what the request leaves, but no more than is free.
    free = min(given_inputs.free_settled, given_inputs.free_now)
    room = min(given_inputs.requested - given_inputs.used_by_us, free)
    charged = given_inputs.graphs + given_inputs.headroom + given_inputs.margin + given_inputs.shortfall
    charged += sum(given_inputs.reserve.values())
    assert computed.available_bytes == room - charged + given_inputs.mapped


@given(ARBITRARY)
def test_missing_bytes_are_exactly_what_is_missing(given_inputs: Inputs) -> None:
    """With so many bytes more the request would fit; with one less it would not."""
    assume(given_inputs.pinned is None)
    given_inputs = attrs.evolve(given_inputs, most_blocks=None, graphs=0, mapped=0)
    computed = compute(given_inputs)
    assume(computed.missing_bytes > 0)
    more = attrs.evolve(given_inputs, mapped=computed.missing_bytes)
    assert compute(more).missing_bytes == 0
    assert compute(attrs.evolve(more, mapped=more.mapped - 1)).missing_bytes > 0


def test_the_smaller_of_two_readings_of_free_memory_decides() -> None:
    """What came back late, or went since, is not there."""
    assert term(compute(inputs(free_now=3 * GIB)), "not_free") == -4 * GIB
    assert term(compute(inputs(free_settled=3 * GIB)), "not_free") == -4 * GIB
    assert term(compute(inputs()), "not_free") == 0


@given(ARBITRARY)
def test_no_reserve_has_the_name_of_a_term(given_inputs: Inputs) -> None:
    """Whatever a budget charges by itself cannot be taken for what an engine named."""
    ours = [each.term for each in compute(given_inputs).terms if each.source != "engine"]
    for name in ours:
        with pytest.raises(ValueError, match="is a term of the budget already"):
            compute(inputs(reserve={name: 1}))


def test_what_the_engine_reserves_is_a_term_for_each_name() -> None:
    """It is taken off once, is told from ours by its source, and a KV cache of fewer blocks comes out."""
    plain = compute(inputs())
    kept = compute(inputs(reserve={"masks": 300 * MIB, "nothing": 0, "draft_model": 3 * MIB}))

    assert kept.available_bytes == plain.available_bytes - 303 * MIB
    assert [(each.term, each.bytes) for each in kept.terms if each.source == "engine"] == [
        ("masks", -300 * MIB),
        ("draft_model", -3 * MIB),
    ]
    assert adds_up(kept) == 0


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("graphs", 1, "'graphs' is a term of the budget already"),
        ("masks", -1, "'masks' is -1"),
        ("masks", 1.5, "'masks' is 1.5"),
        ("masks", True, "'masks' is True"),
        ("masks", 1 << 63, "'masks' is 9223372036854775808"),
        ("available", 1, "'available' is a term"),
        ("", 1, "'' is no name"),
        ("a\nb", 1, "is no name"),
        ("\ud800", 1, "is no name"),
        (5, 1, "5 is no name"),
    ],
)
def test_a_reserve_that_cannot_be_is_refused(name: Any, size: Any, text: str) -> None:
    """By its name, and what it was."""
    with pytest.raises(ValueError, match=text):
        compute(inputs(reserve={name: size}))


def test_sources_are_kept() -> None:
    """Every term says who gave it."""
    computed = compute(inputs(sources={"graphs": "measured by release", "free": "NVML"}, free_now=GIB))
    by_name = {each.term: each.source for each in computed.terms}
    assert by_name["graphs"] == "measured by release"
    assert by_name["not_free"] == "NVML"
    assert all(by_name.values())


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_of_no_bytes_is_refused(size: int) -> None:
    """It would divide by zero; the message names what is wrong."""
    with pytest.raises(ValueError, match=f"block_bytes: a KV block of {size} bytes"):
        compute(inputs(block_bytes=size))


@given(
    total=st.integers(GIB, 300 * GIB),
    share=st.integers(1, 1000),
    used=st.floats(0, 0.9),
    others=st.floats(0, 0.5),
    graphs=st.integers(0, 4 * GIB),
    headroom=st.integers(0, 4 * GIB),
    margin=st.integers(0, GIB),
    block=st.integers(1, 64 * MIB),
    needed=st.integers(1, 2_000),
)
def test_an_advised_utilization_really_fits(
    total: int,
    share: int,
    used: float,
    others: float,
    graphs: int,
    headroom: int,
    margin: int,
    block: int,
    needed: int,
) -> None:
    """Both ends of the interval, put into the knob and computed again, hold the longest request; less does not."""
    by_us = int(total * used)
    free = max(0, total - by_us - int(total * others))

    def at(utilization: float) -> Inputs:
        return Inputs(
            total=total,
            requested=Knobs(utilization=utilization).requested(total),
            used_by_us=by_us,
            free_settled=free,
            free_now=free,
            graphs=graphs,
            headroom=headroom,
            margin=margin,
            block_bytes=block,
            needed_blocks=needed,
        )

    computed = compute(at(share / 1000))
    interval = utilization_for(computed, needed * block)
    if interval is None:
        assert compute(at(1.0)).missing_bytes > 0 or by_us + free < total
        return
    lowest, highest = interval
    assert 0 < lowest <= highest <= 1
    assert compute(at(lowest)).missing_bytes == 0
    assert compute(at(highest)).missing_bytes == 0
    assert term(compute(at(highest)), "not_free") == 0
    if lowest > 0.001:
        assert compute(at(round(lowest - 0.001, 3))).missing_bytes > 0 or lowest == 0.001


def test_an_advised_utilization_survives_its_own_rounding() -> None:
    """9 thousandths of 3,000 MiB are a byte less than 27 MiB when they are read from 0.009; so 0.010 is advised."""
    facts = {"total": 3000 * MIB, "used_by_us": 0, "free_settled": 3000 * MIB, "free_now": 3000 * MIB}
    facts |= {"graphs": 0, "headroom": 0, "margin": 0, "block_bytes": 27 * MIB, "needed_blocks": 1}
    assert Knobs(utilization=0.009).requested(3000 * MIB) == 27 * MIB - 1
    interval = utilization_for(compute(inputs(**facts, requested=MIB)), 27 * MIB)
    assert interval == (0.01, 1.0)


def test_no_utilization_is_advised_where_none_fits() -> None:
    """More than the device has, or a device of no bytes."""
    assert utilization_for(compute(inputs()), 20 * GIB) is None
    assert utilization_for(attrs.evolve(compute(inputs()), total_bytes=0), 1) is None


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("utilization", 0),
        ("utilization", -0.1),
        ("utilization", 1.01),
        ("utilization", float("nan")),
        ("requested_bytes", 0),
        ("kv_cache_memory_bytes", -1),
        ("arena_bytes", 0),
        ("graph_estimate", -1),
    ],
)
def test_impossible_knobs_are_refused_by_name(knob: str, value: float) -> None:
    """The message begins with the name of the knob and holds its value."""
    with pytest.raises(ValueError, match=rf"^{knob}: {value}"):
        Knobs(**{knob: value})


def test_explicit_bytes_win_over_the_share() -> None:
    """A request in bytes is the request."""
    assert Knobs(utilization=0.5).requested(1001) == 500
    assert Knobs(utilization=0.5, requested_bytes=7).requested(1001) == 7
    assert Knobs(requested_bytes=7).as_settings()["requested_bytes"] == 7


def test_margin_and_headroom_follow_their_rules() -> None:
    """The largest of four; reserved peaks, never negative."""
    assert margin_bytes(GIB) == LEAST_MARGIN
    assert margin_bytes(100 * GIB) == 100 * GIB // 1000
    assert margin_bytes(GIB, drift=-GIB // 4) == GIB // 2
    assert margin_bytes(GIB, drift=40 * GIB, late_return=80 * GIB) == MOST_DRIFT
    assert margin_bytes(GIB, late_return=GIB // 2) == GIB // 2
    assert headroom_bytes(5, 3) == 2
    assert headroom_bytes(3, 5) == 0
