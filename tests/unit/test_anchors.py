"""Rows by their anchors: the same ones, in the same order, as looking for each anchor would find."""

from __future__ import annotations

import random

from startup_fsm.importers.anchors import Anchors
from startup_fsm.importers.general import GENERAL
from startup_fsm.importers.sglang import SGLANG
from startup_fsm.importers.vllm import VLLM


def test_values_in_their_order():
    """An anchor may repeat, stand in another one, or be shorter than any piece."""
    anchors = ("memory: ", "--", "memory", "Available KV cache memory: ", "memory: ", "°")
    index = Anchors([(anchor, number) for number, anchor in enumerate(anchors)])
    assert index.held_by("Available KV cache memory: 1 GiB") == [0, 2, 3, 4]
    assert index.held_by("--memory") == [1, 2]
    assert index.held_by("40 °C") == [5]
    assert index.held_by("") == []
    assert Anchors([]).held_by("memory") == []


def test_the_catalogue():
    """Whatever a message is made of, its rows are those whose anchor it holds."""
    rows = (*VLLM.rows, *SGLANG.rows, *GENERAL)
    index = Anchors([(row.anchor, row) for row in rows])
    draw = random.Random(0)
    for _ in range(2_000):
        pieces = [draw.choice(rows).anchor for _ in range(draw.randrange(4))]
        text = " ".join(piece[draw.choice((0, 0, 0, 1)) :] for piece in pieces)
        assert index.held_by(text) == [row for row in rows if row.anchor in text]
