"""
Continuous batching of transformers (5.17 and later), its start taken apart: no fork, no subclass.

    pip install 'startup-fsm[transformers]'
    python examples/transformers_cb.py

Its attention mask, its indices and the keys that it gathers grow with the KV cache: one small cache tells too little.
The plan passes through ``bootstrap_kv`` twice. What a manager needed at two sizes is a line, and from the line come the
bytes that each block of the real cache takes, and those that are taken however many there are.

On a CPU it runs eagerly under a simulated device; on a GPU it captures its own graphs. Weights are random.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

from startup_fsm import Bootstrap, Edge, Knobs, LongestRequest, Plan, RunState, format_bytes, throwaway

HAS_CUDA = torch.cuda.is_available()
PLACE = "cuda" if HAS_CUDA else "cpu"
PAGE, BATCH, LONGEST = 64, 128, 4_096  # tokens: of a block, of a step, of the longest request
PROMPTS, NEW_TOKENS = ([1, 2, 3, 4, 5], [7, 11, 13], list(range(100, 180))), 8
WIDTH, LAYERS, HEADS = (1_024, 16, 16) if HAS_CUDA else (256, 2, 4)
SHAPE = LlamaConfig(
    vocab_size=1_000,
    hidden_size=WIDTH,
    intermediate_size=2 * WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS // 2,
    head_dim=64,
    eos_token_id=None,
)
BLOCK_BYTES = LAYERS * 2 * (HEADS // 2) * 64 * PAGE * 4  # keys and values of all layers, in float32

UNSURE = 20  # 1/20 of it; on an H200 a cache twice as large as the second one took 4% more than the line says

# 5.17 has blocks where later versions have pages, and a name of its own for attention that reads them. Which one it is
# must be said: left to choose, it looks for flash attention.
HAS_PAGES = "page_size" in ContinuousBatchingConfig.__dataclass_fields__
ATTENTION = "sdpa" if HAS_PAGES else "paged|sdpa"
OF_VERSION = {"page_size": PAGE, "auto_switch_to_flash": False} if HAS_PAGES else {"block_size": PAGE}


def two_sizes() -> Plan:
    """The default plan, with one way back from ``teardown`` to a second, larger cache."""
    plan = throwaway()
    return Plan("two_sizes", plan.states, [*plan.edges, Edge("larger", "teardown", "bootstrap_kv", bound=1)])


class FailedWarmup(logging.Handler):
    """transformers logs a warm-up that failed, and goes on; a start must not."""

    def emit(self, record: logging.LogRecord) -> None:
        if "Failed to warm up" in record.getMessage():
            raise RuntimeError(record.getMessage())


@contextmanager
def failures_raised() -> Iterator[None]:
    log, handler = logging.getLogger("ContinuousBatchingLogger"), FailedWarmup()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def make_manager(model: Any, blocks: int) -> Any:
    """A manager with its KV cache, made here and not on its own thread, so that what fails is raised here."""
    config = ContinuousBatchingConfig(
        num_blocks=blocks,
        max_batch_tokens=BATCH,
        max_requests_per_batch=64,
        max_blocks_per_request=0,  # its fast path of decoding needs flash attention
        max_memory_percent=1.0,  # the budget is ours
        use_cuda_graph=HAS_CUDA,
        use_async_batching=False,
        **OF_VERSION,
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.batch_processor = manager._create_batch_processor()  # noqa: SLF001 - ``start`` would, on its thread
    return manager


def largest_step(model: Any, manager: Any) -> None:
    """As many tokens as a step may have, reading all of the cache; where there are graphs, the first captures one."""
    with failures_raised():
        manager.warmup()  # captures; without graphs it does nothing
        tokens = manager.batch_processor.cache.num_blocks * PAGE
        manager.batch_processor.model_runner.run_one_warmup(model, BATCH, tokens - BATCH)


@attrs.frozen
class Need:
    """Bytes of a manager at its peak, beyond what was there when it was gone: in tensors, and held by the allocator."""

    live: int
    held: int


def needed(boot: Bootstrap, model: Any, blocks: int) -> Need:
    """What a manager with so many blocks needs; it is made, run, and taken down again."""
    with boot.state("bootstrap_kv") as step:
        step.note(blocks=blocks)
        with step.pool():
            manager = make_manager(model, blocks)
    with boot.state("capture_throwaway"):
        largest_step(model, manager)
    with boot.state("teardown") as step:
        cache = weakref.ref(manager.batch_processor.cache)
        manager.batch_processor = None
        manager.destroy()
        del manager
        gc.collect()
        step.probe("cache", {"gone": cache() is None})
    # That its memory is gone too, the edge has proven: else it had raised. Peaks begin anew with each state.
    made, ran, gone = (boot.history.last(name).after for name in ("bootstrap_kv", "capture_throwaway", "teardown"))
    outside = max(0, ran.outside_bytes - gone.outside_bytes)
    return Need(
        live=max(made.allocated_peak_bytes, ran.allocated_peak_bytes) - gone.allocated_bytes + outside,
        held=max(made.reserved_peak_bytes, ran.reserved_peak_bytes) - gone.reserved_bytes + outside,
    )


def line(boot: Bootstrap, model: Any) -> tuple[int, int]:
    """Bytes of one more block, and bytes that are taken however many blocks there are."""
    now = boot.device.snapshot()
    room = boot.knobs.requested(now.total_bytes) - now.own_bytes
    small = room // BLOCK_BYTES // 16
    one = needed(boot, model, small)
    # What it took for each of its blocks is more than one more block takes, so a cache of this size fits in half.
    large = max(2 * small, room // 2 * small // one.held)
    two = needed(boot, model, large)
    # The steeper of two: what is held grows in steps, what is live leaves out what is held for somebody else.
    each = -(-max(two.live - one.live, two.held - one.held) // (large - small))
    # It goes on beyond what was read: what grows beside keys and values may be off by so much of itself.
    each += (each - BLOCK_BYTES) // UNSURE if each > BLOCK_BYTES else 0
    return each, max(0, two.held - each * large)


def headroom(history: RunState) -> int:
    """What the budget keeps for a plain step: it is in the line as well, and must count once."""
    readings = history.last("profile_activations").snapshots
    return readings["peak"][1].reserved_peak_bytes - readings["F0"][1].reserved_bytes


def batched(manager: Any) -> list[list[int]]:
    """New tokens of each prompt, all at once."""
    names = manager.add_requests(inputs=list(PROMPTS), max_new_tokens=NEW_TOKENS)
    done: dict[str, list[int]] = {}
    while len(done) < len(names):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the thread of continuous batching has ended")
        if result is not None and result.is_finished():
            done[result.request_id] = result.generated_tokens
    return [done[name] for name in names]


def generated(model: Any) -> list[list[int]]:
    """The same by ``generate``, one after the other."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    made = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt], device=PLACE)
        answer = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=greedy)
        made.append(answer[0, len(prompt) :].tolist())
    model.set_attn_implementation(ATTENTION)
    return made


