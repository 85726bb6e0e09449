"""
Ranks that differ in what they had: those of one pipeline stage, which hold alike, and stages by what they hold.

The rank with least room decides for all. A stage of fewer layers needs less of a KV cache for as many blocks, so stages
are compared by what each has for a block, else for a byte of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from startup_fsm.logged.start import Found, Start
from startup_fsm.memory import MIB, format_bytes

Figures = Mapping[str, int | float]

#: Figures in which ranks of one stage should agree: by how many bytes, and by which share, they may differ.
_MOST: Final = {
    "free_at_start_bytes": 2048 * MIB,
    "avail_after_load_bytes": 512 * MIB,
    "kv_available_bytes": 512 * MIB,
}
_SHARE: Final = {"free_at_start_bytes": 0.03, "avail_after_load_bytes": 0.1, "kv_available_bytes": 0.1}


def uneven(start: Start) -> Found | None:
    """Ranks that had much less than others of their stage, or a stage that had less than others for what it holds."""
    if start.failure is not None and start.failure.reason == "unbalanced":
        return None
    ranks = start.facts.by_rank()
    return _of_a_stage(start, ranks) or _of_stages(start, ranks)


def _of_a_stage(start: Start, ranks: Mapping[str, Figures]) -> Found | None:
    for name in _MOST:
        stages: dict[str, dict[str, float]] = {}
        for label, figures in ranks.items():
            if name in figures:
                stages.setdefault(_stage(label), {})[label] = figures[name]
        for had in stages.values():
            least, most = min(had, key=lambda each: had[each]), max(had, key=lambda each: had[each])
            apart = round(had[most] - had[least])
            if apart > max(_MOST[name], had[most] * _SHARE[name]):
                return _found(start, name, had, least, most, apart)
    return None


def _of_stages(start: Start, ranks: Mapping[str, Figures]) -> Found | None:
    name = "kv_available_bytes"
    had = {label: figures[name] for label, figures in ranks.items() if figures.get(name, 0) > 0}
    if len({_stage(label) for label in had}) < 2:
        return None
    held = _held({label: ranks[label] for label in had})
    least = min(had, key=lambda each: had[each] / held[each])
    # What each would use of its own, were all to have as many blocks as the poorest.
    idle = {label: round(size - had[least] / held[least] * held[label]) for label, size in had.items()}
    most = max(idle, key=lambda each: idle[each])
    if idle[most] <= max(_MOST[name], had[most] * _SHARE[name]):
        return None
    return _found(start, name, had, least, most, idle[most], reason="stages")


def _held(ranks: Mapping[str, Figures]) -> dict[str, float]:
    """What a block of the KV cache takes on each rank: in bytes, else as its weights go, else alike for all."""
    blocks = {figures.get("gpu_blocks", 0) for figures in ranks.values()}
    # The same number on all ranks is what they agreed on, not what each had room for.
    if 0 not in blocks and len(blocks) > 1:
        return {label: figures["kv_available_bytes"] / figures["gpu_blocks"] for label, figures in ranks.items()}
    if all(figures.get("weights_bytes", 0) > 0 for figures in ranks.values()):
        return {label: float(figures["weights_bytes"]) for label, figures in ranks.items()}
    return dict.fromkeys(ranks, 1.0)


def _found(
    start: Start, name: str, had: Mapping[str, float], least: str, most: str, apart: int, *, reason: str = ""
) -> Found:
    text = f"{name}: {least} has {format_bytes(round(had[least]))}, {most} {format_bytes(round(had[most]))}"
    text += f", of which {format_bytes(apart)} are of no use" if reason else ""
    return start.found(
        "ranks.uneven",
        f"{text}: the poorest rank decides for all",
        severity="warning",
        state="size_kv" if name == "kv_available_bytes" else "init_device",
        figures=(name,),
        observed=round(had[least]),
        expected=round(had[most]),
        scope="device",
        reason=reason,
        bytes=apart,
    )


def _stage(label: str) -> str:
    return next((part for part in label.split() if part.startswith("PP")), "")
