"""
A state of your own in a shipped plan, which may be tried again: kernels are tuned after the weights are loaded.

    python examples/custom_state.py

The engine only counts bytes; a real one looks the same from here.
"""

from __future__ import annotations

import sys

from startup_fsm import Bootstrap, Edge, Plan, State, Step, throwaway
from startup_fsm.devices.simulated import SimulatedDevice
from startup_fsm.engines.counting import CountingEngine


def tuned_plan() -> Plan:
    """The default plan, with ``autotune`` in it, and a way back to it when a kernel cannot be built."""
    autotune = State("autotune", "pick the fastest kernels", deadline_s=300)
    plan = throwaway().insert(autotune, after="load_weights")
    again = Edge("again", "autotune", "autotune", policy="recover", bound=2, causes=("raised",))
    return Plan("tuned", plan.states, [*plan.edges, again])


class TunedEngine(CountingEngine):
    """A state that no plan of ours has is a method of the engine, by its name."""

    backends = ("fast but broken", "portable")

    def autotune(self, step: Step) -> None:
        backend = self.backends[step.visit - 1]
        step.note(backend=backend)
        if "broken" in backend:
            text = f"the backend {backend!r} cannot build its kernels"
            raise RuntimeError(text)
        workspace = 8 << 20
        self.device.malloc(workspace)
        step.workspace("autotune", workspace)


def main(runs: str = "runs") -> None:
    device = SimulatedDevice(4 << 30)
    boot = Bootstrap(plan=tuned_plan(), journal=runs, device=device)
    boot.run(TunedEngine(device=device))

    for visit in boot.history.visits_of("autotune"):
        how = "failed" if visit.failed else "done"
        print(f"autotune, visit {visit.visit}, entered by {visit.edge}: {visit.notes['backend']}: {how}")
    for _, chosen in boot.history.recoveries:
        print(f"recovered by {chosen.edge}, {chosen.taken} of {chosen.bound}: {chosen.reason}")
    print(f"startup-fsm doctor {boot.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
