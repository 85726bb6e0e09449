"""
The simulated device held against journals of the same starts on a card, edge by edge.

    python benchmarks/on_card.py --out DIR --only fidelity          (on the card)
    python benchmarks/fidelity.py DIR/journals [--fit FILE]         (anywhere)

Costs outside torch are fitted on the smallest start (0.5b, 10 sizes) and judged on the others. A calibration holds the
context, loaded modules, workspaces and what a graph and a node cost, and nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import attrs
import torch

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.costs import Costs
from startup_fsm.devices.following import FollowingDevice
from startup_fsm.engines.reference.engine import ReferenceEngine
from startup_fsm.engines.reference.options import Options
from startup_fsm.fold import fold
from startup_fsm.journal import read_journal
from startup_fsm.memory import MIB
from startup_fsm.plan import throwaway

#: What a graph takes beside its nodes, in bytes; from graphs of 10, 100 and 1,000 nodes, docs/concepts/on-the-card.md.
GRAPH_BYTES = 75 * 1024


def outside(run, state, label):
    """Bytes outside torch at one edge."""
    return run.last(state).snapshots[label][1].outside_bytes


def fitted(run):
    """Costs of a card from one start on it."""
    captures = [event for _, event in run.last("capture_throwaway").captures]
    nodes = sum(event.nodes for event in captures)
    context, loaded = outside(run, "init_device", "enter"), outside(run, "profile_activations", "F0")
    grown = outside(run, "capture_throwaway", "F1") - loaded
    return Costs(
        context_bytes=context,
        modules_bytes=loaded - context,
        # Kernels are loaded by the eager step already: what capturing adds goes by nodes.
        capture_bytes=0,
        graph_bytes=GRAPH_BYTES,
        node_bytes=max(0, grown - len(captures) * GRAPH_BYTES) // max(1, nodes),
    )


def simulated(run, costs):
    """The same start with fakes on a simulated device: its history."""
    knobs = run.started.knobs
    total = run.last("init_device").before.total_bytes
    options = Options(
        shape=knobs["shape"],
        max_model_len=knobs["max_model_len"],
        max_num_seqs=knobs["max_num_seqs"],
        max_num_batched_tokens=knobs["max_num_batched_tokens"],
        block_size=knobs["block_size"],
        capture_sizes=tuple(knobs["capture_sizes"]),
    )
    device = FollowingDevice(total, fake=True, costs=costs)
    boot = Bootstrap(
        plan=throwaway(),
        journal=None,
        device=device,
        knobs=Knobs(utilization=knobs["gpu_memory_utilization"]),
        discover=False,
        progress=False,
    )
    with torch.no_grad():
        boot.run(ReferenceEngine(options, address=device.address))
    return boot.history


def figures(run):
    """What is compared, in bytes."""
    loaded, profiled = run.last("load_weights").after, run.last("profile_activations").snapshots
    captured = run.last("capture_throwaway").snapshots["F1"][1]
    pool = next(each for each in captured.pools if each.purpose == "throwaway_graphs")
    before = run.last("profile_activations").before
    return {
        "weights": loaded.allocated_bytes,
        "weights, reserved": loaded.reserved_bytes,
        "activation peak, allocated": profiled["peak"][1].allocated_peak_bytes,
        "activation peak, reserved": profiled["peak"][1].reserved_peak_bytes,
        "activations alone": profiled["peak"][1].allocated_peak_bytes - before.allocated_bytes,
        "graph pool, live": pool.active_bytes,
        "graph pool, reserved": pool.reserved_bytes,
        "outside torch, profiled": outside(run, "profile_activations", "F0"),
        "outside torch, captured": outside(run, "capture_throwaway", "F1"),
        "KV cache": run.budgets[-1][1].kv_bytes,
    }


def main():
    """Fit on the first, judge all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("journals", type=Path)
    parser.add_argument("--fit", type=Path, help="write the fitted costs to this file")
    arguments = parser.parse_args()
    runs = {}
    for name in ("0.5b-10", "8b-51", "moe-10"):
        path = next(iter(sorted((arguments.journals / name).glob("*/*.jsonl"))))
        runs[name] = fold(read_journal(path).records)
    first = runs["0.5b-10"]
    costs = fitted(first)
    if arguments.fit:
        origin = {
            "device": first.started.device,
            "versions": dict(first.started.versions),
            "fitted_on": "0.5b, 10 sizes, plan throwaway",
            "script": "benchmarks/fidelity.py",
        }
        arguments.fit.write_text(json.dumps({"origin": origin, "costs": attrs.asdict(costs)}, indent=2) + "\n")
    for name, run in runs.items():
        card, model = figures(run), figures(simulated(run, costs))
        print(f"\n{name:<28} {'card MiB':>12} {'simulated':>12} {'off':>9}")
        for what, bytes_ in card.items():
            off = (model[what] - bytes_) / bytes_ * 100
            print(f"{what:<28} {bytes_ / MIB:>12,.1f} {model[what] / MIB:>12,.1f} {off:>8.2f}%")


if __name__ == "__main__":
    main()
