"""
Faults that a start must survive being asked about: each makes happen what its line says, on the simulated device.

No journal may name them: the verdict has to come from what happened. So nothing below puts a name of a fault into an
exception, a hook, a pool or a method that a traceback shows. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import attrs

from startup_fsm.engines.reference.shapes import SHAPES
from startup_fsm.memory import MIB

if TYPE_CHECKING:
    from startup_fsm.devices.following import FollowingDevice
    from startup_fsm.engine import Step
    from startup_fsm.engines.reference.engine import ReferenceEngine
    from startup_fsm.engines.reference.options import Options

Scene = dict[str, Any]
"""Settings by the names of ``assemble``, and ``neighbours``: bytes of other processes by label."""


def _nothing(chance: Random) -> Scene:
    return {}


def _plain(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    return ReferenceEngine(options, address=device.address)


def _no_hooks() -> tuple[object, ...]:
    return ()


@attrs.frozen
class Fault:
    """
    One thing that goes wrong.

    Attributes:
        name: On the command line; never in a journal.
        summary: What is done, in one line.
        scene: Draws the sizes in which it happens.
        engine: Makes the engine that it happens to.
        hooks: Hooks of the start.
        deadlines: Seconds by state.
    """

    name: str
    summary: str
    scene: Callable[[Random], Scene] = _nothing
    engine: Callable[[Options, FollowingDevice, Random], ReferenceEngine] = _plain
    hooks: Callable[[], tuple[object, ...]] = _no_hooks
    deadlines: Mapping[str, float] = attrs.field(factory=dict)


# Scenes: a small start that computes, and a few layers of large shapes without values.


def _small(chance: Random) -> Scene:
    rows = chance.choice((8, 12, 16))
    return {
        "shape": "tiny",
        "fake": False,
        "total": chance.randrange(1_250, 1_500) * MIB,
        "max_num_seqs": rows,
        "max_model_len": chance.choice((64, 96, 128)),
        "max_num_batched_tokens": 128,
        "capture_sizes": sorted({1, *chance.sample(range(2, rows), 2), rows}),
    }


def _roomy(chance: Random) -> Scene:
    return _small(chance) | {"total": chance.randrange(3_000, 4_000) * MIB}


def _many_logits(chance: Random) -> Scene:
    # Logits that graphs keep, against what the largest step needs: only with many sizes do the graphs take more.
    step = chance.choice((1, 2))
    sizes = range(step, 80 * step + 1, step)
    return {
        "shape": attrs.evolve(SHAPES["0.5b"], name="0.5b, 1 layer", layers=1, dtype="float32"),
        "fake": True,
        "total": chance.randrange(6 * 1_024, 10 * 1_024) * MIB,
        "utilization": chance.choice((0.998, 0.999, 1.0)),
        "max_num_seqs": max(sizes),
        "max_model_len": chance.choice((128, 256)),
        "max_num_batched_tokens": 1_024,
        "capture_sizes": list(sizes),
    }


def _no_estimate(chance: Random) -> Scene:
    return _many_logits(chance) | {"graph_estimate": "none"}


def _half_estimate(chance: Random) -> Scene:
    return _many_logits(chance) | {"graph_share": 0.5}


def _tight(chance: Random) -> Scene:
    rows = chance.randrange(256, 513, 32)
    return _many_logits(chance) | {"max_num_seqs": rows, "capture_sizes": [1, rows // 2, rows]}


def _small_device(chance: Random) -> Scene:
    shape = SHAPES["8b"]
    share = chance.uniform(0.4, 0.9)
    return {"shape": shape, "fake": True, "total": round(share * shape.weight_bytes) // MIB * MIB}


def _low_request(chance: Random) -> Scene:
    scene = _small(chance) | {"total": chance.randrange(1_600, 2_400) * MIB}
    # More than the weights, less than context, code and graphs.
    return scene | {"utilization": round(chance.uniform(620, 780) * MIB / scene["total"], 3)}


def _long_request(chance: Random) -> Scene:
    length = chance.randrange(6_144, 8_193, 256)
    shape = attrs.evolve(SHAPES["8b"], name="8b, 8 layers", layers=8)
    scene: Scene = {
        "shape": shape,
        "fake": True,
        "max_model_len": length,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 1_024,
        "capture_sizes": [1, 2],
        "utilization": 0.95,
    }
    needed = shape.kv_block_bytes(16) * length // 16
    # Context, code, activations, graphs and margin of such a start, give or take 30 MiB.
    charged = shape.weight_bytes + 1_140 * MIB
    return scene | {"total": round((charged + chance.uniform(0.45, 0.75) * needed) / 0.95) // MIB * MIB}


def _wide(chance: Random) -> Scene:
    # Long block tables, so that what grows can be seen.
    return _small(chance) | {"max_model_len": chance.choice((1_024, 1_536, 2_048))}


def _crowded(chance: Random) -> Scene:
    theirs = chance.randrange(192, 512) * MIB
    total = chance.randrange(1_250, 1_400) * MIB + theirs
    # What is asked for can be had from the start.
    utilization = round((total - theirs) / total - 0.01, 3)
    return _small(chance) | {"total": total, "neighbours": {_label(chance): theirs}, "utilization": utilization}


def _label(chance: Random) -> str:
    return str(chance.randrange(1_000, 30_000))


# Engines. Each is the reference engine with one thing done wrong.


def _keeps_view(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    place = chance.randrange(options.shape.layers)

    class Engine(ReferenceEngine):
        def allocate_kv(self, step: Step, blocks: int) -> None:
            super().allocate_kv(step, blocks)
            if step.state == "bootstrap_kv" and self.model is not None and self.kv is not None:
                layer: Any = self.model.layers[place]
                layer.recent_keys = self.kv.keys[place][:, ::2]

    return Engine(options, address=device.address)


def _keeps_handle(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    class Engine(ReferenceEngine):
        handle: Any = None
        last_logits: Any = None

        def capture(self, step: Step, size: int) -> None:
            if self.handle is None:
                # A trial in a pool of its own; its graph dies, its logits do not, and the handle is kept for later.
                self.provide_inputs(step, size)
                self.handle = device.open_pool("trial")
                trial = device.capture(partial(self.decode, size), self.handle, size=size)
                self.last_logits = trial.output
                self.handle.release()
                trial.reset()
            if step.state == "capture_graphs":
                self.graphs[size] = device.capture(partial(self.decode, size), self.handle, size=size)
            else:
                super().capture(step, size)

    return Engine(options, address=device.address)


def _looks_up(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    place = chance.randrange(options.shape.layers)

    class Engine(ReferenceEngine):
        lengths_by_layer: Mapping[str, int] = {}

        def allocate_kv(self, step: Step, blocks: int) -> None:
            super().allocate_kv(step, blocks)
            if step.state == "allocate_kv":
                self.lengths_by_layer = {f"layers.{layer}.attention": blocks for layer in range(options.shape.layers)}

        def decode(self, rows: int) -> Any:
            if not self.lengths_by_layer[f"layers.{place}.attention"]:
                return None
            return super().decode(rows)

    return Engine(options, address=device.address)


def _looks_at_values(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    class Engine(ReferenceEngine):
        def decode(self, rows: int) -> Any:
            logits = super().decode(rows)
            if not logits.isfinite().all().item():
                raise ArithmeticError("logits that are no numbers")
            return logits

    return Engine(options, address=device.address)


def _loses_race(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    # More than the tenth that nobody requested and what is kept for graphs and steps.
    label, theirs = _label(chance), device.memory.total_bytes // 10 + chance.randrange(400, 1_000) * MIB

    class Engine(ReferenceEngine):
        arrived = False

        def allocate_kv(self, step: Step, blocks: int) -> None:
            if step.state == "allocate_kv" and not self.arrived:
                self.arrived = True
                device.neighbour_takes(label, theirs)
            super().allocate_kv(step, blocks)

    return Engine(options, address=device.address)


def _sees_departure(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    share = chance.uniform(0.3, 1.0)

    class Engine(ReferenceEngine):
        def profile_activations(self, step: Step) -> None:
            super().profile_activations(step)
            for tenant in device.snapshot().tenants:
                device.neighbour_frees(tenant.label, round(share * (tenant.bytes or 0)))

    return Engine(options, address=device.address)


def _pads_late(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    padded = options.max_num_seqs * chance.choice((64, 128, 256))

    class Engine(ReferenceEngine):
        step: Any = None

        def capture(self, step: Step, size: int) -> None:
            self.step = step
            super().capture(step, size)

        def decode(self, rows: int) -> Any:
            # The first warm-up finds that graphs want more rows than profiling made.
            self.provide_inputs(self.step, padded)
            return super().decode(rows)

    return Engine(options, address=device.address)


def _forgets_sampler(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    class Engine(ReferenceEngine):
        def profile_activations(self, step: Step) -> None:
            self.provide_inputs(step, options.max_num_seqs)
            self.largest_step(step, self.profiling_cache(), sampler=None)

    return Engine(options, address=device.address)


def _waits_for_peer(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    answer = threading.Event()

    class Engine(ReferenceEngine):
        def capture(self, step: Step, size: int) -> None:
            if step.state == "capture_graphs":
                answer.wait(60)
            super().capture(step, size)

    return Engine(options, address=device.address)


def _dies(options: Options, device: FollowingDevice, chance: Random) -> ReferenceEngine:
    from startup_fsm.engines.reference.engine import ReferenceEngine

    class Engine(ReferenceEngine):
        def allocate_kv(self, step: Step, blocks: int) -> None:
            if step.state == "allocate_kv":
                os.kill(os.getpid(), signal.SIGKILL)
            super().allocate_kv(step, blocks)

    return Engine(options, address=device.address)


class Supervisor:
    """A hook that ends the process when a state is overdue, as the one that started it would."""

    name = "supervisor"
    states = ("capture_graphs",)

    def on_event(self, *, event: Any, **future: Any) -> None:
        """SIGKILL once the overdue state is in the journal."""
        if event.kind == "state_stalled":
            os.kill(os.getpid(), signal.SIGKILL)


def _supervised() -> tuple[object, ...]:
    return (Supervisor(),)


#: Every fault by its name.
FAULTS: Final[Mapping[str, Fault]] = {
    fault.name: fault
    for fault in (
        Fault("graphs-not-reserved", "the estimate is dropped, the KV cache takes everything", _no_estimate),
        Fault("estimate-short", "half of the estimate is used", _half_estimate),
        Fault("kv-held-by-view", "a layer keeps a strided view of the profiling KV cache", _small, _keeps_view),
        Fault("pool-reused", "the real capture opens a pool whose graphs died", _small, _keeps_handle),
        Fault("metadata-missing", "a layer looks up metadata that does not exist while profiling", _small, _looks_up),
        Fault("capture-fails", "an operation that may not be captured", _small, _looks_at_values),
        Fault("neighbour-takes", "another process takes memory between budget and allocation", _roomy, _loses_race),
        Fault("neighbour-frees", "another process frees memory while we profile", _crowded, _sees_departure),
        Fault("workspace-grows", "a persistent workspace grows in the throwaway capture", _wide, _pads_late),
        Fault("weights-too-big", "the weights exceed the device", _small_device),
        Fault("budget-too-small", "utilization so low that nothing is left", _low_request),
        Fault("request-too-long", "one longest request does not fit", _long_request),
        Fault(
            "sampler-not-profiled",
            "the first sampler step after capture needs more than is left",
            _tight,
            _forgets_sampler,
        ),
        Fault(
            "stall",
            "a state passes its deadline, and the process is killed",
            _small,
            _waits_for_peer,
            hooks=_supervised,
            deadlines={"capture_graphs": 0.5},
        ),
        Fault("killed", "the process is killed by SIGKILL", _small, _dies),
    )
}
