"""
Starts of the reference engine on a card: what was predicted, taken and spent, and what goes wrong for real.

    python benchmarks/on_card.py --out DIR [--only PART,...] [--starts 10]

Each start is a process of its own, forked after torch was imported and before CUDA was touched. One JSON line a start
goes to DIR/on_card.jsonl and a table to stdout; journals of the fidelity part go to DIR/journals. Parts: starts,
workloads, single, warmup, retries, oom, holders, tenant, cost, fidelity.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import attrs
import torch

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs, term
from startup_fsm.checks.readings import graphs_actual, used_peak
from startup_fsm.engines.reference.engine import ReferenceEngine
from startup_fsm.engines.reference.options import Options
from startup_fsm.engines.reference.shapes import named
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import driven
from startup_fsm.states import State
from startup_fsm.testing import verdict_of

TEN = (512, 384, 256, 192, 128, 64, 32, 16, 8, 1)
LARGE = {"max_model_len": 256, "max_num_seqs": 512, "max_num_batched_tokens": 8_192}


def options(shape="8b", sizes=51, **rest):
    """The workload of the measured tables: 256 tokens of context, 8,192 tokens of prefill, 512 rows."""
    capture = None if sizes == 51 else TEN
    return Options(shape=shape, capture_sizes=capture, **(LARGE | rest))


def begin(engine, *, plan="throwaway", warm=False, journal=None, device=None, use_nvml=True, hooks=(), **knobs):
    """A start on the card, not yet run."""
    from startup_fsm.devices.cuda import CudaDevice

    settings = Knobs(**knobs)
    chosen = driven(plan, retries=settings.retries, allow_eager=settings.allow_eager)
    if warm:
        chosen = chosen.insert(State.named("warmup"), after="load_weights")
    card = device or CudaDevice(use_nvml=use_nvml)
    return Bootstrap(
        plan=chosen, journal=journal, device=card, knobs=settings, hooks=hooks, discover=False, progress=False
    )


def run(boot, engine):
    """Run a start to its end; what it raised, or None."""
    gc.collect()
    gc.freeze()
    try:
        with torch.no_grad():
            boot.run(engine)
    except Exception as error:  # noqa: BLE001 - the type is part of the result
        return error
    return None


def summary(boot, error=None):
    """What a start says of itself, in plain figures."""
    history, verdict = boot.history, verdict_of(boot)
    said = {
        "outcome": verdict.outcome,
        "failed_state": verdict.failed_state,
        "error": None if error is None else type(error).__name__,
        "findings": [(each.finding.code, each.finding.severity, each.finding.message) for each in verdict.findings],
        "advice": [
            [(change.setting, change.direction, change.to) for change in advice.changes] for advice in verdict.advice
        ],
        "missing_bytes": verdict.missing_bytes,
        "path": [visit.state for visit in history.visits],
        "states_ms": {visit.state: round((visit.duration_ns or 0) / 1e6, 1) for visit in history.visits},
    }
    if history.finished is not None:
        ended = history.finished[1]
        said |= {name: getattr(ended, name) for name in ("duration_ns", "bookkeeping_ns", "syncing_ns", "measuring_ns")}
    if history.estimates:
        made = history.estimates[-1][1]
        said |= {"predicted": made.recurring_bytes, "one_time": made.one_time_bytes, "kv_returned": made.kv_bytes}
    capture, verify = history.last("capture_graphs"), history.last("verify")
    if capture is not None and capture.left is not None:
        said["actual"] = graphs_actual(capture)
        said["outside_of_graphs"] = sum(each.outside_delta_bytes for _, each in capture.captures)
        if "estimators" in capture.probes:
            said["estimators"] = dict(capture.probes["estimators"][1].result)
    if history.budgets:
        budget = history.budgets[-1][1]
        said |= {"requested": budget.requested_bytes, "kv": budget.kv_bytes, "block": budget.block_bytes}
        said |= {name: -term(budget, name) for name in ("margin", "headroom", "graphs")}
    if verify is not None and verify.left is not None:
        said["used_peak"] = used_peak(verify)
        said["replay"] = verify.probes["replay"][1].result if "replay" in verify.probes else None
    if history.arena is not None:
        said["granule"] = history.arena[1].granule_bytes
    return said


def forked(out, name, body):
    """Run ``body`` in a forked process; its dict is written, and returned."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            began = time.monotonic()
            result = body()
            result["wall_s"] = round(time.monotonic() - began, 2)
        except BaseException as error:  # noqa: BLE001 - a child says what it died of
            result = {"crashed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-1_500:]}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(result, default=str).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    result = {"name": name} | (json.loads(text) if text else {"crashed": "the process died"})
    with (out / "on_card.jsonl").open("a") as lines:
        lines.write(json.dumps(result) + "\n")
    print(line(result), flush=True)
    return result


def line(result):
    """One start on one line."""
    if "crashed" in result:
        return f"{result['name']:<34} crashed: {result['crashed'][:110]}\n{result.get('trace', '')}"
    shown = [f"{result['name']:<34}", str(result.get("outcome", "")), f"{result.get('wall_s', 0)} s"]
    names = ("predicted", "actual", "one_time", "used_peak", "requested", "margin", "headroom")
    shown += [f"{name} {result[name] / MIB:.1f}" for name in names if result.get(name) is not None]
    if result.get("used_peak") is not None:
        shown.append(f"slack {(result['requested'] - result['used_peak']) / MIB:.1f}")
    loud = [each[0] for each in result.get("findings", ()) if each[1] != "note"]
    shown += [f"findings {loud}"] if loud else []
    shown += [f"error {result['error']}"] if result.get("error") else []
    return "  ".join(shown)


def one(shape="8b", sizes=51, engine_options=None, **given):
    """A start in this process; its summary."""
    engine = ReferenceEngine(options(shape, sizes, **(engine_options or {})), place="cuda")
    boot = begin(engine, **given)
    return summary(boot, run(boot, engine))


def starts(out, arguments):
    """The 8B shape with 51 sizes: ten in a row, and three utilizations."""
    for share in (0.5, 0.98):
        forked(out, f"8b 51 utilization {share}", functools.partial(one, utilization=share))
    for number in range(arguments.starts):
        forked(out, f"8b 51 utilization 0.9 #{number}", functools.partial(one, utilization=0.9))


def workloads(out, arguments):
    """What each estimator says, and each policy leaves over or under the request."""
    for shape, sizes, keep in (
        ("0.5b", 51, True), ("0.5b", 10, True), ("0.5b", 51, False),
        ("8b", 10, True), ("8b", 51, False), ("moe", 10, True), ("moe", 51, False),
    ):  # fmt: skip
        name = f"{shape} {sizes} logits {'kept' if keep else 'shared'}"
        forked(out, name, functools.partial(one, shape, sizes, {"keep_logits": keep}, utilization=0.9))
    for method in ("linear", "first_plus_outputs", "size_proportional"):
        forked(out, f"8b 51 by {method}", functools.partial(one, utilization=0.9, graph_method=method))
    forked(out, "8b 51 nothing reserved", functools.partial(one, utilization=0.9, graph_estimate="none"))


def timed(plan):
    """Two starts in one process: the first loads kernels, the second finds them loaded."""
    from startup_fsm.devices.cuda import CudaDevice

    device = CudaDevice()
    results = []
    for _ in range(2):
        engine = ReferenceEngine(options(), place="cuda")
        boot = begin(engine, plan=plan, device=device, utilization=0.9)
        results.append(summary(boot, run(boot, engine)))
        history = boot.history
        loaded, verified = history.last("load_weights"), history.last("verify")
        results[-1]["loaded_to_verified_ms"] = round((verified.ended_t - loaded.ended_t) / 1e6, 1)
        engine.release_graphs()
        engine.release_kv()
        vars(engine).clear()
        boot.measurement.pools.clear()
        if boot.measurement.arena is not None:
            boot.measurement.arena.close()
        boot.measurement.arena = None
        del engine, boot, history, loaded, verified
        device.settle(clear_workspaces=True)
    cold, warm = results
    return warm | {"cold_ms": cold["loaded_to_verified_ms"], "warm_ms": warm["loaded_to_verified_ms"], "cold": cold}


def single(out, arguments):
    """One capture against two: time from weights loaded to verified, beside its floor."""
    for attempt in range(arguments.pairs):
        throwaway = forked(out, f"throwaway, twice #{attempt}", functools.partial(timed, "throwaway"))
        once = forked(out, f"single_capture, twice #{attempt}", functools.partial(timed, "single_capture"))
        for kind in ("cold", "warm"):
            if "crashed" in throwaway or "crashed" in once:
                continue
            states = throwaway["cold"]["states_ms"] if kind == "cold" else throwaway["states_ms"]
            whole = throwaway[f"{kind}_ms"]
            # The second capture: with cold kernels the first one pays for loading them, whoever captures.
            floor = (whole - states["capture_graphs"] - states["teardown"]) / whole
            print(f"  {kind}: single/throwaway {once[f'{kind}_ms'] / whole:.3f}, floor {floor:.3f}", flush=True)


class TakesView(ReferenceEngine):
    """Keeps a view of the profiling KV cache, in the way it was told."""

    keeps = "attribute"

    def allocate_kv(self, step, blocks):
        """As the engine does, and then one view more."""
        super().allocate_kv(step, blocks)
        if step.state != "bootstrap_kv":
            return
        view = self.kv.keys[0][:, ::2]
        if self.keeps == "attribute":
            self.model.layers[0].recent_keys = view
        elif self.keeps == "closure":

            def look():
                return view.sum()

            self.look = look
        elif self.keeps == "partial":
            self.look = functools.partial(torch.sum, view)
        elif self.keeps == "frozen":
            self.model.layers[0].recent_keys = view
            gc.freeze()
        elif self.keeps == "frame":
            self.waiting = _waits(view)
            next(self.waiting)


def _waits(view):
    yield view.shape
    yield view.sum()


def held(kind):
    """A start whose engine keeps the profiling KV alive in one way."""
    engine = TakesView(options("0.5b", 10), place="cuda")
    engine.keeps = kind
    boot = begin(engine, utilization=0.5)
    return summary(boot, run(boot, engine))


def holders(out, arguments):
    """Planted holders, each of which the finding names."""
    for kind in ("attribute", "closure", "partial", "frame", "frozen"):
        result = forked(out, f"holder: {kind}", functools.partial(held, kind))
        print("   ", [each[2] for each in result.get("findings", ())][:1], flush=True)


_TENANT = """
import sys, torch
held = None
for word in sys.stdin:
    amount = int(word)
    held = None
    torch.cuda.empty_cache()
    if amount:
        held = torch.empty(amount, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("done", flush=True)
"""


class Tenant:
    """Another process on the card that takes and frees when it is told."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TENANT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hold(0)

    def hold(self, size):
        """Hold so many bytes, no more and no less."""
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()

    def close(self):
        """End it."""
        self.process.stdin.close()
        self.process.wait()


def beside(use_nvml):
    """A start while another process takes 2 GiB in one state and frees them in a later one."""
    tenant = Tenant()

    class Engine(ReferenceEngine):
        def profile_activations(self, step):
            super().profile_activations(step)
            tenant.hold(2 * GIB)

        def release_kv(self):
            super().release_kv()
            tenant.hold(0)

    engine = Engine(options("0.5b", 10), place="cuda")
    boot = begin(engine, utilization=0.5, use_nvml=use_nvml)
    result = summary(boot, run(boot, engine))
    tenant.close()
    return result | {"tenant_pid": tenant.process.pid}


def tenant(out, arguments):
    """A real second process on the card never aborts a start, and is named."""
    for use_nvml in (True, False):
        result = forked(out, f"co-tenant, NVML {'on' if use_nvml else 'off'}", functools.partial(beside, use_nvml))
        print("   ", [each[2] for each in result.get("findings", ())][:3], flush=True)


class NoSampler(ReferenceEngine):
    """Does not profile its sampler."""

    def profile_activations(self, step):
        """The largest step without the sampler."""
        with torch.no_grad():
            self.provide_inputs(step, self.options.max_num_seqs)
            self.largest_step(step, self.profiling_cache(), sampler=None)


class Greedy(NoSampler):
    """Has no sampler at all."""

    def verify(self, step):
        """The largest step, and replay against eager."""
        self.largest_step(step, self.kv, sampler=None, compare=True)


def _fails_in(where, **knobs):
    """A start that runs out of memory in one state; the engine and its knobs."""
    tenant = None
    chosen, kind = options(), ReferenceEngine
    if where == "load":
        chosen = options(attrs.evolve(named("70b"), name="70b, 100 layers", layers=100), 10)
    elif where == "profile":
        chosen = options(max_num_batched_tokens=1_600_000)
    elif where == "allocate":
        tenant = Tenant()
        knobs = {"utilization": 0.9} | knobs
    elif where == "capture":
        # Without a sampler the largest step leaves less than the graphs take.
        chosen, kind = options("0.5b"), Greedy
        knobs = {"utilization": 1.0, "graph_estimate": "none"} | knobs
    elif where == "verify":
        # The request is the whole card, so nothing is left for what nobody profiled.
        chosen, kind = options("0.5b"), NoSampler
        knobs = {"utilization": 1.0} | knobs
    if tenant is not None:

        class Engine(ReferenceEngine):
            def allocate_kv(self, step, blocks):
                if step.state == "allocate_kv":
                    tenant.hold(24 * GIB)
                super().allocate_kv(step, blocks)

        kind = Engine
    engine = kind(chosen, place="cuda")
    boot = begin(engine, **knobs)
    result = summary(boot, run(boot, engine))
    if tenant is not None:
        tenant.close()
    return result


def warmup(out, arguments):
    """The state that loads kernels before anything is measured: what is one-time then stays out of the measures."""
    for warm in (False, True):
        forked(out, f"8b 51 {'with' if warm else 'without'} warmup", functools.partial(one, utilization=0.9, warm=warm))


def retries(out, arguments):
    """A real under-estimate goes back by the plan's own edges and becomes ready with a smaller KV cache."""
    result = forked(out, "capture, two retries", functools.partial(_fails_in, "capture", retries=2))
    print("   ", result.get("path"), flush=True)


def oom(out, arguments):
    """A real out-of-memory in each state, and the advice applied."""
    names = {"gpu_memory_utilization": "utilization"}
    for where in ("load", "profile", "allocate", "capture", "verify"):
        result = forked(out, f"oom in {where}", functools.partial(_fails_in, where))
        print("   ", result.get("findings", ())[:1], result.get("missing_bytes"), flush=True)
        for changes in result.get("advice", ()):
            values = {names.get(setting, setting): to for setting, _, to in changes if to is not None}
            if values and set(values) <= {field.name for field in attrs.fields(Knobs)}:
                forked(out, f"  cured by {values}", functools.partial(_fails_in, where, **values))


class Bare:
    """A step that only does what the engine needs: the same start without recording, measuring or judging."""

    def __init__(self, device, state):
        self.device, self.state, self.visit = device, state, 1
        self.pools = device.open_pool(state)

    def note(self, **facts):
        """Nothing."""

    def probe(self, *words, **facts):
        """Nothing."""

    skip = workspace = progress = probe

    def part(self, name):
        """Nothing."""
        import contextlib

        return contextlib.nullcontext()

    def kv_buffers(self, count, block_bytes, blocks):
        """From a pool."""
        with self.pools:
            return self.device.buffers(count, block_bytes * blocks)

    def capture(self, size, body, warmups=1, part=None):
        """As the device does it."""
        return self.device.capture(body, self.pools, size=size, warmups=warmups)


def bare(blocks):
    """Load, profile, capture, drop, allocate, capture, verify, with nothing of ours between them."""
    from startup_fsm.devices.cuda import CudaDevice

    device = CudaDevice()
    engine = ReferenceEngine(options(), place="cuda")
    gc.collect()
    gc.freeze()
    began = time.monotonic_ns()
    with torch.no_grad():
        engine.load_weights(Bare(device, "load_weights"))
        engine.profile_activations(Bare(device, "profile_activations"))
        for state, amount in (("bootstrap_kv", engine.profiling_blocks()), ("allocate_kv", blocks)):
            kv, graphs = Bare(device, state), Bare(device, "capture")
            engine.allocate_kv(kv, amount)
            for size in sorted(engine.capture_sizes(), reverse=True):
                engine.capture(graphs, size)
            if state == "bootstrap_kv":
                engine.release_graphs()
                engine.release_kv()
                del kv, graphs
                torch.cuda.empty_cache()
        engine.verify(Bare(device, "verify"))
        torch.cuda.synchronize()
    return {"outcome": "bare", "duration_ns": time.monotonic_ns() - began}


def cost(out, arguments):
    """What recording costs: whole starts with it and without."""
    pairs = []
    for number in range(3):
        with_us = forked(out, f"recorded #{number}", functools.partial(one, utilization=0.9, journal=str(out / "cost")))
        blocks = with_us["kv"] // with_us["block"]
        without = forked(out, f"bare #{number}", functools.partial(bare, blocks))
        pairs.append((with_us["duration_ns"] / 1e9, without["duration_ns"] / 1e9))
        ours = {name: round(with_us[name] / 1e6, 1) for name in ("bookkeeping_ns", "syncing_ns", "measuring_ns")}
        print(f"  recorded {pairs[-1][0]:.2f} s, bare {pairs[-1][1]:.2f} s, ours in ms: {ours}", flush=True)


def fidelity(out, arguments):
    """Journals that a simulation is held against."""
    for shape, sizes in (("0.5b", 10), ("8b", 51), ("moe", 10)):
        journal = str(out / "journals" / f"{shape}-{sizes}")
        forked(out, f"journal {shape} {sizes}", functools.partial(one, shape, sizes, utilization=0.9, journal=journal))


PARTS = {
    part.__name__: part for part in (starts, workloads, single, warmup, retries, oom, holders, tenant, cost, fidelity)
}


def main():
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=4)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in ("STARTUP_FSM_RUN", "STARTUP_FSM_RUN_OWNER"):
        os.environ.pop(name, None)
    for name in arguments.only.split(","):
        began = time.monotonic()
        print(f"== {name}: {PARTS[name].__doc__.splitlines()[0]}", flush=True)
        PARTS[name](arguments.out, arguments)
        print(f"   {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
