"""SGLang from its first collective to loaded weights: groups, the baseline, the target's weights, the draft's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from startup_fsm.importers.facts import Fact, Figure, Heard, Row, Sign, Step
from startup_fsm.importers.sglang.words import DRAFT_PART, NUMBER, WEIGHTS_END, behind, memory

Moment = Literal["begins", "inside", "ends"]


def _initialising(heard: Heard, moment: Moment) -> Step:
    """The groups of a draft model are a part of loading it: the target is complete by then."""
    if heard.has(WEIGHTS_END):
        return Step("load_weights", DRAFT_PART, "begins" if moment == "begins" else "inside")
    return Step("init_device", None, moment)


def _loading(heard: Heard, moment: Moment) -> Step:
    return Step("load_weights", DRAFT_PART if heard.has(WEIGHTS_END) else None, moment)


def _init_begin(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (_initialising(heard, "begins"),)


def _init_end(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (_initialising(heard, "inside" if "parallel" in found[0] else "ends"),)


def _weights_begin(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    free = () if heard.has(WEIGHTS_END) else memory("free_at_start_bytes", "avail mem", behind(found))
    return (_loading(heard, "begins"), *free)


def _weights_end(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    step = _loading(heard, "ends")
    if step.part is not None:
        return (step,)
    text = behind(found)
    weights = memory("weights_bytes", "mem usage", text)
    return (step, *weights, *memory("avail_after_load_bytes", "avail mem", text))


def _weights_inside(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (_loading(heard, "inside"),)


def _committed(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    # Loading went on beside the capture: the state that the line ends is the other one.
    return (Step("load_weights", None, "ends"),)


def _unbalanced(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    if found[1] is None:
        return ()
    names = ("min_per_gpu_bytes", "local_free_bytes")
    # Floats in GiB with all their digits: whole bytes.
    return [
        Figure(name, round(float(number) * (1 << 30)), "GiB", 1)
        for name, number in zip(names, found.groups(), strict=True)
    ]


def _no_custom_allreduce(found: re.Match[str], heard: Heard) -> Iterable[Fact]:
    return (Sign("custom_allreduce_off"),)


ROWS: Final = (
    Row("sgl.init_begin", "Init ", r"\bInit (?:torch distributed|parallel|nccl) begin\b", _init_begin),
    Row("sgl.init_end", "Init ", r"\bInit (?:torch distributed|parallel|nccl) ends\b", _init_end),
    Row("sgl.baseline", "Memory baseline taken", r"\bMemory baseline taken\b", _init_end),
    Row(
        "sgl.unbalanced",
        "memory capacity is unbalanced",
        r"memory capacity is unbalanced\b"
        rf"(?:[^=\n]{{0,200}}(?:min_per_gpu_memory|pre_model_load_memory)={NUMBER}, local_gpu_memory={NUMBER})?",
        _unbalanced,
    ),
    Row("sgl.weights_begin", "Load weight begin", r"\bLoad weight begin\b", _weights_begin),
    Row(WEIGHTS_END, "Load weight end", r"\bLoad weight end\b(?!\. Committed)", _weights_end),
    Row("sgl.weights_committed", "Committed real weights", r"\bLoad weight end\. Committed real weights", _committed),
    Row("sgl.weights_format", "Using model weights format", r"\bUsing model weights format", _weights_inside, "sglang"),
    Row(
        "sgl.no_custom_allreduce",
        "ustom all",
        r"\bCustom all-?reduce is disabled\b|\bSetup Custom all-?reduce failed\b",
        _no_custom_allreduce,
        "sglang",
    ),
)
