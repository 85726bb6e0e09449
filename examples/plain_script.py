"""A plain script keeps control of its start: its own code, in its own order, inside ``boot.state``."""

import sys

import torch

from startup_fsm import Bootstrap, Knobs, format_bytes

WIDTH, BLOCK, SIZES = 256, 16, (8, 4, 2, 1)  # of a hidden state; tokens of a KV block; rows of a batch, largest first
BLOCK_BYTES = 2 * BLOCK * WIDTH * 4  # keys and values in float32

boot = Bootstrap(
    journal=sys.argv[1] if len(sys.argv) > 1 else "runs",
    device="sim",  # real arithmetic on the CPU, under a model of a GPU's allocator
    knobs=Knobs(requested_bytes=1 << 30),
)


def decode(kv: torch.Tensor, rows: int) -> torch.Tensor:
    """One step: look into the KV cache, then go through the model."""
    query = torch.ones(rows, WIDTH)
    keys, values = kv[:rows].unbind(1)
    attended = torch.softmax(torch.einsum("rw,rtw->rt", query, keys), -1)
    return model(query + torch.einsum("rt,rtw->rw", attended, values))


torch.set_grad_enabled(mode=False)
with boot.state("init_device"):
    torch.manual_seed(0)
with boot.state("load_weights") as step:
    step.note(checkpoint_bytes=2 * WIDTH * 4 * WIDTH * 4)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False), torch.nn.ReLU(), torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)
    )
with boot.state("profile_activations"):
    model(torch.ones(512, WIDTH))
with boot.state("bootstrap_kv") as step, step.pool():
    kv = torch.zeros(SIZES[0], 2, BLOCK, WIDTH)
with boot.state("capture_throwaway") as step:
    graphs = [step.capture(rows, lambda rows=rows: decode(kv, rows)) for rows in SIZES]
with boot.state("teardown"):
    del graphs, kv
budget = boot.kv_budget(BLOCK_BYTES)
with boot.state("allocate_kv") as step, step.pool():
    kv = torch.zeros(budget.blocks, 2, BLOCK, WIDTH)
with boot.state("capture_graphs") as step:
    graphs = [step.capture(rows, lambda rows=rows: decode(kv, rows)) for rows in SIZES]
with boot.state("verify") as step:
    for graph in graphs:
        graph.replay()
        step.probe("replay", {"equal": torch.equal(graph.output, decode(kv, graph.size))}, size=graph.size)
boot.finish()

print(f"ready with {budget.blocks} KV blocks, {format_bytes(budget.kv_bytes)}")
print(f"startup-fsm doctor {boot.path}")
