"""Running out of memory on a card: what it counts as, and the figures of the sentence."""

from __future__ import annotations

import pytest
import torch

from startup_fsm.importers.torch_oom import parse_sentence
from startup_fsm.memory import GIB, MIB

pytestmark = pytest.mark.gpu

#: The sentence has two decimals of a GiB.
ROUNDING = GIB // 100


def refused(size):
    """The error of asking for so many bytes."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(size, dtype=torch.uint8, device="cuda")
    return raised.value


class TestSentence:
    def test_figures(self, device):
        """Tried, free and allocated of a real sentence are what the device and the allocator say."""
        held = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
        free, total = torch.cuda.mem_get_info()
        size = total + 7 * GIB
        found = device.out_of_memory(refused(size))
        assert found.tried_bytes == pytest.approx(size, abs=ROUNDING)
        assert found.free_bytes == pytest.approx(free, abs=ROUNDING)
        assert found.allocated_bytes == pytest.approx(torch.cuda.memory_allocated(), abs=ROUNDING)
        assert (found.blocks[0]["bytes"], found.blocks[0]["pool"]) == (3 * GIB, "0.0")
        del held

    def test_all_of_it(self, device):
        """Total, this process and the card's number are in it too."""
        said = parse_sentence(str(refused(1 << 40)))
        assert said.gpu == 0
        assert said.total_bytes == pytest.approx(torch.cuda.mem_get_info()[1], abs=ROUNDING)
        assert said.process_bytes is not None
        assert said.reserved_unallocated_bytes is not None

    def test_private_pools(self, device):
        """Free blocks in private pools are named, with the pool of the largest block."""
        pool = device.open_pool("kv")
        with pool:
            kept = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
            dropped = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        del dropped
        found = device.out_of_memory(refused(1 << 40))
        assert found.private_pool_bytes == pytest.approx(GIB, abs=ROUNDING)
        assert found.blocks[0]["purpose"] == "kv"
        del kept
        pool.release()

    def test_limit(self, device):
        """A limit that the process set itself is in the sentence."""
        torch.cuda.set_per_process_memory_fraction(0.05)
        try:
            said = parse_sentence(str(refused(20 * GIB)))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert said.allowed_bytes == pytest.approx(0.05 * torch.cuda.mem_get_info()[1], abs=ROUNDING)

    def test_line_of_code(self, device):
        """With torch's history on, a block says which line allocated it."""
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
        try:
            held = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
            [block] = [each for each in device.out_of_memory(refused(1 << 40)).blocks if each["bytes"] == 4 * GIB]
        finally:
            torch.cuda.memory._record_memory_history(None)
        assert "test_oom.py" in block["frame"]
        del held


class TestCategory:
    def test_memory(self, device):
        """The type of torch is oom."""
        assert device.category(refused(1 << 40)) == "oom"

    @pytest.mark.parametrize(
        ("error", "category"),
        [
            (RuntimeError("CUDA error: out of memory"), "oom"),
            (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
            (RuntimeError("CUDA error: operation not permitted when stream is capturing"), "capture"),
            (RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture"), "capture"),
            (RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED"), "pool"),
            (ValueError("out of memory, says the engine"), None),
            (RuntimeError("shapes cannot be multiplied"), None),
        ],
    )
    def test_words(self, device, error, category):
        """A plain RuntimeError counts by its words, and an error of the engine's own does not."""
        assert device.category(error) == category

    def test_still_works(self, device):
        """After a refusal the device goes on."""
        refused(1 << 40)
        assert float(torch.ones(MIB, device="cuda").sum()) == MIB


def test_the_instant_is_seen(device, tmp_path):
    """The observer sees the largest blocks before unwinding frees them, and writes a snapshot where it is told to."""
    device.oom_directory = tmp_path
    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda")]
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
    finally:
        device.oom_directory = None
    held.clear()

    facts = device.out_of_memory(caught.value)

    assert facts.tried_bytes == 1 << 42
    assert facts.blocks[0]["bytes"] == 1 << 30
    assert [path.suffix for path in tmp_path.iterdir()] == [".pickle"]


def test_states_are_stamped(device):
    """Torch's own history carries the name of the state, so that memory_viz shows it."""
    if not hasattr(torch.cuda.memory, "_set_memory_metadata"):
        pytest.skip("this torch stamps nothing")
    torch.cuda.memory._record_memory_history(max_entries=1_000)
    try:
        device.label("state=load_weights visit=1")
        kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        traces = torch.cuda.memory._snapshot()["device_traces"][device.index]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        device.label("")
    del kept

    assert "state=load_weights visit=1" in {entry.get("user_metadata") for entry in traces}
