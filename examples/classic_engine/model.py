"""The model: a decoder with rotary positions, grouped heads and a gated MLP, reading a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Shapes and limits. The defaults run on a CPU in a second; `large` is a billion parameters for a GPU."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 256
    vocabulary: int = 512
    dtype: torch.dtype = torch.float32
    block_tokens: int = 16
    max_length: int = 256
    max_batch_tokens: int = 512
    capture_sizes: tuple[int, ...] = (1, 2, 4, 8)
    utilization: float = 0.9
    cpu_blocks: int = 512

    @classmethod
    def large(cls) -> Config:
        return cls(
            layers=16,
            width=2_048,
            heads=16,
            kv_heads=4,
            mlp=8_192,
            vocabulary=32_000,
            dtype=torch.bfloat16,
            max_length=2_048,
            max_batch_tokens=8_192,
            capture_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def max_rows(self) -> int:
        return max(self.capture_sizes)

    @property
    def blocks_per_row(self) -> int:
        return self.max_length // self.block_tokens


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of `[..., tokens, heads, dim]` at `[..., tokens]`."""
    half = heads.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=heads.device, dtype=torch.float32) / half)
    angle = (positions[..., None].float() * frequency)[..., None, :]
    cosine, sine = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    one, two = heads[..., :half], heads[..., half:]
    return torch.cat([one * cosine - two * sine, two * cosine + one * sine], -1)


class Attention(nn.Module):
    """Grouped attention; `keys` and `values` are this layer's views of the KV cache, once there is one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.qkv = linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim)
        self.out = linear(config.width, config.width)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, hidden: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        config = self.config
        shape = (*hidden.shape[:-1], -1, config.head_dim)
        parts = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        query, key, value = (part.view(shape) for part in self.qkv(hidden).split(parts, -1))
        query, key = rotate(query, positions), rotate(key, positions)
        if self.keys is not None:
            blocks = tables.gather(1, positions // config.block_tokens)
            places = positions % config.block_tokens
            self.keys[blocks, places] = key
            self.values[blocks, places] = value
        attended = self.over_cache(query, positions, tables) if hidden.shape[1] == 1 else self.causal(query, key, value)
        return self.out(attended.reshape(hidden.shape))

    def causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A prompt looks at itself."""
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2)

    def over_cache(self, query: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """One token a row looks at everything that its row has in the cache."""
        keys, values = (cache[tables].flatten(1, 2) for cache in (self.keys, self.values))
        rows, context, kv_heads, dim = keys.shape
        query = query.view(rows, kv_heads, -1, dim) * dim**-0.5
        scores = torch.einsum("rkgd,rckd->rkgc", query, keys).float()
        beyond = torch.arange(context, device=keys.device) > positions
        scores = scores.masked_fill(beyond[:, None, None], float("-inf"))
        return torch.einsum("rkgc,rckd->rkgd", scores.softmax(-1).to(values.dtype), values)


class Layer(nn.Module):
    """Attention, then the MLP, each after a norm and beside what came in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.up, self.down = linear(config.width, 2 * config.mlp), linear(config.mlp, config.width)
        self.norms = nn.ModuleList(nn.RMSNorm(config.width) for _ in range(2))

    def forward(self, hidden: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norms[0](hidden), positions, tables)
        gate, up = self.up(self.norms[1](hidden)).chunk(2, -1)
        return hidden + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    """Logits of the last token of each row: `[rows, tokens]` to `[rows, vocabulary]`."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = linear(config.width, config.vocabulary)

    def forward(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, positions, tables)
        return self.head(self.norm(hidden[:, -1]))
