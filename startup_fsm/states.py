"""
The one vocabulary of states and parts, whatever engine they come from.

Nothing here knows an order: plans do. A state of a user's own needs no entry here.
"""

from __future__ import annotations

from typing import Final

import attrs

READY: Final = "ready"
FAILED: Final = "failed"
ENDS: Final = frozenset({READY, FAILED})

#: Name to what is done in it. The order is the usual one and decides which of two faults came first.
VOCABULARY: Final[dict[str, str]] = {
    "init_device": "context, communicators, handles; the baseline",
    "load_weights": "weights, draft model too",
    "warmup": "kernels, autotune, workspaces",
    "profile_activations": "the largest step, compile included",
    "bootstrap_kv": "the small KV cache that capture needs",
    "capture_throwaway": "graphs that will be dropped",
    "recover_allocator": "after a failed capture: repair, and the proof of it",
    "teardown": "throwaway graphs, profiling KV, or a real KV that was too large",
    "reserve_kv": "address space for the KV cache, a prefix of it mapped",
    "size_kv": "the budget, blocks, agreement over ranks",
    "allocate_kv": "the KV cache",
    "capture_graphs": "the graphs that stay",
    "commit_kv": "the rest of the KV cache mapped",
    "verify": "the largest admissible step after capture, sampler included",
    "serving": "after ready",
}

#: Parts with a name, by state.
PARTS: Final[dict[str, tuple[str, ...]]] = {
    "init_device": ("pre_load_check",),
    "load_weights": ("draft_worker_init",),
    "profile_activations": ("compile", "autotune", "encoder", "sampler"),
    "capture_throwaway": ("full", "piecewise", "encoder", "draft"),
    "size_kv": ("request_fits",),
    "allocate_kv": ("mamba_pool", "symmetric_memory_prealloc", "host_pool"),
    "capture_graphs": ("full", "piecewise", "encoder", "draft"),
    "verify": ("sampler_warmup", "kernel_warmup"),
}


@attrs.frozen
class State:
    """
    One step of a start.

    Attributes:
        name: A stable identifier; it is the wire string and, in transitions, the state's name.
        summary: One line for people.
        deadline_s: Seconds after which the watchdog reports a stall; None for no limit.
    """

    name: str
    summary: str = ""
    deadline_s: float | None = None

    @classmethod
    def named(cls, name: str, *, deadline_s: float | None = None) -> State:
        """A state of the shared vocabulary, with its summary."""
        return cls(name, VOCABULARY.get(name, ""), deadline_s)


def position(state: str | None) -> int:
    """Where a state usually stands in a start; unknown states come last."""
    names = list(VOCABULARY)
    return names.index(state) if state in VOCABULARY else len(names)
