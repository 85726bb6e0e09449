"""Continuous batching of transformers starts within its request, and its small caches are proven gone."""

from __future__ import annotations

import importlib.util
import logging
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from startup_fsm import read_journal
from startup_fsm.diagnose import diagnose
from startup_fsm.fold import fold
from startup_fsm.sources import Source

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_cb.py"
MIB = 1 << 20
#: Keys and values of two layers, two heads of 64, 64 tokens, float32.
KV_BLOCK = 2 * 2 * 2 * 64 * 64 * 4


def missing() -> str | None:
    """Why the example cannot run here; None where it can."""
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return "transformers is not installed: pip install 'startup-fsm[transformers]'"
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    return None if numbers >= (5, 17) else f"transformers is {version}; continuous batching needs 5.17"


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def folded(folder: Path):
    """The one start in a directory of runs."""
    (path,) = folder.glob("*/*.jsonl")
    return fold(read_journal(path).records)


def codes(run) -> list[str]:
    """Findings of a start that are worse than a note."""
    findings = [each.finding for each in diagnose([Source(run=run)]).findings]
    return [each.code for each in findings if each.severity != "note"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory, environment):
    """The example, run once: its output, and the fold of its journal."""
    folder = tmp_path_factory.mktemp("transformers")
    command = [sys.executable, str(EXAMPLE)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, folded(folder / "runs")


def test_starts_within_its_request(ran):
    """Two small caches, one real one: ready, tokens as by generate, the peak within the request and the margin used."""
    output, started = ran

    assert output.startswith("3 answers, equal to those of generate\n")
    assert started.finished is not None
    assert started.finished[1].end == "ready"
    assert codes(started) == []
    assert started.last("verify").probes["tokens"][1].result == {"equal": True}
    [(_, budget)] = started.budgets
    leave = started.last("verify").after
    used = leave.outside_bytes + leave.reserved_peak_bytes
    assert budget.requested_bytes == 1 << 30
    # What stays unused is the margin, and what a line through two readings cannot tell.
    assert 0 <= budget.requested_bytes - used <= 128 * MIB


def test_blocks_are_charged_with_what_grows(ran):
    """A block takes more than twice its keys and values: masks and gathered keys grow with the cache."""
    output, started = ran

    budget = started.budgets[0][1]
    assert budget.block_bytes > 2 * KV_BLOCK
    assert f"{budget.blocks} KV blocks of 128.00 KiB" in output


def test_small_caches_are_proven_gone(ran):
    """Both visits of teardown left nothing in the pool of their cache, no cache object, and the memory of before."""
    _, started = ran

    assert [visit.state for visit in started.visits][3:9] == ["bootstrap_kv", "capture_throwaway", "teardown"] * 2
    lives = [life for life in started.pools if life.purpose == "profiling_kv"]
    for life, visit in zip(lives, started.visits_of("bootstrap_kv"), strict=True):
        assert visit.after.pool(life.pool).active_bytes > visit.notes["blocks"] * KV_BLOCK
        assert (life.released.left_bytes, life.released.use_count) == (0, 1)
    small, large = (visit.notes["blocks"] for visit in started.visits_of("bootstrap_kv"))
    assert 0 < 2 * small <= large
    for visit in started.visits_of("teardown"):
        assert visit.probes["cache"][1].result == {"gone": True}
        assert visit.after.reserved_bytes == started.last("profile_activations").after.reserved_bytes


def test_one_size_would_overrun(run, tmp_path):
    """Sized by keys and values alone, as many engines do it, the same start takes more than its request."""
    script = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import transformers_cb as example
def by_keys_and_values(boot, model):
    example.needed(boot, model, 64)
    return example.BLOCK_BYTES, 0
example.line = by_keys_and_values
example.main()
"""
    run("-c", script)

    assert codes(folded(tmp_path / "runs")) == ["budget.overrun"]


def test_a_swallowed_failure_is_raised():
    """A warm-up that transformers only logs as failed ends the state; other lines do not, and the handler goes."""
    spec = importlib.util.spec_from_file_location("transformers_cb", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    log = logging.getLogger("ContinuousBatchingLogger")
    handlers = list(log.handlers)

    with example.failures_raised():
        log.warning("another line")
        with pytest.raises(RuntimeError, match="Failed to warm up: CUDA out of memory"):
            log.warning("Failed to warm up: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert log.handlers == handlers
