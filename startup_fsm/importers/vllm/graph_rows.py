"""
Graphs, thrown away and real, and the warm-up around them (L65 to L70, L74, L90 to L104).

The V2 runner prints the same lines while it profiles its graphs and when it captures the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from startup_fsm.importers.facts import Fact, Figure, Heard, Row, Sign, Step, bytes_figure
from startup_fsm.importers.vllm.phases import REAL, THROWAWAY, bar_state, capture_state, is_sized
from startup_fsm.importers.vllm.wording import NUMBER, Facts, amount, phrase, say

_THROWN: Final = Step(THROWAWAY)
_TORN_DOWN: Final = Step("teardown", moment="ends")
_WARMUP: Final = Step("warmup")
_V1: Final = Sign("runner", {"runner": "V1"})

_SETS: Final = r"\b(FULL|PIECEWISE|ENCODER)=(\d{1,9})(?: \(largest=(\d{1,9})\))?"


def _announced(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Step(THROWAWAY, moment="begins")
    yield _V1
    inputs: dict[str, int] = {}
    for kind, number, largest in re.findall(_SETS, found.string):
        inputs[kind.lower()] = int(number)
        inputs["largest"] = max(inputs.get("largest", 0), int(largest or 0))
    yield Sign("graphs_planned", inputs)
    for kind in ("full", "piecewise"):
        if kind in inputs:
            yield Figure(f"{kind}_graphs", inputs[kind])


def _dropped(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    # The same clean-up runs when an engine shuts down.
    if heard.state in ("bootstrap_kv", THROWAWAY):
        yield _TORN_DOWN


def _captured(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    state = capture_state(heard)
    yield Step(state, moment="ends")
    if found["took"] is not None:
        name = "graph_actual_bytes" if state == REAL else "graph_estimate_bytes"
        yield from bytes_figure(name, found["took"], "GiB")


def _capturing(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Step(capture_state(heard), _part(found[0]))


def _capturing_as_v1(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    yield Step(bar_state(heard), _part(found[0]))


def _part(bar: str) -> str | None:
    if "FULL" in bar:
        return "full"
    return "piecewise" if "PIECEWISE" in bar else None


def _part_of(part: str) -> Facts:
    def told(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
        yield Step(capture_state(heard), part)

    return told


def _registered(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    # A rank of the V1 runner may have said nothing of its sizing.
    yield Step(capture_state(heard) if heard.has("L09") else bar_state(heard))
    if int(found[1]) == 0:
        yield Sign("addresses_registered", {"n": 0})


def _tuning(found: re.Match[str], heard: Heard) -> Iterator[Fact]:
    if is_sized(heard) or heard.state is None:
        yield _WARMUP
    elif heard.state in ("load_weights", "profile_activations"):
        yield Step("profile_activations", "autotune")
    if "OOM" in found[0]:
        yield Sign("autotuner_fell_back")


_PROFILED: Final = (
    Row(
        "L65",
        "Initialized minimal KV cache",
        r"Initialized minimal KV cache for \S{1,20} graph profiling",
        say(Step("bootstrap_kv", moment="ends")),
    ),
    Row(
        "L66",
        "Profiling CUDA graph memory: ",
        r"Profiling CUDA graph memory: [A-Z]",
        _announced,
    ),
    Row(
        "L67",
        " CUDA graph memory: ",
        r"Estimated \w{1,30} CUDA graph memory: .{1,40}? MiB first-capture \+ \(",
        say(_THROWN),
    ),
    Row(
        "L68",
        "Estimated encoder CUDA graph memory: ",
        r"Estimated encoder CUDA graph memory",
        say(Step(THROWAWAY, "encoder")),
    ),
    phrase("L69", "Cleaned up profiling KV cache", _dropped),
    Row(
        "L70",
        " graph memory: ",
        rf"Estimated \w{{1,10}} graph memory: {amount('graph_estimate_bytes')} total",
        say(_TORN_DOWN, _V1),
    ),
)

_WARMED: Final = (
    phrase("L90", "Compile and warming up model for size ", say(_WARMUP)),
    phrase("L91", "Warming up FlashInfer attention", say(_WARMUP)),
    Row("L92", "JIT kernel warmup ", r"JIT kernel warmup (?:starting|finished|failed)", say(_WARMUP)),
    phrase("L93", "Running FlashInfer autotune", _tuning),
    Row(
        "L93",
        "[Autotuner]: ",
        r"\[Autotuner\]: (?:Autotuning process (?:starts|ends)|OOM detected|Tuning )",
        _tuning,
    ),
    Row("L94", "[WORKSPACE DEBUG]", r"Resized workspace from .{1,300}? MB -> ", say()),
    Row("L94", "[WORKSPACE DEBUG] Workspace locked", r"Workspace locked\.", say(Step(REAL))),
)

_BEGINS: Final = say(Step(REAL, moment="begins"), Sign("runner", {"runner": "V0"}))

_CAPTURED: Final = (
    phrase("L95", "Capturing the model for CUDA graphs.", _BEGINS),
    phrase("L95", "Capturing cudagraphs for decoding.", _BEGINS),
    phrase("L96", "CUDA graphs can take additional ", say(Step(REAL))),
    phrase("L97", "Capturing CUDA graph shapes:", _capturing_as_v1),
    Row("L97", "Capturing CUDA graphs (", r"Capturing CUDA graphs \([a-z\- ]{3,40}, ?\w{4,10}\):", _capturing_as_v1),
    Row("L97", "Capturing CUDA graphs", r"Capturing CUDA graphs(?: \((?:FULL|PIECEWISE|NONE)\))?:", _capturing),
    Row(
        "L97",
        "Capturing a cudagraph ",
        r"Capturing a cudagraph (?:on \((?:FULL|PIECEWISE)|for shape )",
        _capturing_as_v1,
    ),
    Row("L97", "CG Capture: mode=", r"CG Capture: mode=\w{1,12}", _capturing),
    Row("L97d", " CUDA graphs", r"Capturing (?!CUDA)[\w\- ]{2,60} CUDA graphs(?: \(\w{4,10}\))?:", _part_of("draft")),
    Row("L97d", "speculator...", r"Capturing model for .{0,80}?speculator\.\.\.", _part_of("draft")),
    Row("L98", " cuda graph addresses", r"Registering (\d{1,9}) cuda graph addresses", _registered),
    Row(
        "L74",
        "Graph capturing finished in ",
        rf"Graph capturing finished in {NUMBER} secs?(?:, took (?P<took>{NUMBER}) GiB)?",
        _captured,
    ),
    phrase("L101", "Encoder CUDA graph capture complete", _part_of("encoder")),
    Row(
        "L102",
        "Encoder graph capturing finished in ",
        rf"Encoder graph capturing finished in {NUMBER} secs, took {amount('graph_actual_bytes')}",
        say(Step(REAL, "encoder", moment="ends")),
    ),
    Row(
        "L103",
        "CUDA graph capture. ",
        r"Skipping (?:encoder and decoder )?CUDA graph capture\. ",
        say(Step("warmup", moment="ends"), Sign("graphs_skipped")),
    ),
    Row(
        "L104",
        " graph pool memory: ",
        rf"graph pool memory: {amount('graph_actual_bytes')} \(actual\), "
        rf"{amount('graph_estimate_bytes')} \(estimated\)",
        say(Step(REAL, moment="ends")),
    ),
)

ROWS: Final = (*_PROFILED, *_WARMED, *_CAPTURED)
