"""
One rank of a start with a process group of its own: NCCL on GPUs, gloo where there is none.

    torchrun --nproc-per-node 2 ranks_script.py RUNS CASE

Cases: ``ready``; ``same_device``, where both ranks take the first GPU; ``killed``, where rank 1 dies in ``verify`` while
rank 0 waits for it inside a collective. The exit code is that of ``startup-fsm run``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.base import Device
from startup_fsm.memory import MIB
from startup_fsm.verdict import EXIT_NOT_READY, EXIT_PEER, EXIT_READY

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_GPU = torch.cuda.is_available()
WIDTH, BLOCK, SIZES = 1_024, 16, (8, 4, 2, 1)


class ParallelEngine:
    """A matrix that is split over the ranks: every step ends with a sum over all of them."""

    name = "parallel"

    def __init__(self, case: str) -> None:
        self.case = case
        self.graphs: dict[int, Any] = {}
        self.caches: list[torch.Tensor] = []

    def load_weights(self, step: Any) -> None:
        step.note(checkpoint_bytes=WIDTH * WIDTH * 4)
        place = {"device_id": torch.device("cuda", torch.cuda.current_device())} if ON_GPU else {}
        dist.init_process_group("nccl" if ON_GPU else "gloo", **place)
        generator = torch.Generator().manual_seed(RANK)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator).to("cuda" if ON_GPU else "cpu")
        self.inputs = torch.ones(SIZES[0], WIDTH, device=self.weight.device)

    def profile_activations(self, step: Any) -> None:
        self.step_of(torch.ones(512, WIDTH, device=self.weight.device))
        with step.part("sampler"):
            torch.ones(SIZES[0], WIDTH, device=self.weight.device).softmax(-1).sort(-1)

    def kv_block_bytes(self) -> int:
        return BLOCK * WIDTH * 4

    def capture_sizes(self) -> tuple[int, ...]:
        return SIZES

    def allocate_kv(self, step: Any, blocks: int) -> None:
        self.caches = step.kv_buffers(1, self.kv_block_bytes(), blocks)

    def capture(self, step: Any, size: int) -> None:
        self.graphs[size] = step.capture(size, lambda: self.step_of(self.inputs[:size]))

    def step_of(self, values: torch.Tensor) -> torch.Tensor:
        """A product, summed over the ranks; gloo's sums are no operations that the simulated device could replay."""
        partial = values @ self.weight
        if ON_GPU:
            dist.all_reduce(partial)
        return partial

    def release_graphs(self) -> None:
        self.graphs.clear()

    def release_kv(self) -> None:
        self.caches = []

    def verify(self, step: Any) -> None:
        if self.case == "killed" and RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1, device=self.weight.device)
        dist.all_reduce(total)
        if total.item() != SIZE:
            raise ArithmeticError(f"the sum over {SIZE} ranks is {total.item()}")
        for size, graph in self.graphs.items():
            graph.replay()
            equal = torch.allclose(graph.output, self.step_of(self.inputs[:size]), rtol=1e-3, atol=1e-3)
            step.probe("replay", {"equal": equal}, size=size)
        self.profile_activations(step)


def device_of(case: str) -> Device:
    """The GPU of this rank, or a simulated device of a size of its own."""
    if ON_GPU:
        from startup_fsm.devices.cuda import CudaDevice

        return CudaDevice(0 if case == "same_device" else int(os.environ["LOCAL_RANK"]))
    from startup_fsm.devices.following import FollowingDevice

    device = FollowingDevice((2_048 + 256 * RANK) * MIB)
    device.identity = "simulated-0" if case == "same_device" else f"simulated-{RANK}"
    return device


def main(runs: str, case: str) -> int:
    """One start."""
    boot = Bootstrap(journal=Path(runs), device=device_of(case), knobs=Knobs(utilization=0.5), discover=False)
    try:
        boot.run(ParallelEngine(case))
    except Exception as error:  # noqa: BLE001 - a collective that loses its other side may raise anything
        print(error, file=sys.stderr)
        return EXIT_PEER if boot.history.peer_failures else EXIT_NOT_READY
    dist.destroy_process_group()
    return EXIT_READY


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
