"""What a text log cannot tell of a start, as far as it is known what it leaves out."""

from __future__ import annotations

from startup_fsm.dialects import Span
from startup_fsm.logged.facts import snapshot_of
from startup_fsm.logged.start import Start

#: Versions that print a budget of one rank only, and the terms of it at level DEBUG.
_ONE_RANK = Span.of("0.11.1", "0.26.0")
_TERMS_HIDDEN = Span.of("0.11.0", "0.26.0")


def unseen(start: Start) -> list[str]:
    """Sentences, the widest first."""
    facts = start.facts
    last = snapshot_of(facts)
    found = []
    if last is None:
        found.append(
            "memory between the printed lines: a log has figures where its engine prints them, and no snapshot"
        )
    if last is None or "tenants" not in last.sources:
        found.append("who else was on the device: only the sentence of an out-of-memory names other processes")
    if start.size("total_bytes") is None:
        found.append("the size of the device: nothing printed it")
    if start.sizing is None and start.ending.state not in ("init_device", "load_weights"):
        found.append("the budget: no line of it is in this log")
    elif start.sizing is not None and (start.sizing.share is None or not start.sizing.base_bytes):
        lacks = "what it was" if start.sizing.share is None else "what it is a share of: no line has the device's size"
        found.append(f"{facts.dialect.share}: nothing says {lacks}, so no value can be solved")
    if facts.dialect.engine == "vllm":
        found += _of_vllm(start)
    found += _of_ranks(start)
    for at, process in enumerate(facts.processes):
        if process.run.unknown:
            kinds = ", ".join(sorted(process.run.unknown))
            found.append(f"{facts.label(at) or process.run.process}: events of unknown kinds: {kinds}")
    return found


def _of_vllm(start: Start) -> list[str]:
    facts, versions = start.facts, start.facts.dialect.versions
    found: list[str] = []
    if versions.is_open:
        found.append("the version: what depends on it is said of none")
    has_terms = facts.of("engine_activation_bytes", "engine_outside_torch_bytes")
    is_new = versions.since is not None and versions.since >= (0, 11)
    if not has_terms and is_new and versions.touches(_TERMS_HIDDEN):
        found.append("the terms of the budget: vLLM 0.11 to 0.25 print them at level DEBUG (VLLM_LOGGING_LEVEL=DEBUG)")
    if len(facts.labels) > 1 and is_new and versions.touches(_ONE_RANK):
        found.append("budgets of other ranks than local rank 0: vLLM 0.11.1 to 0.25 print that one only")
    if start.size("free_at_start_bytes") is None:
        found.append("what was held before the engine looked first, its own context among it")
    elif start.is_ready and snapshot_of(facts) is None:
        found.append("free memory at ready: the engine does not print it")
    return found


def _of_ranks(start: Start) -> list[str]:
    facts = start.facts
    silent = [label for label, figures in facts.by_rank().items() if not figures]
    found = [f"figures of {', '.join(silent[:8])}: these ranks print none"] if silent else []
    world = 1
    for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
        value = facts.knob(setting)
        world *= value if isinstance(value, int) and value > 0 else 1
    named = len(facts.labels)
    if world > max(1, named):
        found.append(f"{world - named} of {world} ranks: no line is theirs")
    return found
