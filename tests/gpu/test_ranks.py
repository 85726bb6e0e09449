"""Starts over GPUs: one device is not used twice; with two and NCCL they agree, and nobody waits for a dead rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from startup_fsm.diagnose import diagnose
from startup_fsm.journal import read_journal
from startup_fsm.reading import read_starts
from startup_fsm.verdict import EXIT_NOT_READY, EXIT_PEER

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ranks_script.py")
PATIENCE_S = 180
CAPTURES = ("capture_throwaway", "capture_graphs")

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


@pytest.fixture
def environment():
    """Without a run or a launcher around it."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ours = ("STARTUP_FSM_", "TORCHELASTIC_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"PYTHONPATH": path}


@pytest.fixture
def ranks(tmp_path, environment):
    """Both ranks without a launcher, so that nobody ends them but we; gives exit codes and what took how long."""

    def run(case):
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ports.append(listener.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
        shared["STARTUP_FSM_STORE"] = f"127.0.0.1:{ports[1]}"
        running = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(tmp_path), case],
                env=environment | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        codes, ended = [None, None], [0.0, 0.0]
        until = time.monotonic() + PATIENCE_S
        while None in codes and time.monotonic() < until:
            for rank, process in enumerate(running):
                if codes[rank] is None and process.poll() is not None:
                    codes[rank], ended[rank] = process.returncode, time.monotonic()
            time.sleep(0.02)
        for process in running:
            process.kill()
            process.wait()
        return codes, ended

    return run


def test_collectives_are_captured(tmp_path, environment):
    """One rank with NCCL: its sums are in throwaway and real graphs, both give back all of theirs, replay is right."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    subprocess.run([*command, str(SCRIPT), str(tmp_path), "ready"], env=environment, check=True, timeout=PATIENCE_S)

    (start,) = read_starts(tmp_path)
    verdict = diagnose(start.sources)
    worse = [each.finding for each in verdict.findings if each.finding.severity != "note"]
    assert (verdict.outcome, worse) == ("ready", [])
    (process,) = start.processes
    sizes = [[event.size for _, event in process.history.last(name).captures] for name in CAPTURES]
    assert sizes == [[8, 4, 2, 1]] * 2


@needs_two
def test_they_agree_under_torchrun(tmp_path, environment):
    """One run with the id of the launcher, the KV blocks of the smaller device, and every replay equal to eager."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(SCRIPT), str(tmp_path), "ready"], env=environment, check=True, timeout=PATIENCE_S)

    (start,) = read_starts(tmp_path)
    verdict = diagnose(start.sources)
    assert (verdict.outcome, verdict.ranks) == ("ready", 2)
    histories = [process.history for process in start.processes]
    offers = [history.budgets[-1][1].blocks for history in histories]
    agreed = [event for history in histories for _, event in history.agreements if event.topic == "blocks"]
    assert {event.agreed for event in agreed} == {min(agreed[0].offers.values())} == set(offers)
    devices = [event for _, event in histories[0].agreements if event.topic == "devices"]
    assert [event.agreed for event in devices] == [2]


def test_one_device_is_not_used_twice(tmp_path, ranks):
    """Both ranks and the device are named before NCCL is even asked."""
    codes, _ = ranks("same_device")

    assert codes == [EXIT_NOT_READY, EXIT_NOT_READY]
    (start,) = read_starts(tmp_path)
    (finding,) = [each.finding for each in diagnose(start.sources).findings if each.finding.code == "ranks.same_device"]
    assert finding.message.startswith("rank 0, rank 1 use one device: GPU-")
    assert finding.state == "init_device"


@needs_two
def test_nobody_waits_in_a_collective_for_the_dead(tmp_path, ranks):
    """Rank 0 is inside an all-reduce when rank 1 is killed: it is ended within seconds and has named it."""
    codes, ended = ranks("killed")

    assert codes == [EXIT_PEER, -signal.SIGKILL]
    assert ended[0] - ended[1] < 5
    (journal,) = tmp_path.glob("*/rank-00000.1.jsonl")
    (event,) = [record.event for record in read_journal(journal).records if record.kind == "peer_failed"]
    assert (event.peer, event.state) == ("rank 1", "verify")
