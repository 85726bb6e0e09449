"""
The verbs that start an engine: ours, or the one that a factory makes.

Settings have the names that advice uses, so that an advice can be typed as it stands.
"""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from startup_fsm import launch
from startup_fsm.reports.output import SCHEMA, emit_json, emit_pages
from startup_fsm.reports.terminal import pairs, say
from startup_fsm.reports.views import outcome_view
from startup_fsm.verbs.arguments import SWITCH, AllowEager, Json, Retries
from startup_fsm.verdict import EXIT_PEER, EXIT_READY, report

Factory = Annotated[
    str,
    Parameter(
        name="MODULE:FACTORY",
        help="A function that returns an engine, or an engine and options for Bootstrap; it may take the device.",
    ),
]
PlanName = Annotated[str | None, Parameter(help="throwaway, single_capture or eager.")]
Device = Annotated[str | None, Parameter(help="sim: a simulated device; cuda; auto: the card where there is one.")]
Runs = Annotated[str, Parameter(help="Directory for journals.")]
Mirror = Annotated[bool, SWITCH, Parameter(help="Also write events as log lines to stderr.")]
Shape = Annotated[str | None, Parameter(help="Random weights of a named shape: tiny, 0.5b, 8b, 70b, moe.")]
Checkpoint = Annotated[str | None, Parameter(help="A Hugging Face checkpoint folder: config.json and safetensors.")]
Fake = Annotated[
    bool | None, Parameter(help="No arithmetic: tensors without values, so that shapes start that would not fit.")
]
FaultName = Annotated[str | None, Parameter(help="Break it on purpose.")]
ListFaults = Annotated[bool, SWITCH, Parameter(help="List the faults and what each does.")]
Seed = Annotated[int, Parameter(help="Of random weights, and of the sizes that a fault varies.")]
Utilization = Annotated[float | None, Parameter(help="Share of the device that the engine may use for everything.")]
KVBytes = Annotated[int | None, Parameter(help="Explicit bytes of the KV cache.")]
RequestedBytes = Annotated[
    int | None, Parameter(help="Bytes that the engine may use for everything; wins over the utilization.")
]
GraphEstimate = Annotated[str | None, Parameter(help="What to reserve for graphs: measure, none, or bytes.")]
FewerSizes = Annotated[
    int | None, Parameter(help="How often a start may go back and drop the larger half of its capture sizes.")
]
Restart = Annotated[
    int, Parameter(help="How often the command may start again as a new process, where only that helps.")
]
EnforceEager = Annotated[bool, SWITCH, Parameter(help="No graphs: the plan eager.")]
ModelLength = Annotated[int | None, Parameter(help="Longest request, in tokens.")]
Sequences = Annotated[int | None, Parameter(help="Sequences at once.")]
BatchedTokens = Annotated[int | None, Parameter(help="Tokens of one step.")]
CaptureSizes = Annotated[str | None, Parameter(help="Batch sizes that get a graph, with commas between them.")]


def demo(  # noqa: PLR0913 - options of a command line, all by name
    *,
    device: Device = None,
    plan: PlanName = None,
    shape: Shape = None,
    checkpoint: Checkpoint = None,
    fake: Fake = None,
    fault: FaultName = None,
    list_faults: ListFaults = False,
    seed: Seed = 0,
    retries: Retries = None,
    runs: Runs = "runs",
    mirror: Mirror = False,
    gpu_memory_utilization: Utilization = None,
    requested_bytes: RequestedBytes = None,
    kv_cache_memory_bytes: KVBytes = None,
    max_model_len: ModelLength = None,
    max_num_seqs: Sequences = None,
    max_num_batched_tokens: BatchedTokens = None,
    capture_sizes: CaptureSizes = None,
    graph_estimate: GraphEstimate = None,
    enforce_eager: EnforceEager = False,
    json: Json = False,
) -> int:
    """Start the reference engine on this machine, generate a few tokens, and say what came of it."""
    if list_faults:
        return _faults(json=json)
    launch.check_device(device)
    parts = launch.demonstration(
        device=device,
        plan="eager" if enforce_eager else plan,
        shape=shape,
        checkpoint=checkpoint,
        fake=fake,
        fault=fault,
        seed=seed,
        retries=retries,
        utilization=gpu_memory_utilization,
        requested_bytes=requested_bytes,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        capture_sizes=launch.sizes_from(capture_sizes),
        graph_estimate=launch.estimate_from(graph_estimate),
    )
    boot = launch.bootstrap_of(parts, runs=runs, mirror=mirror)
    outcome = launch.start(boot, parts.engine)
    tokens = launch.generated(parts) if outcome.verdict.outcome == "ready" else None
    return _tell(outcome, tokens, json=json)


def _faults(*, json: bool) -> int:
    from startup_fsm.engines.faults import FAULTS

    rows = [(fault.name, fault.summary) for fault in FAULTS.values()]
    if json:
        emit_json({"schema": SCHEMA, "faults": dict(rows)})
    else:
        emit_pages([[pairs(rows)]])
    return EXIT_READY


def run(  # noqa: PLR0913 - options of a command line, all by name
    factory: Factory,
    /,
    *,
    plan: PlanName = None,
    device: Device = None,
    runs: Runs = "runs",
    mirror: Mirror = False,
    retries: Retries = None,
    fewer_sizes: FewerSizes = None,
    allow_eager: AllowEager = False,
    restart: Restart = 0,
    gpu_memory_utilization: Utilization = None,
    requested_bytes: RequestedBytes = None,
    kv_cache_memory_bytes: KVBytes = None,
    graph_estimate: GraphEstimate = None,
    enforce_eager: EnforceEager = False,
    json: Json = False,
) -> int:
    """Start your engine and say what came of it. What is given here wins over the options of the factory."""
    launch.check_device(device)
    engine, options = launch.made(factory, device)
    boot = launch.bootstrap_for(
        factory,
        options,
        plan="eager" if enforce_eager else plan,
        journal=runs,
        mirror=mirror,
        retries=retries,
        fewer_sizes=fewer_sizes,
        allow_eager=allow_eager or None,
        utilization=gpu_memory_utilization,
        requested_bytes=requested_bytes,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        graph_estimate=launch.estimate_from(graph_estimate),
    )
    if restart > 0:
        from startup_fsm.restart import again

        boot.meetings.again = lambda reason: again(boot, reason, most=restart)
    outcome = launch.start(boot, engine)
    if outcome.restart is not None and boot.meetings.again is not None:
        boot.meetings.again(outcome.restart)
    return _tell(outcome, None, json=json)


def _tell(outcome: launch.Outcome, tokens: list[list[int]] | None, *, json: bool) -> int:
    """What came of a start of ours, and its exit code."""
    verdict = outcome.verdict
    if json:
        emit_json(report([verdict]))
    elif outcome.in_short is not None:
        say("startup-fsm", outcome.in_short, sys.stderr)
    else:
        emit_pages([outcome_view(outcome.history, verdict, tokens, outcome.path)])
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    return EXIT_PEER if outcome.by_peer else verdict.exit_code