def start(boot: Bootstrap, serving: ExitStack) -> Any:
    """From nothing to a manager that serves until ``serving`` ends."""
    with boot.state("init_device"):
        torch.manual_seed(0)
    with boot.state("load_weights") as step:
        with torch.device("meta"):
            counted = AutoModelForCausalLM.from_config(SHAPE)
        step.note(checkpoint_bytes=sum(each.nbytes for each in counted.parameters()))
        model = AutoModelForCausalLM.from_config(SHAPE, attn_implementation="sdpa").to(PLACE).eval()
    with boot.state("profile_activations"):
        model(torch.zeros(1, BATCH, dtype=torch.long, device=PLACE), use_cache=False)
    model.set_attn_implementation(ATTENTION)

    each, fixed = line(boot, model)
    # Its graphs grow with the cache, so they are in the line.
    manager = {"manager": max(0, fixed - headroom(boot.history))}
    budget = boot.kv_budget(each, longest=LongestRequest(LONGEST, PAGE), graphs=False, reserve=manager)
    with boot.state("allocate_kv") as step, step.pool():
        manager = make_manager(model, budget.blocks)
    with boot.state("capture_graphs") as step:
        if HAS_CUDA:
            largest_step(model, manager)
        else:
            step.decide("without_graphs", "transformers captures graphs on an accelerator only")
    with boot.state("verify") as step:
        largest_step(model, manager)
        expected = generated(model)
        serving.callback(manager.stop)
        manager.start()
        answers = batched(manager)
        step.probe("tokens", {"equal": answers == expected}, prompts=len(PROMPTS))
        if answers != expected:
            raise RuntimeError(f"continuous batching says {answers}, generate says {expected}")
    boot.finish()
    print(f"{len(PROMPTS)} answers, equal to those of generate")
    print(
        f"{budget.blocks} KV blocks of {format_bytes(BLOCK_BYTES)}; with all that grows with them {format_bytes(each)}"
    )
    return manager


@torch.no_grad()
def main(runs: str = "runs") -> None:
    gc.freeze()  # what the imports left need not be searched whenever memory settles
    boot = Bootstrap(
        plan=two_sizes(),
        journal=runs,
        device="cuda" if HAS_CUDA else "sim",
        knobs=Knobs(requested_bytes=(24 if HAS_CUDA else 1) << 30),
        engine="transformers",
    )
    with ExitStack() as serving:
        with boot:
            start(boot, serving)
        print(f"startup-fsm doctor {boot.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
