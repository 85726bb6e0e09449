"""From logits to tokens: greedy, temperature, top-k, top-p.

Peak memory beside the logits, in bytes for each of rows x vocabulary numbers:

- greedy: nothing but the answer, 8 bytes a row;
- temperature, with or without top-k: 8 (probabilities and noise in float32);
- top-p: 17 (logits, their sorted copy, probabilities, their running sum, all in float32, and a mask); 36 on an H200,
  where the sort takes scratch memory of its own that no operation shows.

Logits of 512 rows x 128,256 are 250 MiB in float32: the first sampler step after capture is where a start without
headroom dies.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 leave every token in.

    Raises `ValueError` for a temperature below 0, a negative `top_k` or a `top_p` outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuses settings that leave no token to choose."""
        if not (0 <= self.temperature < math.inf):
            raise ValueError(f"temperature {self.temperature} is not usable\nhint: 0 is greedy, 1 changes nothing")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative\nhint: 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]\nhint: 1 keeps every token")

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator on `device` seeded with `seed`: the same seed, device and calls give the same tokens."""
        return torch.Generator(device=device).manual_seed(self.seed)


@torch.no_grad()
def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """One token a row, int64 `[rows]`, from logits `[rows, vocabulary]`, which are left as they are.

    Draws from `generator`, else from torch's own; greedy draws nothing. No value moves to the host.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.to(torch.float32, copy=True).div_(sampling.temperature)
    if 0 < sampling.top_k < logits.shape[-1]:
        weakest = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled.masked_fill_(scaled < weakest, -math.inf)
    if sampling.top_p < 1:
        scaled.masked_fill_(scaled < _weakest_of_nucleus(scaled, sampling.top_p), -math.inf)
    # The highest of probability / exponential noise is a draw by those probabilities, and needs no host to choose.
    chances = scaled.softmax(dim=-1)
    del scaled
    noise = torch.rand(chances.shape, generator=generator, device=chances.device).log_().neg_()
    return chances.div_(noise).argmax(dim=-1)


def _weakest_of_nucleus(scaled: Tensor, top_p: float) -> Tensor:
    """Lowest logit, `[rows, 1]`, of the smallest set of best tokens that holds `top_p` of the probability."""
    ordered = scaled.sort(dim=-1, descending=True).values
    chances = ordered.softmax(dim=-1)
    # A token belongs to the set while the tokens before it hold less than top_p: the best one always does.
    before = chances.cumsum(dim=-1).sub_(chances)
    return ordered.masked_fill_(before >= top_p, math.inf).amin(dim=-1, keepdim=True)
