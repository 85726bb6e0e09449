"""
Which way to turn which knob: values solved from what was recorded, never one that the numbers refuse. Pure.

The direction depends on the state: running out of memory while capturing and while loading need opposite moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from startup_fsm import budget
from startup_fsm.causes import budget_before, graphs_needed, last_oom, request_that_fits
from startup_fsm.checks.readings import requested_bytes, utilization
from startup_fsm.events import BudgetComputed
from startup_fsm.findings import Advice, Change, Direction, Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import MIB, format_bytes

_UTILIZATION: Final = "gpu_memory_utilization"
_PINNED: Final = "kv_cache_memory_bytes"
_REQUESTED: Final = "requested_bytes"

#: One allocation failed; a step that asks for one such block asks for a few more.
_STEP_BLOCKS: Final = 4
#: A sampler that sorts all logits: measured on an H200, 36 bytes for each logit of 4 bytes beside the logits.
_SAMPLER_BLOCKS: Final = 10

Adviser = Callable[[Finding, Visit, RunState], list[Advice]]


def advise(finding: Finding, visit: Visit | None, run: RunState) -> list[Advice]:
    """What to change about a finding of the visit that failed, or of the last one; empty where nothing is known."""
    adviser = _ADVISERS.get(finding.code)
    where = visit or run.current
    return [] if adviser is None or where is None else adviser(finding, where, run)


def _say(setting: str, direction: Direction, because: str, **facts: Any) -> Advice:
    leftover, interval = facts.pop("leftover", None), facts.pop("interval", None)
    change = Change(setting=setting, direction=direction, **facts)
    return Advice(changes=(change,), because=because, leftover_bytes=leftover, interval=interval)


def _lower_utilization(by: int, computed: BudgetComputed, run: RunState, why: str) -> list[Advice]:
    """Lower the utilization so that the KV cache shrinks by ``by`` bytes; nothing where it would not fit any more."""
    if (pinned := run.knob(_PINNED)) is not None:
        # More may have been pinned than there was.
        return _repin(min(computed.kv_bytes, computed.available_bytes) - by, pinned, computed, why)
    if run.knob(_REQUESTED) is not None:
        return _lower_request(by, computed, why)
    share = utilization(run)
    if share is None or computed.total_bytes <= 0:
        return []
    # What the device lacks against the request is not had by lowering it: start from what can be had.
    reachable = min(computed.requested_bytes, computed.reachable_bytes)
    to = math.floor((reachable - by) / computed.total_bytes * 1000) / 1000
    least = computed.needed_bytes or computed.block_bytes
    left = computed.kv_bytes - (computed.requested_bytes - math.floor(to * computed.total_bytes))
    left -= budget.term(computed, "not_free")
    if to <= 0 or to >= share or left < least:
        return []
    text = f"{why}: {format_bytes(by)} less for the KV cache, {format_bytes(left)} stay"
    return [_say(_UTILIZATION, "lower", text, before=share, to=to, leftover=left)]


def _lower_request(by: int, computed: BudgetComputed, why: str) -> list[Advice]:
    """The same where the request is bytes."""
    to = (min(computed.requested_bytes, computed.reachable_bytes) - by) // MIB * MIB
    left = computed.kv_bytes - (computed.requested_bytes - to) - budget.term(computed, "not_free")
    if to <= 0 or left < (computed.needed_bytes or computed.block_bytes):
        return []
    text = f"{why}: {format_bytes(by)} less for the KV cache, {format_bytes(left)} stay"
    before = computed.requested_bytes
    return [_say(_REQUESTED, "lower", text, before=before, to=to, unit="bytes", leftover=left)]


def _raise_request(kv_bytes: int, computed: BudgetComputed, why: str) -> list[Advice]:
    needed = computed.requested_bytes + budget.term(computed, "not_free") - computed.available_bytes + kv_bytes
    to = -(-needed // MIB) * MIB
    if not computed.requested_bytes < to <= computed.reachable_bytes:
        return []
    text = f"{why}: {format_bytes(computed.missing_bytes)} are missing of {format_bytes(computed.requested_bytes)}"
    before, leftover = computed.requested_bytes, computed.reachable_bytes - to
    return [_say(_REQUESTED, "raise", text, before=before, to=to, unit="bytes", leftover=leftover)]


def _repin(kv_bytes: int, pinned: Any, computed: BudgetComputed, why: str) -> list[Advice]:
    """Where the KV bytes are explicit, no other knob moves them: the nearest number of whole blocks that fits."""
    to = kv_bytes // computed.block_bytes * computed.block_bytes if computed.block_bytes > 0 else 0
    least = computed.needed_bytes or computed.block_bytes
    if (
        not isinstance(pinned, int)
        or to < max(1, least)
        or to == pinned
        or (to > pinned and to > computed.available_bytes)
    ):
        return []
    direction: Direction = "raise" if to > pinned else "lower"
    leftover = computed.available_bytes - to
    return [_say(_PINNED, direction, why, before=pinned, to=to, unit="bytes", leftover=leftover)]


def _raise_utilization(kv_bytes: int, computed: BudgetComputed, run: RunState, why: str) -> list[Advice]:
    if (pinned := run.knob(_PINNED)) is not None:
        return _repin(kv_bytes, pinned, computed, why)
    if run.knob(_REQUESTED) is not None:
        return _raise_request(kv_bytes, computed, why)
    share = utilization(run)
    interval = budget.utilization_for(computed, kv_bytes)
    if interval is None or share is None or interval[0] <= share:
        return []
    text = f"{why}: {format_bytes(computed.missing_bytes)} are missing of {format_bytes(computed.total_bytes)}"
    leftover = computed.reachable_bytes - math.floor(interval[0] * computed.total_bytes)
    return [_say(_UTILIZATION, "raise", text, before=share, to=interval[0], interval=interval, leftover=leftover)]


def _graphs(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    if sized is None:
        return []
    computed = sized[1]
    needed = graphs_needed(visit, run) if visit.failed is not None else int(finding.observed or 0)
    reserved = -budget.term(computed, "graphs")
    left = computed.available_bytes - (needed - reserved)
    least = computed.needed_bytes or computed.block_bytes
    found: list[Advice] = []
    if left >= least and run.knob(_PINNED) is None:
        text = f"the graphs need {format_bytes(needed)}, {format_bytes(reserved)} were reserved"
        before = run.knob("graph_estimate", "measure")
        found.append(_say("graph_estimate", "set", text, before=before, to=needed, unit="bytes", leftover=left))
    found += _lower_utilization(needed - reserved, computed, run, "room for the graphs")
    found.append(_say("capture_sizes", "lower", "fewer graphs take less memory", before=run.knob("capture_sizes")))
    return found


def _negative(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    if sized is None:
        return []
    computed = sized[1]
    least = max(computed.needed_bytes or 0, computed.block_bytes)
    found = _raise_utilization(least, computed, run, "room for one longest request")
    headroom = -budget.term(computed, "headroom")
    if headroom > 0:
        text = f"the largest step is charged {format_bytes(headroom)}"
        found.append(_say("max_num_batched_tokens", "lower", text, before=run.knob("max_num_batched_tokens")))
    found.append(_say("tensor_parallel_size", "raise", "each device then holds a part of the weights"))
    return found


def _request(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    if sized is None:
        return []
    computed = sized[1]
    found = _raise_utilization(computed.needed_bytes or 0, computed, run, "room for one longest request")
    fits = request_that_fits(visit, computed)
    if fits > 0:
        text = f"{computed.blocks} blocks hold {fits} tokens"
        before = run.knob("max_model_len") or visit.notes.get("longest_tokens")
        found.append(_say("max_model_len", "lower", text, before=before, to=fits, unit="tokens", leftover=0))
    found.append(_say("kv_cache_dtype", "set", "smaller numbers halve what a token takes"))
    return found


def _neighbour(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    found = [_say("other_process", "investigate", finding.message)]
    sized, after = budget_before(visit, run), visit.after
    if visit.failed is None or sized is None or after is None:
        return found
    computed = sized[1]
    had = min(computed.requested_bytes, computed.reachable_bytes)
    short = had - (after.own_bytes + after.free_bytes)
    return found + _lower_utilization(short, computed, run, "what the other process left") if short > 0 else found


def _ran_out_after(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized, oom = budget_before(visit, run), last_oom(visit, run)
    if sized is None or oom is None or not oom.tried_bytes:
        return []
    blocks = _SAMPLER_BLOCKS if finding.part == "sampler" else _STEP_BLOCKS
    by = blocks * oom.tried_bytes + 64 * MIB
    why = f"the step asked for {format_bytes(oom.tried_bytes)} at once, and may for up to {blocks} such blocks"
    found = _lower_utilization(by, sized[1], run, why)
    found.append(_say("max_num_seqs", "lower", "fewer rows in the largest step", before=run.knob("max_num_seqs")))
    return found


def _overrun(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    return [] if sized is None else _lower_utilization(finding.bytes, sized[1], run, "back within the request")


def _unused(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    share, sized = utilization(run), budget_before(visit, run)
    if share is None or sized is None or sized[1].total_bytes <= 0 or run.knob(_REQUESTED) is not None:
        return []
    computed = sized[1]
    wanted = min(computed.requested_bytes + finding.bytes, computed.reachable_bytes)
    to = math.floor(wanted / computed.total_bytes * 1000) / 1000
    if not share < to <= 1:
        return []
    return [_say(_UTILIZATION, "raise", finding.message, before=share, to=to)]


def _pinned(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    room = finding.expected
    if not isinstance(room, int) or room <= 0:
        return []
    sized, pinned = budget_before(visit, run), run.knob(_PINNED)
    return [] if sized is None else _repin(room, pinned, sized[1], f"{format_bytes(room)} are left for the KV cache")


def _weights(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    text = f"{format_bytes(finding.bytes)} are missing"
    return [
        _say("tensor_parallel_size", "raise", f"{text}; each device then holds a part of the weights"),
        _say("quantization", "set", f"{text}; smaller numbers take less"),
    ]


def _profile(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    text = "the largest step sets what must stay free"
    tokens = run.knob("max_num_batched_tokens")
    found = [_say("max_num_seqs", "lower", text, before=run.knob("max_num_seqs"))]
    found.append(_say("tensor_parallel_size", "raise", "each device then holds a part of the weights"))
    before, after, oom = visit.before, visit.after, last_oom(visit, run)
    if not isinstance(tokens, int) or before is None or after is None or oom is None or not oom.tried_bytes:
        return [_say("max_num_batched_tokens", "lower", text, before=tokens), *found]
    # What the step took until it failed, and asked for then, is the least that it needs; it goes by its tokens, and a
    # transformer that dies in its first layers has seen a quarter of its peak at the worst.
    needed = max(1, after.allocated_peak_bytes - before.allocated_bytes + oom.tried_bytes)
    room = (requested_bytes(run, before.total_bytes) or before.total_bytes) - before.own_bytes
    to = tokens * max(0, room) // (4 * needed) // 16 * 16
    if not 0 < to < tokens:
        return [_say("max_num_batched_tokens", "lower", text, before=tokens), *found]
    why = f"{tokens} tokens need at least {format_bytes(needed)}; {to} may take a quarter of the {format_bytes(room)}"
    why += " beside the weights"
    best = _say("max_num_batched_tokens", "lower", why, before=tokens, to=to, unit="tokens")
    return [best, *found]


def _host(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    if run.started is not None and (run.started.device or "").startswith("simulated"):
        text = "tensors of a simulated device are memory of this machine; ask for less of it, or use step.kv_buffers"
        return [_say(_REQUESTED, "lower", text, before=run.knob(_REQUESTED))]
    return [_say("host_memory", "raise", "the host has less memory than the start needs")]


def _capture(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    return [
        _say("none", "investigate", "not a memory fault: the operation named above may not be captured"),
        _say(
            "enforce_eager", "set", "starts without graphs, and decodes slower; the last resort", before=False, to=True
        ),
    ]


def _nothing(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    return [_say("none", "investigate", _WHERE_TO_LOOK.get(finding.code, "nothing to set: not a memory fault"))]


_WHERE_TO_LOOK: Final = {
    "run.ended_without_trace": "something killed the process: look at dmesg, cgroup events and the container's events",
    "state.stalled": "nothing to set: the stack says where it waited",
    "teardown.kv_alive": "nothing to set: the engine must drop what the finding names",
    "teardown.graphs_alive": "nothing to set: the engine must drop what the finding names",
    "teardown.pool_held": "nothing to set: something outside Python may hold it; a new process does not have it",
    "capture.pool_reused": "nothing to set: the real capture needs a pool that no dropped graph used",
    "state.raised": "nothing to set: not a memory fault",
}

_ADVISERS: Final[dict[str, Adviser]] = {
    "graphs.not_reserved": _graphs,
    "graphs.estimate_short": _graphs,
    "budget.negative": _negative,
    "weights.exceed_request": _negative,
    "budget.request_does_not_fit": _request,
    "budget.overrun": _overrun,
    "budget.unused": _unused,
    "budget.pinned_too_large": _pinned,
    "device.neighbour_grew": _neighbour,
    "device.neighbour_shrank": _neighbour,
    "device.not_enough_free": lambda finding, *_: [_say("other_process", "investigate", finding.message)],
    "verify.out_of_memory": _ran_out_after,
    "profile.incomplete": _ran_out_after,
    "capture.out_of_memory": _ran_out_after,
    "kv.out_of_memory": _ran_out_after,
    "weights.exceed_device": _weights,
    "profile.out_of_memory": _profile,
    "capture.failed": _capture,
    "host.out_of_memory": _host,
    **dict.fromkeys(_WHERE_TO_LOOK, _nothing),
}
