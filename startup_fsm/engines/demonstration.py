"""
Everything that `demo` starts: the reference engine, a simulated device that fits it, the knobs and the plan.

Importing this module imports no torch, so that faults and shapes can be listed where there is none.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from startup_fsm.budget import Knobs
from startup_fsm.devices.base import Device
from startup_fsm.devices.costs import Costs
from startup_fsm.engines.faults import FAULTS, Fault
from startup_fsm.engines.reference.shapes import Shape, named
from startup_fsm.memory import GIB, MIB
from startup_fsm.plan import Plan, driven

if TYPE_CHECKING:
    from startup_fsm.devices.following import FollowingDevice
    from startup_fsm.engines.reference.engine import ReferenceEngine
    from startup_fsm.engines.reference.options import Options

#: Capacities of devices that exist, in bytes as CUDA gives them: 24, 48 and 80 GB cards, an H200, 192 GB.
CARDS: Final = (24 * GIB, 48 * GIB, 80 * GIB, round(143_155.9 * MIB), 192 * GIB)

#: Sizes of a start with fakes, and of one that computes: a laptop has to finish it.
_FAKE: Final = {"max_model_len": 1_024, "max_num_seqs": 512, "max_num_batched_tokens": 8_192}
_REAL: Final = {"max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 512}

# What a process takes beside its weights before the KV cache: context, code, activations, graphs.
_BESIDE: Final = 16 * GIB
_BESIDE_REAL: Final = 1 * GIB

# Weights of the largest model that is computed where nobody says.
_COMPUTED: Final = 512 * MIB
# Weights of a model that one thread computes as fast as many.
_SMALL: Final = 64 * MIB

_KNOBS: Final = (
    "utilization",
    "requested_bytes",
    "kv_cache_memory_bytes",
    "graph_estimate",
    "graph_share",
    "graph_method",
    "graph_sample",
    "retries",
    "allow_eager",
)
_OPTIONS: Final = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "seed")


@attrs.frozen(kw_only=True)
class Demonstration:
    """
    What ``Bootstrap`` is given, and what it drives.

    Attributes:
        engine: The reference engine.
        device: Simulated, with its capacity in its name, or the card.
        knobs: What the user may set about memory.
        plan: With the deadlines that belong to it.
        hooks: Hooks of this start.
        fake: Whether tensors are fakes, so that nothing can be generated.
    """

    engine: ReferenceEngine
    device: Device
    knobs: Knobs
    plan: Plan
    hooks: tuple[object, ...] = ()
    fake: bool = False


def assemble(
    *,
    shape: str | Shape | None = None,
    checkpoint: str | Path | None = None,
    fake: bool | None = None,
    device: str | None = None,
    plan: str | None = None,
    total: int | None = None,
    capture_sizes: Sequence[int] | None = None,
    seed: int = 0,
    fault: str | None = None,
    **given: Any,
) -> Demonstration:
    """
    The parts of one start. What is None, or not given, has a default that fits the shape.

    Garbage is collected and what torch imported is frozen (``gc.freeze``): settling collects garbage many times in a
    start, and would visit a few hundred thousand objects of torch each time. A small model computes on one thread
    (``torch.set_num_threads``): more of them only wait for each other.

    Args:
        shape: A name or a shape; default ``tiny``.
        checkpoint: Folder of a Hugging Face checkpoint, which says the shape itself.
        fake: Tensors without values. Default: for a shape too large to be computed here, unless a checkpoint is given.
        device: ``sim``, ``cuda``, or ``auto`` for CUDA where torch sees one and nothing asks for the simulation.
        plan: Name of a plan.
        total: Capacity of the device in bytes.
        capture_sizes: Rows that get a graph.
        seed: Of random weights, and of the sizes that a fault varies.
        fault: Name of a fault (see :data:`startup_fsm.engines.faults.FAULTS`). It brings sizes of its own; what is
            given here wins over them.
        given: Knobs by the names of :class:`startup_fsm.budget.Knobs`, and ``max_model_len``, ``max_num_seqs``,
            ``max_num_batched_tokens``, ``block_size``.

    Raises:
        ValueError: An unknown name of a fault, a shape or a plan, or a number that no start can use.
        TypeError: An unknown name in ``given``.
    """
    chosen = _fault(fault)
    chance = random.Random(f"{fault} {seed}")
    scene = {
        "shape": shape,
        "checkpoint": checkpoint,
        "fake": fake,
        "plan": plan,
        "total": total,
        "capture_sizes": capture_sizes,
        "seed": seed,
        **given,
    }
    if unknown := set(given) - {*_KNOBS, *_OPTIONS}:
        msg = f"assemble: {min(unknown)!r} is no setting of a demonstration"
        raise TypeError(msg)
    scene = chosen.scene(chance) | {name: value for name, value in scene.items() if value is not None}
    folder = None if scene.get("checkpoint") is None else Path(scene["checkpoint"])
    options = _options(scene, folder)
    knobs = Knobs(**{name: scene[name] for name in _KNOBS if name in scene})
    if _on_cuda(device, scene, fault):
        return _on_card(scene, folder, knobs)
    is_fake = _is_fake(scene, options.shape)
    simulated = _device(scene, options.shape, fake=is_fake)
    demonstration = Demonstration(
        engine=chosen.engine(options, simulated, chance),
        device=simulated,
        knobs=knobs,
        plan=driven(
            str(scene.get("plan", "throwaway")), retries=knobs.retries, allow_eager=knobs.allow_eager
        ).with_deadlines(chosen.deadlines),
        hooks=chosen.hooks(),
        fake=is_fake,
    )
    _quicken(simulated, options.shape)
    return demonstration


def _on_cuda(device: str | None, scene: dict[str, Any], fault: str | None) -> bool:
    """Whether the card is meant: asked for, or at hand with nothing that only a simulation has."""
    simulated = [name for name in ("total", "neighbours") if name in scene] + (["fake"] if scene.get("fake") else [])
    if device == "cuda":
        if fault is not None or simulated:
            what = "a fault" if fault is not None else simulated[0]
            msg = f"device: {what} is for a simulated device\nhint: --device sim"
            raise ValueError(msg)
        return True
    if device == "sim" or fault is not None or simulated:
        return False
    import torch

    return torch.cuda.is_available()


def _on_card(scene: dict[str, Any], folder: Path | None, knobs: Knobs) -> Demonstration:
    from startup_fsm.devices.cuda import CudaDevice
    from startup_fsm.engines.reference.engine import ReferenceEngine

    # On a card everything is computed, at the sizes that a simulation of large shapes has.
    given = {name: scene.get(name, value) for name, value in _FAKE.items()}
    if "shape" not in scene and folder is None:
        given = {name: scene.get(name, value) for name, value in _REAL.items()}
    options = _options(scene | given | {"fake": False}, folder)
    plan = driven(str(scene.get("plan", "throwaway")), retries=knobs.retries, allow_eager=knobs.allow_eager)
    gc.collect()
    gc.freeze()
    return Demonstration(
        engine=ReferenceEngine(options, place="cuda"), device=CudaDevice(), knobs=knobs, plan=plan, fake=False
    )


def _fault(name: str | None) -> Fault:
    if name is None:
        return Fault("", "nothing goes wrong")
    if name not in FAULTS:
        msg = f"fault: {name!r} is none of {', '.join(FAULTS)}"
        raise ValueError(msg)
    return FAULTS[name]


def _is_fake(scene: dict[str, Any], shape: Shape) -> bool:
    return bool(scene.get("fake", "checkpoint" not in scene and shape.weight_bytes > _COMPUTED))


def _options(scene: dict[str, Any], folder: Path | None) -> Options:
    from startup_fsm.engines.reference.checkpoint import checkpoint_shape
    from startup_fsm.engines.reference.options import Options

    given = scene.get("shape", "tiny")
    shape = checkpoint_shape(folder) if folder is not None else named(given) if isinstance(given, str) else given
    sizes = _FAKE if _is_fake(scene, shape) else _REAL
    values = sizes | {name: scene[name] for name in _OPTIONS if name in scene}
    if "max_model_len" not in scene:
        values["max_model_len"] = min(values["max_model_len"], shape.max_positions)
    capture = scene.get("capture_sizes")
    return Options(shape=shape, checkpoint=folder, capture_sizes=None if capture is None else tuple(capture), **values)


def _device(scene: dict[str, Any], shape: Shape, *, fake: bool) -> FollowingDevice:
    from startup_fsm.devices.following import FollowingDevice

    total = scene.get("total") or default_total(shape, fake=fake)
    return FollowingDevice(total, fake=fake, neighbours=scene.get("neighbours"))


def default_total(shape: Shape, *, fake: bool) -> int:
    """
    Capacity in bytes of the smallest card that holds the shape with room to run.

    Where values are computed the KV cache is memory of this host, so the device is only a little larger than needed.
    """
    if not fake:
        return -(-(shape.weight_bytes * 5 // 4 + _BESIDE_REAL) // (512 * MIB)) * 512 * MIB
    needed = shape.weight_bytes * 11 // 10 + _BESIDE
    return next((card for card in CARDS if card >= needed), -(-needed * 5 // 4 // GIB) * GIB)


def _quicken(device: FollowingDevice, shape: Shape) -> None:
    import torch

    from startup_fsm.devices.following import FollowingDevice

    if shape.weight_bytes < _SMALL:
        torch.set_num_threads(1)
    # The first operation that is followed imports half of torch.
    with FollowingDevice(GIB, costs=Costs.none(), fake=not device.has_values).scope(), torch.no_grad():
        torch.nn.functional.rms_norm(torch.empty(1, 1), (1,))
    gc.unfreeze()
    gc.collect()
    gc.freeze()
