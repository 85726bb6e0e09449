"""The classic engine with its start in states, as docs/guide/ten-minutes.md has it."""

import torch
from classic_engine.engine import ClassicEngine
from classic_engine.model import Config

from startup_fsm import Bootstrap, Knobs, LongestRequest, Step, format_bytes

if torch.cuda.is_available():
    engine, knobs = ClassicEngine(Config.large()), Knobs(utilization=0.9)
else:
    engine, knobs = ClassicEngine(Config()), Knobs(requested_bytes=1 << 30)
boot = Bootstrap(journal="runs", knobs=knobs, engine="classic")


def capture(step: Step, size: int) -> None:
    graph = step.capture(size, lambda: engine.decode(size))
    engine.graphs[size] = graph, graph.output


def release() -> None:
    engine.graphs.clear()
    engine.kv = None
    for layer in engine.model.layers:
        layer.attention.keys = layer.attention.values = None


sizes = sorted(engine.config.capture_sizes, reverse=True)
with boot.state("init_device"):
    torch.manual_seed(0)
with boot.state("load_weights") as step:
    step.note(checkpoint_bytes=engine.weight_bytes)
    engine.load_weights()
with boot.state("profile_activations"):
    engine.profile()
with boot.state("bootstrap_kv") as step, step.pool():
    engine.allocate_kv(2 * max(sizes))
with boot.state("capture_throwaway") as step:
    for size in sizes:
        capture(step, size)
with boot.state("teardown"):
    release()

longest = LongestRequest(engine.config.max_length, engine.config.block_tokens)
budget = boot.kv_budget(engine.block_bytes, longest=longest)

with boot.state("allocate_kv") as step, step.pool():
    engine.allocate_kv(budget.blocks)
with boot.state("capture_graphs") as step:
    for size in sizes:
        capture(step, size)

prompts = [[1, 2, 3], [5, 8]]
with boot.state("verify") as step:
    engine.profile()
    answers = engine.generate(prompts)
    step.probe("replay", {"equal": answers == engine.generate(prompts, graphs=False)})
boot.finish()

print(answers)
print(f"{budget.blocks} KV blocks of {format_bytes(budget.block_bytes)}, {len(engine.graphs)} graphs")
