"""
Finding codes: what a judgement may say. A code never changes its meaning.

``CODES`` is the registry. Journals of other versions may hold other codes; they are kept and shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

Severity = Literal["error", "warning", "note"]
Direction = Literal["raise", "lower", "set", "remove", "investigate"]

SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")

#: Code to what it means. ``docs/how-it-fails.md`` has a section for each.
CODES: Final[dict[str, str]] = {
    "device.not_enough_free": "less memory was free at start than was requested",
    "device.neighbour_present": "another process holds memory on the device",
    "device.neighbour_grew": "another process took memory while we started",
    "device.neighbour_shrank": "another process released memory while we measured",
    "device.drift": "free memory moved and nobody can be named",
    "device.unified_memory": "host and device share memory",
    "device.out_of_memory": "memory ran out, and no earlier cause is visible",
    "weights.exceed_device": "the weights alone do not fit the device",
    "weights.exceed_request": "the weights alone do not fit the request",
    "weights.second_copy": "allocated well above the checkpoint",
    "profile.out_of_memory": "the largest step does not fit",
    "profile.residue": "memory stays after profiling that nobody named",
    "profile.incomplete": "something that runs later was not profiled",
    "graphs.not_reserved": "no estimate was taken off before sizing, and graphs were captured",
    "graphs.estimate_short": "the graphs took more than was reserved for them",
    "graphs.estimate_long": "more was reserved for the graphs than they took",
    "graphs.estimate_negative": "a negative estimate was used",
    "graphs.estimate_absurd": "an impossible estimate was used",
    "capture.failed": "an operation that may not be captured",
    "capture.pool_reused": "a pool was opened again after its graphs died",
    "capture.out_of_memory": "memory ran out while capturing, and no earlier cause is visible",
    "capture.stalled": "captures stopped progressing",
    "workspace.grew": "a persistent workspace grew where it must not",
    "teardown.kv_alive": "the profiling KV cache is still alive after teardown",
    "teardown.graphs_alive": "throwaway graphs are still alive after teardown",
    "teardown.pool_held": "a pool did not return its memory",
    "teardown.weights_changed": "the weights are not the same bytes after teardown",
    "budget.negative": "nothing is left for the KV cache",
    "budget.request_does_not_fit": "one longest request needs more KV cache than there is",
    "budget.sequences_do_not_fit": "fewer state blocks than sequences",
    "budget.counted_twice": "the terms of the budget do not add up",
    "budget.overrun": "the start stands above its request",
    "budget.unused": "the start stands well under its request",
    "budget.pinned_too_large": "the explicit KV bytes leave no room for the rest",
    "kv.out_of_memory": "the KV cache could not be allocated",
    "kv.addresses_moved": "graphs hold addresses that the KV cache no longer has",
    "kv.unmapped_touch": "memory was touched that is not mapped",
    "verify.out_of_memory": "the first real step after capture does not fit",
    "verify.replay_differs": "a replayed step does not equal the eager step",
    "ranks.disagree": "ranks do not agree",
    "ranks.uneven": "ranks differ in memory",
    "ranks.same_device": "two ranks use one device",
    "ranks.peer_failed": "another rank failed",
    "ranks.missing": "a rank is missing",
    "state.raised": "the engine raised something that is not about memory",
    "state.stalled": "a state passed its deadline",
    "run.ended_without_trace": "the journal stops inside a state",
    "run.ended_by_signal": "a signal ended the start",
    "host.out_of_memory": "host memory ran out",
    "journal.torn": "a line of the journal is broken",
    "journal.gap": "events are missing from the journal",
    "journal.unwritable": "the journal could not be written",
    "time.unattributed": "time passed outside every state",
    "time.straggler": "one rank is much slower than the others",
}


@attrs.frozen(kw_only=True)
class Finding:
    """
    One thing that a judgement says, with what it was read from.

    Attributes:
        code: From :data:`CODES`; a test holds every judgement of this package to it.
        severity: ``error`` when this start failed or may give wrong results because of it, ``warning`` when memory
            was wasted or it may fail next time, else ``note``.
        state, part: Where the invariant was first violated.
        message: One sentence with numbers.
        observed, expected, tolerance: Plain values; bytes are ints in bytes.
        scope: ``allocator``, ``process`` or ``device``: whose meter it rests on.
        bytes: Size of the matter, for ranking.
        evidence: Sequence numbers of the events that show it.
        reason: One word, for machines.
    """

    code: str
    severity: Severity
    state: str | None = None
    part: str | None = None
    message: str
    observed: Any = None
    expected: Any = None
    tolerance: Any = None
    scope: str = "process"
    bytes: int = 0
    evidence: tuple[int, ...] = ()
    reason: str = ""


@attrs.frozen(kw_only=True)
class Change:
    """One move of one knob, by our name for it (``contracts``: settings)."""

    setting: str
    direction: Direction
    flag: str | None = None
    before: Any = None
    to: Any = None
    unit: str | None = None


@attrs.frozen(kw_only=True)
class Advice:
    """
    Changes that belong together, and why.

    Attributes:
        changes: At least one.
        because: One sentence with the arithmetic.
        leftover_bytes: What is expected to be free afterwards; None where it cannot be told.
        interval: Smallest and largest value that the numbers allow, for the first change.
    """

    changes: tuple[Change, ...]
    because: str
    leftover_bytes: int | None = None
    interval: tuple[float, float] | None = None


#: Registered names of settings, with what they mean.
SETTINGS: Final[Mapping[str, str]] = {
    "gpu_memory_utilization": "share of the device that the engine may use",
    "mem_fraction_static": "share for weights and KV pool",
    "kv_cache_memory_bytes": "explicit KV bytes",
    "requested_bytes": "explicit bytes of the whole request, of a start of ours; wins over the share",
    "max_model_len": "longest request in tokens",
    "max_num_seqs": "sequences at once",
    "max_num_batched_tokens": "tokens of one step",
    "chunked_prefill_size": "tokens of one prefill chunk",
    "max_running_requests": "requests at once",
    "capture_sizes": "batch sizes with a graph",
    "enforce_eager": "no graphs at all; the last resort",
    "tensor_parallel_size": "devices that share each layer",
    "pipeline_parallel_size": "devices that share the layers",
    "device_selection": "which device",
    "kv_cache_dtype": "number format of the KV cache",
    "quantization": "number format of the weights",
    "lora": "adapters",
    "speculative": "draft model",
    "graph_estimate": "what is reserved for graphs",
    "other_process": "who else holds the device",
    "engine_version": "a version that cures a known fault",
    "cpu_kv_space": "host memory for KV",
    "host_memory": "host memory",
    "none": "nothing to set: not a memory fault",
}
