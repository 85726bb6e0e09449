"""Text out of the engine: prompts are prefilled, then decoded together, eagerly or through captured graphs.

Deterministic: the same weights, prompts, batch and seed give the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from startup_fsm.engines.reference.model import Decoder
from startup_fsm.engines.reference.paging import BlockAllocator, DecodeInputs, KVCache, blocks_for
from startup_fsm.engines.reference.sampler import Sampling, sample

Replays = Mapping[int, Callable[[], Tensor]]
"""For each captured batch size, a call that replays its graph and returns the logits `[size, vocabulary]`."""


@attrs.define
class Request:
    """One prompt on its way: its place in the answer, the tokens so far, and the blocks it holds."""

    place: int
    tokens: list[int]
    prompt_length: int
    blocks: list[int]


def generate(
    model: Decoder,
    kv: KVCache,
    inputs: DecodeInputs,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    end_tokens: Sequence[int] = (),
    max_batch_tokens: int | None = None,
    allocator: BlockAllocator | None = None,
    replays: Replays | None = None,
) -> list[list[int]]:
    """New tokens of each prompt, an end token included, in the order of the prompts.

    At most `inputs.size` requests run at once, and one prefill reads at most `max_batch_tokens` tokens. A request holds
    the blocks of its longest form from its start, so none is ever evicted. With `replays`, a batch runs through the
    smallest graph it fits in, padded; the graphs must have been captured on these `inputs` and this `kv`. Raises
    `ValueError` for a prompt that can never run.
    """
    batch = _Batch(
        model=model,
        kv=kv,
        inputs=inputs,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        end_tokens=frozenset(end_tokens),
        max_batch_tokens=max_batch_tokens,
        allocator=allocator or BlockAllocator(kv.usable),
        replays=replays or {},
    )
    batch.check(prompts)
    waiting = deque(Request(place, list(prompt), len(prompt), []) for place, prompt in enumerate(prompts))
    answers: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens == 0:
        return answers
    running: list[Request] = []
    while waiting or running:
        admitted = batch.admit(waiting, len(running))
        if admitted:
            batch.append(admitted, batch.prefill(admitted))
            running += admitted
        elif running:
            batch.append(running, batch.decode(running))
        for request in [request for request in running if batch.done(request)]:
            running.remove(request)
            batch.allocator.give_back(request.blocks)
            answers[request.place] = request.tokens[request.prompt_length :]
    return answers


@attrs.frozen(kw_only=True)
class _Batch:
    """Everything one call of `generate` works with."""

    model: Decoder
    kv: KVCache
    inputs: DecodeInputs
    max_new_tokens: int
    sampling: Sampling
    end_tokens: frozenset[int]
    max_batch_tokens: int | None
    allocator: BlockAllocator
    replays: Replays
    random: torch.Generator = attrs.field(init=False)

    @random.default
    def _seeded(self) -> torch.Generator:
        return self.sampling.generator(self.inputs.tokens.device)

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuses prompts that would wait for ever."""
        new, length = self.max_new_tokens, min(self.inputs.width * self.kv.block_size, self.model.shape.max_positions)
        for place, prompt in enumerate(prompts):
            read, blocks, fault = len(prompt), self._blocks(len(prompt)), ""
            if not prompt:
                fault = "no tokens\nhint: a prompt has at least one"
            elif read + new > length:
                fault = f"{read} + {new} tokens, a request has {length}\nhint: shorten it, or raise max_model_len"
            elif blocks > self.kv.usable - 1:
                fault = f"{blocks} KV blocks, there are {self.kv.usable - 1}\nhint: shorten it, or enlarge the KV cache"
            elif self.max_batch_tokens is not None and read > self.max_batch_tokens:
                fault = f"{read} tokens, a step reads {self.max_batch_tokens}\nhint: raise max_num_batched_tokens"
            if fault:
                raise ValueError(f"prompt {place}: {fault}")

    def admit(self, waiting: deque[Request], running: int) -> list[Request]:
        """Requests that may start now, first come first served, each with its blocks."""
        admitted: list[Request] = []
        tokens = 0
        while waiting and running + len(admitted) < self.inputs.size:
            request = waiting[0]
            blocks = self._blocks(request.prompt_length)
            tokens += request.prompt_length
            if blocks > self.allocator.free or (self.max_batch_tokens is not None and tokens > self.max_batch_tokens):
                break
            request.blocks = self.allocator.take(blocks)
            admitted.append(waiting.popleft())
        return admitted

    def prefill(self, requests: Sequence[Request]) -> Tensor:
        """Logits of the last token of each prompt."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[tuple[int, int]] = []
        for request in requests:
            spans.append((len(tokens), len(tokens) + request.prompt_length))
            tokens += request.tokens
            positions += range(request.prompt_length)
            size = self.kv.block_size
            slots += [request.blocks[i // size] * size + i % size for i in range(request.prompt_length)]
        rows = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(self.inputs.tokens.device)
        return self.model.prefill(rows[0], rows[1], spans, kv=self.kv, slots=rows[2])

    def decode(self, requests: Sequence[Request]) -> Tensor:
        """Logits after the newest token of each request."""
        fitting = [size for size in self.replays if size >= len(requests)]
        rows = self.inputs.rows(min(fitting) if fitting else len(requests))
        lengths = [len(request.tokens) for request in requests]
        tables = [request.blocks for request in requests]
        rows.fill([request.tokens[-1] for request in requests], lengths, tables, self.kv.block_size)
        logits = self.replays[rows.size]() if fitting else self.model.decode(rows, self.kv)
        return logits[: len(requests)]

    def append(self, requests: Sequence[Request], logits: Tensor) -> None:
        """Chooses the next token of each request."""
        for request, token in zip(requests, sample(logits, self.sampling, self.random).tolist(), strict=True):
            request.tokens.append(token)

    def done(self, request: Request) -> bool:
        """Whether the request has all its tokens."""
        new = len(request.tokens) - request.prompt_length
        return new >= self.max_new_tokens or (new > 0 and request.tokens[-1] in self.end_tokens)

    def _blocks(self, prompt_length: int) -> int:
        return blocks_for(prompt_length + self.max_new_tokens, self.kv.block_size)
