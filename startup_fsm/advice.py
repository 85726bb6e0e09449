"""
Which way to turn which knob: values solved from what was recorded, never one that the numbers refuse. Pure.

The direction depends on the state: running out of memory while capturing and while loading need opposite moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import attrs

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


@attrs.frozen
class _Request:
    """
    What was asked for, by the knob that it was asked with: a share in thousandths, or whole MiB.

    Attributes:
        setting: Its name.
        before: Its value.
        unit: Of its value; None for a share.
    """

    setting: str
    before: float
    unit: str | None

    @classmethod
    def of(cls, run: RunState, computed: BudgetComputed) -> _Request | None:
        """Explicit bytes win over a share; None where neither is known."""
        if run.knob(_REQUESTED) is not None:
            return cls(_REQUESTED, computed.requested_bytes, "bytes")
        share = utilization(run)
        return None if share is None or computed.total_bytes <= 0 else cls(_UTILIZATION, share, None)

    def at_most(self, size: int, total: int) -> float:
        """The largest value that asks for no more than ``size`` of ``total`` bytes."""
        return size // MIB * MIB if self.unit else math.floor(size / total * 1000) / 1000

    def asked(self, value: float, total: int) -> int:
        """Bytes that a value asks for."""
        return int(value) if self.unit else math.floor(value * total)

    def say(self, direction: Direction, because: str, to: float, **facts: Any) -> list[Advice]:
        """One piece of advice on it."""
        unit = {} if self.unit is None else {"unit": self.unit}
        return [_say(self.setting, direction, because, before=self.before, to=to, **unit, **facts)]


def _lower_request(by: int, computed: BudgetComputed, run: RunState, why: str) -> list[Advice]:
    """Lower the request so that the KV cache shrinks by ``by`` bytes; nothing where it would not fit any more."""
    if (pinned := run.knob(_PINNED)) is not None:
        # More may have been pinned than there was.
        return _repin(min(computed.kv_bytes, computed.available_bytes) - by, pinned, computed, why)
    if (request := _Request.of(run, computed)) is None:
        return []
    # What the device lacks against the request is not had by lowering it: start from what can be had.
    to = request.at_most(min(computed.requested_bytes, computed.reachable_bytes) - by, computed.total_bytes)
    least = computed.needed_bytes or computed.block_bytes
    left = computed.kv_bytes - (computed.requested_bytes - request.asked(to, computed.total_bytes))
    left -= budget.term(computed, "not_free")
    if to <= 0 or to >= request.before or left < least:
        return []
    text = f"{why}: {format_bytes(by)} less for the KV cache, {format_bytes(left)} stay"
    return request.say("lower", text, to, leftover=left)


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


def _raise_request(kv_bytes: int, computed: BudgetComputed, run: RunState, why: str) -> list[Advice]:
    """Raise the request so that the KV cache has ``kv_bytes``; nothing where the device does not have them."""
    if (pinned := run.knob(_PINNED)) is not None:
        return _repin(kv_bytes, pinned, computed, why)
    request = _Request.of(run, computed)
    if request is None:
        return []
    interval: tuple[float, float] | None
    if request.unit:
        to = -(-budget.request_for(computed, kv_bytes) // MIB) * MIB
        interval = None if to > computed.reachable_bytes else (to, computed.reachable_bytes)
    else:
        interval = budget.utilization_for(computed, kv_bytes)
    if interval is None or interval[0] <= request.before:
        return []
    whole = computed.requested_bytes if request.unit else computed.total_bytes
    text = f"{why}: {format_bytes(computed.missing_bytes)} are missing of {format_bytes(whole)}"
    leftover = computed.reachable_bytes - request.asked(interval[0], computed.total_bytes)
    return request.say("raise", text, interval[0], interval=interval, leftover=leftover)


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
    found += _lower_request(needed - reserved, computed, run, "room for the graphs")
    found.append(_say("capture_sizes", "lower", "fewer graphs take less memory", before=run.knob("capture_sizes")))
    return found


def _negative(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    if sized is None:
        return []
    computed = sized[1]
    least = max(computed.needed_bytes or 0, computed.block_bytes)
    found = _raise_request(least, computed, run, "room for one longest request")
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
    found = _raise_request(computed.needed_bytes or 0, computed, run, "room for one longest request")
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
    return found + _lower_request(short, computed, run, "what the other process left") if short > 0 else found


def _ran_out_after(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized, oom = budget_before(visit, run), last_oom(visit, run)
    if sized is None or oom is None or not oom.tried_bytes:
        return []
    blocks = _SAMPLER_BLOCKS if finding.part == "sampler" else _STEP_BLOCKS
    by = blocks * oom.tried_bytes + 64 * MIB
    why = f"the step asked for {format_bytes(oom.tried_bytes)} at once, and may for up to {blocks} such blocks"
    found = _lower_request(by, sized[1], run, why)
    found.append(_say("max_num_seqs", "lower", "fewer rows in the largest step", before=run.knob("max_num_seqs")))
    return found


def _overrun(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    return [] if sized is None else _lower_request(finding.bytes, sized[1], run, "back within the request")


def _unused(finding: Finding, visit: Visit, run: RunState) -> list[Advice]:
    sized = budget_before(visit, run)
    request = None if sized is None else _Request.of(run, sized[1])
    if sized is None or request is None:
        return []
    computed = sized[1]
    to = request.at_most(min(computed.requested_bytes + finding.bytes, computed.reachable_bytes), computed.total_bytes)
    if not request.before < to or request.asked(to, computed.total_bytes) > computed.total_bytes:
        return []
    return request.say("raise", finding.message, to)


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
