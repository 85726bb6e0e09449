"""
What to change about the findings of a logged start, in the order of the findings; the state decides the direction.

Memory that ran out while capturing asks for a smaller share, a budget with nothing left for a larger one, and weights
that do not fit for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from startup_fsm.dialects import KnownFault
from startup_fsm.findings import Advice
from startup_fsm.logged import advise_budget as budget
from startup_fsm.logged import advise_memory as memory
from startup_fsm.logged import lengths, places, shares
from startup_fsm.logged.changes import say
from startup_fsm.logged.sizing import GRAPHS
from startup_fsm.logged.start import Found, Start

Adviser = Callable[[Start, Found], list[Advice]]


def advise(start: Start, findings: Sequence[tuple[Found, KnownFault | None]]) -> list[Advice]:
    """
    Advice, best first; the first word on a setting stands.

    Args:
        start: Whose.
        findings: In their order, each with the known fault that explains it.
    """
    advice: list[Advice] = []
    for found, fault in findings:
        if found.finding.severity == "note":
            continue
        if advice and findings[0][0].finding.code in _NOT_MEMORY:
            # What else is wrong with its budget is not what this start ended of.
            break
        adviser = _ADVISERS.get(found.finding.code)
        about = [] if adviser is None else adviser(start, found)
        # A cure of the very fault comes right after the first thing that helps whatever the fault is.
        advice += [*about[:1], *places.cures(start, fault), *about[1:]]
    return places.once(advice)


#: Ends that no setting of memory helps.
_NOT_MEMORY: Final = frozenset({"capture.failed", "capture.pool_reused", "workspace.grew", "state.raised"})


def _neighbour(start: Start, found: Found) -> list[Advice]:
    who = places.who_holds_it(start, found.finding.message.partition(":")[0])
    if found.finding.state == "load_weights":
        return [*who, *places.another_device(start, "another device may have what this one lacks")]
    if found.finding.state == "profile_activations":
        # It was charged to this engine: what is free when nobody else starts decides, not another share.
        return [*who, *places.nothing_to_set(start, "start engines that share a device one after the other")]
    if found.finding.code == "device.neighbour_grew" and found.is_cause and start.sizing is not None:
        on_top = GRAPHS if start.kept.how == "not_taken" else 0
        return [*who, *shares.lower(start, found.finding.bytes + on_top, "what others took, and the graphs")]
    return who


def _moved(start: Start, found: Found) -> list[Advice]:
    text = "start again when nobody else on the device comes or goes, or in a container of its own"
    pinned = say(start, "kv_cache_memory_bytes", "set", "explicit KV bytes skip the measurement that failed")
    return [*places.who_holds_it(start, text), *pinned]


def _capture_failed(start: Start, found: Found) -> list[Advice]:
    text = "not a memory fault, so no setting for memory helps: " + found.finding.message.partition("; it is")[0]
    reason = "" if start.failure is None else start.failure.reason
    # A kernel that is missing is missing without graphs too.
    eager = lengths.no_graphs(start) if reason in ("not_capturable", "ipc_handle", "graph_pool_id") else []
    return [*places.nothing_to_set(start, text), *eager]


def _stalled(start: Start, found: Found) -> list[Advice]:
    if found.finding.code == "capture.stalled" and start.facts.sign("addresses_registered") is not None:
        lowered = shares.lower(start, GRAPHS, "a hidden failure of the first size is mostly too little memory")
        return [*lengths.fewer_graphs(start), *lowered, *lengths.no_graphs(start)]
    text = "nothing to set: look at the stacks of all ranks (py-spy dump) for the one that waits for nobody"
    return places.nothing_to_set(start, text)


def _uneven(start: Start, found: Found) -> list[Advice]:
    if found.finding.reason == "stages":
        layers = "fewer layers on the poorest stage (VLLM_PP_LAYER_PARTITION) give all of them more KV cache"
        return [*places.nothing_to_set(start, layers), *lengths.fewer_tokens(start)]
    text = f"{found.finding.message.partition(';')[0]}: look for a context or a process on the poorer device"
    advice = places.another_device(start, text)
    if start.ending.part == "draft_worker_init":
        return [*advice, *say(start, "speculative", "remove", "without its draft model nothing is checked again")]
    return [*advice, *places.who_holds_it(start, "another process may hold the poorer device")]


def _host(start: Start, found: Found) -> list[Advice]:
    lowered: list[Advice] = []
    if start.facts.sign("unified_memory") is not None:
        lowered = shares.lower(start, 4 * GRAPHS, "the device's share is taken from the host's memory")
    return [*lowered, *places.host(start)]


def _where_to_look(start: Start, found: Found) -> list[Advice]:
    return places.nothing_to_set(start, _WHERE_TO_LOOK.get(found.finding.code, "nothing to set: not a memory fault"))


_WHERE_TO_LOOK: Final = {
    "run.ended_without_trace": "something ended the process, or the log: look at dmesg, cgroup and container events",
    "run.ended_by_signal": "nothing to set: find out who sent the signal; orchestrators do it to what starts slowly",
    "capture.pool_reused": "nothing to set: the real capture needs a pool that no dropped graph used",
    "workspace.grew": "nothing to set: a shape that was not warmed up before the capture needs a larger workspace",
    "ranks.disagree": "nothing to set: start all ranks from one version, one configuration and one set of weights",
    "ranks.missing": "nothing to set: look at the log of the rank that is missing",
    "state.raised": "nothing to set: not a memory fault",
}

_ADVISERS: Final[dict[str, Adviser]] = {
    "device.not_enough_free": budget.not_enough_free,
    "device.neighbour_grew": _neighbour,
    "device.neighbour_present": _neighbour,
    "device.neighbour_shrank": _moved,
    "device.drift": _moved,
    "device.out_of_memory": memory.device_oom,
    "weights.exceed_device": budget.weights,
    "weights.exceed_request": budget.negative,
    "profile.out_of_memory": memory.profile_oom,
    "profile.incomplete": memory.step_oom,
    "graphs.not_reserved": memory.graphs_off,
    "graphs.estimate_short": memory.graphs_off,
    "graphs.estimate_long": memory.estimate_long,
    "graphs.estimate_negative": memory.estimate_negative,
    "graphs.estimate_absurd": memory.estimate_absurd,
    "capture.failed": _capture_failed,
    "capture.out_of_memory": memory.capture_oom,
    "capture.stalled": _stalled,
    "state.stalled": _stalled,
    "budget.negative": budget.negative,
    "budget.request_does_not_fit": budget.request,
    "budget.sequences_do_not_fit": budget.sequences,
    "budget.counted_twice": budget.counted_twice,
    "budget.overrun": budget.overrun,
    "budget.unused": budget.unused,
    "budget.pinned_too_large": budget.pinned,
    "kv.out_of_memory": memory.kv_oom,
    "verify.out_of_memory": memory.step_oom,
    "ranks.uneven": _uneven,
    "host.out_of_memory": _host,
    **dict.fromkeys(_WHERE_TO_LOOK, _where_to_look),
}
