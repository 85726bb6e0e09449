"""A process that starts itself again on a card has all of its memory back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, torch
free = torch.cuda.mem_get_info()[0]
print(free, flush=True)
if len(sys.argv) == 1:
    held = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.add_(1)
    torch.cuda.synchronize()
    os.execv(sys.executable, [sys.executable, __file__, "again"])
"""


def test_memory_comes_back_with_the_new_program(tmp_path):
    """What the program before held, context included, is free when the next one looks."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True, timeout=180
    )

    first, second = map(int, ran.stdout.split())
    assert abs(first - second) < 64 << 20
