"""Tokens are drawn by the probabilities that the settings leave."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from startup_fsm.engines.reference.sampler import Sampling, sample


def shares(logits: list[float], sampling: Sampling, draws: int = 20_000) -> torch.Tensor:
    """How often each token is drawn."""
    rows = torch.tensor(logits).expand(draws, -1)
    tokens = sample(rows, sampling, sampling.generator())
    return torch.bincount(tokens, minlength=len(logits)) / draws


def test_greedy_takes_the_best_and_draws_nothing():
    """Temperature 0 is argmax and leaves the generator where it was."""
    logits = torch.randn(50, 30)
    generator = Sampling().generator()
    state = generator.get_state()
    assert torch.equal(sample(logits, Sampling(), generator), logits.argmax(-1))
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    """Shares of drawn tokens are the probabilities at that temperature."""
    logits = [2.0, 1.0, 0.0, -1.0]
    expected = (torch.tensor(logits) / temperature).softmax(0)
    torch.testing.assert_close(shares(logits, Sampling(temperature)), expected, atol=0.015, rtol=0)


def test_top_k_keeps_the_k_best():
    """Tokens behind the k best are never drawn, the others keep their proportions."""
    drawn = shares([3.0, 1.0, 2.5, 0.0], Sampling(1.0, top_k=2))
    assert drawn[1] == drawn[3] == 0
    torch.testing.assert_close(drawn[[0, 2]], torch.tensor([3.0, 2.5]).softmax(0), atol=0.015, rtol=0)


def test_top_p_keeps_the_smallest_set_that_holds_p():
    """With probabilities 0.5, 0.3, 0.15, 0.05: p 0.8 needs two tokens, 0.81 three, a tiny p one."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().tolist()
    assert shares(logits, Sampling(1.0, top_p=0.79)).nonzero().flatten().tolist() == [1, 3]
    assert shares(logits, Sampling(1.0, top_p=0.81)).nonzero().flatten().tolist() == [0, 1, 3]
    assert shares(logits, Sampling(1.0, top_p=1e-6)).nonzero().flatten().tolist() == [1]


def test_top_k_and_top_p_work_together():
    """The nucleus is taken of what top-k left."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert shares(logits, Sampling(1.0, top_k=2, top_p=0.5)).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.9)])
def test_same_seed_same_tokens(sampling, dtype):
    """A seed decides every draw, and the logits are left as they were."""
    logits = torch.randn(64, 200).to(dtype)
    before = logits.clone()
    first = sample(logits, sampling, sampling.generator())
    assert torch.equal(first, sample(logits, sampling, sampling.generator()))
    other = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed=9)
    assert not torch.equal(first, sample(logits, other, other.generator()))
    assert torch.equal(logits, before)


def test_a_top_k_beyond_the_vocabulary_keeps_everything():
    """More tokens than there are is no limit."""
    logits = torch.randn(9, 4)
    limited, free = Sampling(1.0, top_k=4), Sampling(1.0)
    assert torch.equal(sample(logits, limited, limited.generator()), sample(logits, free, free.generator()))


@pytest.mark.parametrize(
    "settings", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_settings_that_leave_no_token_are_refused(settings):
    """The message names the setting and has a hint."""
    with pytest.raises(ValueError, match=f"{next(iter(settings))} .*\nhint: "):
        Sampling(**settings)


class Peak(TorchDispatchMode):
    """Follows the bytes of storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_iter(made) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.drop, storage._cdata)
        return made

    def drop(self, key: int) -> None:
        self.bytes -= self.live.pop(key)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(Sampling(), 0), (Sampling(1.0), 8), (Sampling(1.0, top_k=50), 8), (Sampling(1.0, top_p=0.9), 17)],
)
def test_memory_is_as_documented(sampling, expected):
    """Peak bytes a number beside the logits, at the size where engines ran out of memory: 512 x 128,256."""
    with FakeTensorMode():
        logits = torch.empty(512, 128_256, dtype=torch.bfloat16)
        with Peak() as peak:
            sample(logits, sampling, sampling.generator())
    assert peak.peak / logits.numel() == pytest.approx(expected, abs=0.01)
