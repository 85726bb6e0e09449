"""Where it runs and who else is there: more devices, smaller weights, other processes, the host, other versions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import attrs

from startup_fsm.dialects import KnownFault, parse
from startup_fsm.findings import Advice, Change
from startup_fsm.logged.changes import given, number, say
from startup_fsm.logged.sizing import GRAPHS, least_kv
from startup_fsm.logged.start import Start
from startup_fsm.memory import GIB, format_bytes

#: A request that is lowered to less of itself than this leaves no room for weights that were meant to fit.
_NEAR: Final = 2 / 3

_TP: Final = re.compile(r"TP(\d{1,6})")
_MOST_DEVICES: Final = 64


def more_devices(start: Start, why: str = "each device then holds a part of the weights") -> list[Advice]:
    """Devices that share each layer: the first doubling that the numbers allow."""
    had = _devices(start)
    to = None if had is None else _enough_devices(start, had)
    return say(start, "tensor_parallel_size", "raise", why, to=to)


def _devices(start: Start) -> int | None:
    had = number(start, "tensor_parallel_size")
    if had is not None:
        return had
    ranks = [int(found[1]) for label in start.facts.labels if (found := _TP.search(label)) is not None]
    return max(ranks) + 1 if ranks else None


def _enough_devices(start: Start, had: int) -> int:
    """Twice as many devices, and again, until one longest request fits; weights and cache are split evenly."""
    to, sizing, weights = 2 * had, start.sizing, start.size("weights_bytes")
    if sizing is None or weights is None:
        return to
    while to < _MOST_DEVICES * had:
        freed = weights - weights * had // to
        if sizing.available_bytes + freed >= least_kv(sizing) * had // to:
            return to
        to *= 2
    return 2 * had


def more_stages(start: Start) -> list[Advice]:
    """Devices that share the layers."""
    had = number(start, "pipeline_parallel_size")
    to = None if had is None else 2 * had
    return say(start, "pipeline_parallel_size", "raise", "each device then holds a part of the layers", to=to)


def smaller_weights(start: Start) -> list[Advice]:
    """Numbers of fewer bits, or a smaller model."""
    text = "smaller numbers take less; or a smaller model"
    held = start.size("weights_bytes")
    if held is None and start.ending.state == "load_weights":
        held = start.size("torch_allocated_bytes")
    if held is not None:
        text = f"{format_bytes(held)} are weights so far, and smaller numbers take less; or a smaller model"
    return say(start, "quantization", "set", text)


def who_holds_it(start: Start, why: str) -> list[Advice]:
    """Find out who else is on the device."""
    tenants = [sign.inputs.get("pid") for sign in start.facts.signs("tenant")]
    named = ", ".join(f"process {pid}" for pid in dict.fromkeys(tenants) if pid is not None)
    text = f"{why}; the log names {named}" if named else f"{why}; nvidia-smi names them outside the container"
    return say(start, "other_process", "investigate", text)


def only_what_is_free(start: Start) -> list[Advice]:
    """The share lowered to what is free, where that is nearly what was asked for."""
    facts = start.facts
    free, total, asked = (start.size(name) for name in ("free_at_start_bytes", "total_bytes", "requested_bytes"))
    if free is None or not total or asked is None or free < asked * _NEAR:
        return []
    free -= facts.resolution("free_at_start_bytes")
    total += facts.resolution("total_bytes")
    if total <= 0:
        return []
    # Graphs that are not reserved come on top of the request.
    on_top = GRAPHS if start.kept.how == "not_taken" else 0
    weights = start.size("weights_bytes")
    to = max(0, free - on_top) * 1000 // total / 1000
    if to <= 0 or (weights is not None and round(to * total) - weights < GIB):
        return []
    text = f"{format_bytes(free)} of {format_bytes(total)} are free"
    text += f", {format_bytes(on_top)} of it for graphs that come on top" if on_top else ""
    text += ", if weights and KV cache fit that" if weights is None else ""
    leftover = max(0, free - round(to * total))
    return say(start, start.facts.dialect.share, "lower", text, to=to, leftover=leftover)


def another_device(start: Start, why: str) -> list[Advice]:
    """Another device, or a look at which one it is."""
    return say(start, "device_selection", "investigate", why)


def nothing_to_set(start: Start, why: str) -> list[Advice]:
    """Where no setting helps, what to look at."""
    return say(start, "none", "investigate", why)


def host(start: Start) -> list[Advice]:
    """Memory of the host: blocks of KV cache kept there first."""
    found: list[Advice] = []
    blocks = start.size("cpu_blocks")
    if blocks:
        had = given(start, "cpu_kv_space")
        text = f"{blocks} blocks of KV cache are kept in host memory, which is pinned at once"
        found += say(start, "cpu_kv_space", "lower", text, to=0 if had != 0 else None)
    text = "dmesg, the container's limit (memory.events of its cgroup) and its events tell who was killed and why"
    return found + say(start, "host_memory", "investigate", text)


def cures(start: Start, fault: KnownFault | None) -> list[Advice]:
    """What cures a known fault, as changes."""
    found: list[Advice] = []
    for cure in () if fault is None else fault.cures:
        text = f"{fault.issue}: {fault.cure or fault.what}" if fault is not None else ""
        if cure.setting == "engine_version" and cure.to is not None and _has(start, cure.to):
            continue
        found += say(start, cure.setting, cure.direction, text, to=cure.to, flag=cure.flag)
    return found


def _has(start: Start, version: str) -> bool:
    since, wanted = start.facts.dialect.versions.since, parse(version)
    return since is not None and wanted is not None and since >= wanted


def once(advice: Iterable[Advice]) -> list[Advice]:
    """The first word on a setting stands; what comes after it is left out."""
    found: list[Advice] = []
    said: set[str] = set()
    for each in advice:
        changes: tuple[Change, ...] = tuple(change for change in each.changes if change.setting not in said)
        if changes:
            found.append(each if len(changes) == len(each.changes) else attrs.evolve(each, changes=changes))
            said.update(change.setting for change in changes)
    return found
