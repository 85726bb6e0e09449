"""A decoder of the Llama family in plain torch: what it computes is the family's, what it allocates is easy to explain.

Two ways through the same layers. `prefill` reads whole prompts, packed one after the other. `decode` reads one token
for each row of a batch through block tables; for one batch size every shape in it is fixed, so it can be captured as a
graph. Neither moves a value to the host. Runs on any torch device, on fake tensors, and in `torch.no_grad` or
`torch.inference_mode` (use one of them throughout: a KV cache made in inference mode can be written only there).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name
from torch import Tensor, nn

from startup_fsm.engines.reference.paging import DecodeInputs, KVCache
from startup_fsm.engines.reference.shapes import Shape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries `[rows, heads, head_dim]`, keys and values `[rows, kv_heads, head_dim]` to `[rows, heads * head_dim]`."""

Span = tuple[int, int]
"""First row and row after the last of one prompt in a packed batch."""


class Decoder(nn.Module):
    """Embedding, layers, norm and head. Parameters are allocated but not set: load a checkpoint or draw random ones."""

    def __init__(self, shape: Shape, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.shape = shape
        self.embedding = _parameter(shape, device, shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, device) for _ in range(shape.layers))
        self.norm = _parameter(shape, device, shape.hidden)
        self.head = None if shape.tied_embeddings else _parameter(shape, device, shape.vocabulary, shape.hidden)
        self.frequencies: Tensor
        frequencies = torch.tensor(rotary_frequencies(shape), dtype=torch.float32, device=device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def blocks(self) -> Iterator[Layer]:
        """The layers, first to last."""
        return (cast("Layer", layer) for layer in self.layers)

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        positions: Tensor,
        spans: Sequence[Span],
        *,
        kv: KVCache | None = None,
        slots: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Reads whole prompts, packed in `tokens` (`[total]`), and returns logits `[len(rows), vocabulary]`.

        `spans` says which rows are one prompt; none of them sees another. With `kv`, keys and values go to `slots`
        (`[total]`). `rows` are the rows whose logits are wanted: by default the last of each prompt. Memory: a few
        tensors of `total * mlp` and of `total * hidden` numbers, then the logits; nothing grows with the square of a
        prompt where the device has a fused attention.
        """

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if kv is not None and slots is not None:
                kv.write(index, slots, k, v)
            parts = [self._causal(q[first:end], k[first:end], v[first:end]) for first, end in spans]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        hidden = self._through_layers(tokens, positions, attend)
        if rows is None:
            rows = torch.tensor([end - 1 for _, end in spans], dtype=torch.int64).to(tokens.device)
        return self.logits(hidden[rows])

    @torch.no_grad()
    def decode(self, inputs: DecodeInputs, kv: KVCache) -> Tensor:
        """Reads one token a row and returns logits `[rows, vocabulary]`.

        Capturable: shapes depend on `inputs` only, and so do the addresses read and written. Attention sees a gathered
        copy of `width` blocks a row, used or not: `DecodeInputs.width` bounds both context and memory. The peak is in
        attention (two gathered copies of one layer, the rows' `qkv` and the output) or in the MLP, whichever is larger;
        afterwards only the logits are alive.
        """
        mask = self._context_mask(inputs, kv.block_size)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv.write(index, inputs.slots, k, v)
            context_k, context_v = kv.gather(index, inputs.tables)
            # The queries that share a KV head take the place of a sequence of queries: no copy of keys and values for
            # each head, and a kernel that accepts a mask.
            grouped = torch.unflatten(q, 1, (self.shape.kv_heads, -1))
            return F.scaled_dot_product_attention(grouped, context_k, context_v, attn_mask=mask).flatten(1)

        return self.logits(self._through_layers(inputs.tokens, inputs.positions, attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocabulary]`, in the dtype of the weights."""
        return F.linear(hidden, self.embedding if self.head is None else self.head)

    def _through_layers(
        self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        hidden = F.embedding(tokens, self.embedding)
        angles = positions[:, None, None] * self.frequencies
        cosines, sines = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for index, layer in enumerate(self.blocks()):
            hidden = layer.step(hidden, cosines, sines, lambda q, k, v, i=index: attend(i, q, k, v))  # type: ignore[misc]
        return _rms_norm(hidden, self.norm, self.shape)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one prompt to itself, `[length, heads * head_dim]`."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        grouped = self.shape.heads != self.shape.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.squeeze(0).transpose(0, 1).flatten(1)

    def _context_mask(self, inputs: DecodeInputs, block_size: int) -> Tensor:
        """`[rows, 1, 1, width * block_size]`: 0 inside the context, minus infinity behind it; one for all layers."""
        places = torch.arange(inputs.width * block_size, device=inputs.lengths.device)
        outside = places >= inputs.lengths[:, None]
        mask = torch.zeros(outside.shape, dtype=self.embedding.dtype, device=outside.device)
        return mask.masked_fill_(outside, -math.inf)[:, None, None, :]


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to its input. Projections that read the same input are fused."""

    def __init__(self, shape: Shape, device: torch.device | str) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = _parameter(shape, device, shape.hidden)
        self.qkv = _parameter(shape, device, shape.qkv_rows, shape.hidden)
        self.qkv_bias = _parameter(shape, device, shape.qkv_rows) if shape.qkv_bias else None
        self.out = _parameter(shape, device, shape.hidden, shape.heads * shape.head_dim)
        self.mlp_norm = _parameter(shape, device, shape.hidden)
        experts = (shape.experts,) if shape.experts else ()
        self.router = _parameter(shape, device, shape.experts, shape.hidden) if shape.experts else None
        self.gate_up = _parameter(shape, device, *experts, 2 * shape.mlp, shape.hidden)
        self.down = _parameter(shape, device, *experts, shape.hidden, shape.mlp)

    def step(self, hidden: Tensor, cosines: Tensor, sines: Tensor, attend: Attend) -> Tensor:
        """`[rows, hidden]` to `[rows, hidden]`."""
        hidden = hidden + self._attention(_rms_norm(hidden, self.attention_norm, self.shape), cosines, sines, attend)
        normed = _rms_norm(hidden, self.mlp_norm, self.shape)
        if self.router is None:
            return hidden + _swiglu(normed, self.gate_up, self.down)
        return hidden + self._mixture(normed, self.router)

    def _attention(self, normed: Tensor, cosines: Tensor, sines: Tensor, attend: Attend) -> Tensor:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        qkv = torch.unflatten(F.linear(normed, self.qkv, self.qkv_bias), -1, (-1, self.shape.head_dim))
        queries_keys, values = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        queries, keys = torch.split(_rotate(queries_keys, cosines, sines), [heads, kv_heads], dim=1)
        return F.linear(attend(queries, keys, values), self.out)

    def _mixture(self, normed: Tensor, router: Tensor) -> Tensor:
        """Every expert reads every row, with weight 0 where it was not chosen.

        More arithmetic than routing rows to experts, but no shape depends on a value, so it can be captured.
        """
        chances = F.softmax(F.linear(normed, router), dim=-1, dtype=torch.float32)
        chosen, experts = chances.topk(self.shape.top_k, dim=-1)
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        shares = torch.zeros_like(chances).scatter_(1, experts, chosen).to(normed.dtype)
        out = torch.zeros_like(normed)
        for expert in range(self.shape.experts):
            part = _swiglu(normed, self.gate_up[expert], self.down[expert])
            out.addcmul_(part, shares[:, expert : expert + 1])
        return out


def rotary_frequencies(shape: Shape) -> list[float]:
    """Radians a position of each of the `head_dim / 2` rotations, stretched where the shape says so."""
    plain = [shape.rope_theta ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)]
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor

    def stretched(frequency: float) -> float:
        turns = scaling.original_max_positions * frequency / (2 * math.pi)
        if turns < low:
            return frequency / scaling.factor
        if turns > high:
            return frequency
        kept = (turns - low) / (high - low)
        return (1 - kept) * frequency / scaling.factor + kept * frequency

    return [stretched(frequency) for frequency in plain]


def _parameter(shape: Shape, device: torch.device | str, *size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size, dtype=getattr(torch, shape.dtype), device=device), requires_grad=False)


def _rms_norm(hidden: Tensor, weight: Tensor, shape: Shape) -> Tensor:
    return F.rms_norm(hidden, (shape.hidden,), weight, shape.rms_epsilon)


def _rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns `[rows, heads, head_dim]`; numbers i and i + head_dim / 2 are one pair, as in Hugging Face weights."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def _swiglu(normed: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
