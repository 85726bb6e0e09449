"""
SGLang's captures: decode and verify of the target, prefill (pieces), and those of a draft model.

Each kind prints free memory at its edges and, in a progress bar, before each size. The figures of a start are those of
the target's decode capture, of which every start with graphs has one; the first of another kind stands in where the log
has none of it. So ``graph_actual_bytes`` is that capture and no sum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

from startup_fsm.importers.facts import Fact, Heard, Row, Sign, Step, bytes_figure, count_figure
from startup_fsm.importers.sglang.words import (
    DECODE_BEGIN,
    DECODE_END,
    DECODE_TICK,
    DRAFT_BEGIN,
    DRAFT_END,
    NUMBER,
    PREFILL_BEGIN,
    PREFILL_END,
    PREFILL_TICK,
    behind,
    heard_any,
    memory,
)

_STATE: Final = "capture_graphs"
_DECODE: Final = (DECODE_BEGIN, DECODE_END, DECODE_TICK)
_PREFILL: Final = (PREFILL_BEGIN, PREFILL_END, PREFILL_TICK)

#: What a device calls its graphs.
_GRAPH: Final = r"\w{2,20} graph"


@attrs.frozen(slots=True)
class _Edge:
    """One edge of one kind of capture; rows in ``silenced_by`` have had its figures already."""

    part: str
    silenced_by: tuple[str, ...]

    def begins(self, found: re.Match[str], heard: Heard) -> Iterable[Fact]:
        step = Step(_STATE, self.part, "begins")
        if heard_any(heard, *self.silenced_by):
            return (step,)
        return (step, *memory("avail_before_capture_bytes", "avail mem", behind(found)))

    def ends(self, found: re.Match[str], heard: Heard) -> Iterable[Fact]:
        text = behind(found)
        facts: list[Fact] = [Step(_STATE, self.part, "ends")]
        if self.part == "full":
            facts += _planned("full", text)
        if not heard_any(heard, *self.silenced_by):
            facts += memory("graph_actual_bytes", "mem usage", text)
            facts += memory("avail_after_capture_bytes", "avail mem", text)
        return facts


def _planned(kind: str, text: str) -> tuple[Sign, ...]:
    """The list of sizes, as a sign."""
    found = re.search(r"\[([\d, ]{1,8000})\]", text)
    sizes = [] if found is None else [int(size) for size in re.findall(r"\d{1,9}", found[1])]
    if not sizes:
        return ()
    return (Sign("graphs_planned", {kind: len(sizes)} | ({"largest": max(sizes)} if kind == "full" else {})),)


def _sizes(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step(_STATE, "full"), *_planned("full", behind(found)))


def _pieces(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step(_STATE, "piecewise"), *_planned("piecewise", behind(found)))


def _tick(number: str, heard: Heard, own: str, silenced_by: tuple[str, ...]) -> Iterable[Fact]:
    if heard_any(heard, *silenced_by):
        return (Step(_STATE),)
    first = () if heard.has(own) else bytes_figure("avail_first_batch_bytes", number, "GB")
    return (Step(_STATE), *first, *bytes_figure("avail_last_batch_bytes", number, "GB"))


def _decode_tick(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    # A draft model's bar has the same words.
    return _tick(found[1], heard, DECODE_TICK, (DRAFT_BEGIN,))


def _prefill_tick(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return _tick(found[1], heard, PREFILL_TICK, (DECODE_TICK, DRAFT_BEGIN))


def _addresses(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    count = count_figure("addresses", found[1])
    return (Step(_STATE), Sign("addresses_registered", {"n": count.value}))


def _carved(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Step(_STATE),)


_TARGET: Final = rf"\bCapture (?:target (?:decode|verify) )?{_GRAPH}"
_PIECES: Final = rf"\bCapture (?:piecewise|target prefill) {_GRAPH}"
_DRAFTS: Final = (
    rf"\bCapture (?:(?:draft(?: decode| verify| extend| prefill)?|UNO tree draft) {_GRAPH}|single-CG draft extend)"
)

ROWS: Final = (
    Row(DECODE_BEGIN, "Capture ", rf"{_TARGET} begin\b", _Edge("full", (DECODE_BEGIN,)).begins),
    Row(DECODE_END, "Capture ", rf"{_TARGET} end\b", _Edge("full", (DECODE_END,)).ends),
    Row("sgl.decode_sizes", "Capture ", r"\bCapture \w{2,20} graph bs \[", _sizes),
    Row(
        DECODE_TICK, "Capturing batches (", rf"\bCapturing batches \([^)\n]{{0,60}}avail_mem={NUMBER} GB", _decode_tick
    ),
    Row(PREFILL_BEGIN, "Capture ", rf"{_PIECES} begin\b", _Edge("piecewise", (PREFILL_BEGIN, *_DECODE)).begins),
    Row(PREFILL_END, "Capture ", rf"{_PIECES} end\b", _Edge("piecewise", (PREFILL_END, *_DECODE)).ends),
    Row("sgl.prefill_sizes", "Capture ", r"\bCapture \w{2,20} graph num tokens \[", _pieces),
    Row(
        PREFILL_TICK,
        "avail_mem=",
        rf"\bCapturing (?:num tokens|prefill shape) \([^)\n]{{0,60}}avail_mem={NUMBER} GB",
        _prefill_tick,
    ),
    Row(DRAFT_BEGIN, "Capture ", rf"{_DRAFTS} begin\b", _Edge("draft", (DRAFT_BEGIN, *_DECODE, *_PREFILL)).begins),
    Row(DRAFT_END, "Capture ", rf"{_DRAFTS} end\b", _Edge("draft", (DRAFT_END, *_DECODE, *_PREFILL)).ends),
    Row(
        "sgl.addresses", "cuda graph addresses", r"\bRegistering (\d{1,12}) cuda graph addresses", _addresses, "sglang"
    ),
    Row("sgl.carved", "Graph pool pre-carved", r"\bGraph pool pre-carved: ", _carved),
)
