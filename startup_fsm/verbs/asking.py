"""The verb that asks what would have been: the budget of a start again, with other settings."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
from cyclopts import Parameter

from startup_fsm.errors import JournalError, StartupError
from startup_fsm.reading import read_starts
from startup_fsm.reports.budgets import what_if_view
from startup_fsm.reports.output import SCHEMA, emit_json, emit_pages
from startup_fsm.verbs.arguments import SWITCH, Json, Path
from startup_fsm.verdict import EXIT_NOT_READY, EXIT_READY
from startup_fsm.verdicts import sizing
from startup_fsm.what_if import WhatIf

Share = Annotated[
    float | None, Parameter(name=("--gpu-memory-utilization", "--utilization"), help="Share of the device.")
]
Fraction = Annotated[float | None, Parameter(help="Share for weights and KV pool, where the engine has that.")]
KVBytes = Annotated[
    int | None,
    Parameter(name=("--kv-cache-memory-bytes", "--kv-cache-memory"), help="Explicit bytes of the KV cache."),
]
Longest = Annotated[int | None, Parameter(help="Longest request, in tokens.")]
BatchedTokens = Annotated[int | None, Parameter(help="Tokens of one step.")]
Chunk = Annotated[int | None, Parameter(help="Tokens of one prefill chunk.")]
GraphBytes = Annotated[int | None, Parameter(name="--graph-estimate", help="Bytes to reserve for graphs.")]
Eager = Annotated[bool, SWITCH, Parameter(help="No graphs at all.")]
Devices = Annotated[int | None, Parameter(help="Devices that share each layer.")]
KVFormat = Annotated[str | None, Parameter(name="--kv-cache-dtype", help="Number format of the KV cache, such as fp8.")]


def what_if(  # noqa: PLR0913 - options of a command line, all by name
    path: Path,
    /,
    *,
    gpu_memory_utilization: Share = None,
    mem_fraction_static: Fraction = None,
    kv_cache_memory_bytes: KVBytes = None,
    max_model_len: Longest = None,
    max_num_batched_tokens: BatchedTokens = None,
    chunked_prefill_size: Chunk = None,
    graph_estimate: GraphBytes = None,
    enforce_eager: Eager = False,
    tensor_parallel_size: Devices = None,
    kv_cache_dtype: KVFormat = None,
    json: Json = False,
) -> int:
    """Compute the budget of a start again with other settings: each term side by side, and the shares that would do."""
    asked = {
        "tensor_parallel_size": tensor_parallel_size,
        "kv_cache_dtype": kv_cache_dtype,
        "max_num_batched_tokens": max_num_batched_tokens,
        "chunked_prefill_size": chunked_prefill_size,
        "graph_estimate": graph_estimate,
        "enforce_eager": enforce_eager or None,
        "gpu_memory_utilization": gpu_memory_utilization,
        "mem_fraction_static": mem_fraction_static,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "max_model_len": max_model_len,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    if not changes:
        raise StartupError("what-if needs a setting", hint="startup-fsm what-if PATH --utilization 0.95")
    start = read_starts(path)[-1]
    found = _answer(path, start.sources, changes)
    if json:
        emit_json(
            {"schema": SCHEMA, "run": start.run, "origin": start.origin, "changes": changes, **attrs.asdict(found)}
        )
    else:
        emit_pages([what_if_view(start, changes, found)])
    after = found.after
    fits = after.request_fits is not False and after.available_bytes > 0 and (after.leftover_bytes or 0) >= 0
    return EXIT_READY if fits else EXIT_NOT_READY


def _answer(path: str, sources: Any, changes: dict[str, Any]) -> WhatIf:
    from startup_fsm import what_if as arithmetic

    sized = sizing(sources)
    if sized is None:
        hint = "doctor says what the log lacks (vLLM prints its budget at level DEBUG); a journal has it always"
        raise JournalError(f"{path}: nothing here tells how the KV cache was sized", path=path, hint=hint)
    try:
        return arithmetic.what_if(sized, changes)
    except ValueError as error:
        raise StartupError(str(error), hint="startup-fsm doctor says what is known of this start") from None
