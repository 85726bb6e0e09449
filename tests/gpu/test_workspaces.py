"""cuBLAS workspaces: what a capture used is baked into its graph, so nothing may clear it while the graph lives."""

from __future__ import annotations

import pytest
import torch

from startup_fsm.devices.cuda_readings import segments
from startup_fsm.memory import MIB

pytestmark = pytest.mark.gpu


def workspaces(device):
    """Address and bytes of what lives on the capture stream in the default pool."""
    return sorted(
        (block["address"], block["size"])
        for segment in segments(0)
        if tuple(segment["segment_pool_id"]) == (0, 0) and segment["stream"] == device.capture_stream.cuda_stream
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block["size"] >= 8 * MIB
    )


def test_clearing_after_a_capture_corrupts(child):
    """Cleared after the capture, the workspace becomes another tensor's memory, and the replay writes into it."""
    rows = child("cleared")["rows"]
    assert all(row["reused"] for row in rows)
    assert any(row["overwritten"] for row in rows)


def test_settle_leaves_them(device):
    """Settling without being told to clear keeps the workspace where it was, and the replay right."""
    left = torch.randn(64, 65_536, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(65_536, 64, device="cuda", dtype=torch.bfloat16)
    pool = device.open_pool("graphs")
    graph = device.capture(lambda: left @ right, pool, size=1)
    graph.replay()
    before, held = graph.output.clone(), workspaces(device)
    assert len(held) == 1
    settled = device.settle()
    victim = torch.full((held[0][1],), 7, dtype=torch.uint8, device="cuda")
    graph.replay()
    torch.cuda.synchronize()
    assert not settled.workspaces_cleared
    assert workspaces(device) == held
    assert torch.equal(graph.output, before)
    assert bool((victim == 7).all())
    graph.reset()
    pool.release()


def test_settle_clears_when_told(device):
    """Told to clear, settling gives the memory of every workspace back."""
    weights = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(device.capture_stream):
        weights @ weights
    assert workspaces(device)
    device.settle(clear_workspaces=True)
    assert workspaces(device) == []
