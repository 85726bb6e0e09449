"""The reference engine goes through every plan, with values and without, and generates afterwards."""

from __future__ import annotations

import time

import attrs
import pytest
import torch

from startup_fsm import budget
from startup_fsm.bootstrap import Bootstrap
from startup_fsm.checks.readings import used_peak
from startup_fsm.engine import Engine, LongestRequest
from startup_fsm.engines.demonstration import CARDS, Demonstration, assemble, default_total
from startup_fsm.engines.reference import engine as module
from startup_fsm.engines.reference.checkpoint import CheckpointError, random_weights, save_checkpoint
from startup_fsm.engines.reference.engine import ReferenceEngine
from startup_fsm.engines.reference.model import Decoder
from startup_fsm.engines.reference.options import Options, default_capture_sizes
from startup_fsm.engines.reference.shapes import SHAPES
from startup_fsm.errors import StartupError
from startup_fsm.fold import RunState
from startup_fsm.memory import GIB, MIB

PLANS = ("throwaway", "single_capture", "eager")
PROMPTS = [[1, 2, 3], [4, 5], list(range(40))]
SMALL = {"max_num_seqs": 12, "max_model_len": 96, "max_num_batched_tokens": 128, "capture_sizes": [1, 3, 8, 12]}


def started(parts: Demonstration) -> RunState:
    """The history of a start in memory, which must come to ready."""
    boot = Bootstrap(plan=parts.plan, device=parts.device, knobs=parts.knobs, journal=None, discover=False)
    boot.run(parts.engine)
    return boot.history


def assert_sound(history: RunState):
    """Ready, by the plan, no finding above a note, and the peak as close to the request as was promised."""
    assert history.finished is not None
    assert history.finished[1].end == "ready"
    assert history.violations == []
    assert [finding for _, judged in history.checks for finding in judged.findings if finding.severity != "note"] == []
    computed = history.budgets[-1][1]
    peak = used_peak(history.visits_of("verify")[-1])
    granule = max(computed.block_bytes, 2 * MIB, history.arena[1].granule_bytes if history.arena else 0)
    assert peak is not None
    assert 0 <= computed.requested_bytes - peak <= -budget.term(computed, "margin") + granule


@pytest.mark.parametrize("plan", PLANS)
def test_starts_with_values(plan: str):
    """With real arithmetic every plan comes to ready, and a replay equals the eager step bit by bit."""
    history = started(assemble(plan=plan, **SMALL))

    assert_sound(history)
    replay = history.visits_of("verify")[-1].probes["replay"][1]
    if plan == "eager":
        assert replay.skipped == "no graphs were captured"
    else:
        assert replay.result == {"equal": True, "largest_difference": 0.0}


@pytest.mark.parametrize("plan", PLANS)
def test_starts_without_values(plan: str):
    """With fakes the same states are passed, and what needs values is skipped and said so."""
    parts = assemble(shape="0.5b", fake=True, plan=plan, max_num_seqs=32, max_num_batched_tokens=2_048)
    history = started(parts)

    assert_sound(history)
    assert history.visits_of("verify")[-1].probes["replay"][1].skipped
    assert history.visits_of("load_weights")[0].probes["weights"][1].skipped
    with pytest.raises(StartupError, match="fakes"):
        parts.engine.generate(PROMPTS)


@pytest.mark.slow
def test_predicts_an_h200():
    """An 8B shape with 51 sizes starts in a minute of one processor at most, and takes what it took on an H200."""
    began = time.process_time()
    history = started(assemble(shape="8b", fake=True, total=CARDS[3], max_model_len=256))
    assert time.process_time() - began < 60

    assert_sound(history)
    loaded = history.visits_of("load_weights")[0].after
    assert loaded is not None
    assert round(loaded.allocated_bytes / MIB, 1) == 15_316.5
    assert loaded.reserved_bytes == 15_318 * MIB
    captured = history.visits_of("capture_graphs")[0]
    assert len(captured.captures) == 51
    pool = next(pool for pool in captured.snapshots["F3"][1].pools if pool.purpose == "graphs")
    assert pool.active_bytes / MIB == pytest.approx(2_574.3, rel=0.005)
    assert pool.reserved_bytes / MIB == pytest.approx(2_926, rel=0.12)


def test_generates_the_same_after_any_start():
    """Greedy text through captured graphs is the text of an eager start."""
    texts = []
    for plan in PLANS:
        parts = assemble(plan=plan, **SMALL)
        started(parts)
        texts.append(parts.engine.generate(PROMPTS, max_new_tokens=9))

    assert texts[0] == texts[1] == texts[2]
    assert [len(text) for text in texts[0]] == [9, 9, 9]


def test_generates_through_graphs():
    """After a start with graphs, generating replays them."""
    parts = assemble(plan="single_capture", **SMALL)
    started(parts)
    graph = parts.engine.graphs[3]
    before = graph.replays  # type: ignore[attr-defined]
    parts.engine.generate(PROMPTS, max_new_tokens=5)

    assert graph.replays == before + 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", PLANS)
def test_a_smaller_cache_gets_no_block_tables_of_the_larger_one(plan: str, monkeypatch: pytest.MonkeyPatch):
    """A start that ran out of memory in verify starts again with a smaller cache, whatever verify left in the inputs."""
    parts = assemble(plan=plan, retries=1, **SMALL)
    verify, failures = ReferenceEngine.verify, [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")]

    def fails_once(self, step):
        verify(self, step)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(ReferenceEngine, "verify", fails_once)
    history = started(parts)

    assert [chosen.edge for _, chosen in history.recoveries] == ["shrink"]
    first, second = (computed.blocks for _, computed in history.budgets)
    assert second < first
    assert history.visits_of("verify")[-1].probes["replay"][1].result.get("equal", True)


def test_without_graphs_where_they_cannot_be_captured():
    """A start that may go on without graphs takes them out of the budget and is verified without them."""
    parts = assemble(fault="capture-fails", allow_eager=True)
    history = started(parts)

    assert [chosen.target for _, chosen in history.recoveries] == ["recover_allocator"]
    assert budget.term(history.budgets[-1][1], "graphs") == 0
    assert history.visits_of("verify")[-1].probes["replay"][1].skipped


def test_starts_from_a_checkpoint(tmp_path):
    """A checkpoint folder says the shape, is noted in bytes before it is read, and gives the weights that were saved."""
    shape = attrs.evolve(SHAPES["tiny"], layers=2, vocabulary=256)
    model = Decoder(shape)
    random_weights(model, 5)
    save_checkpoint(model, tmp_path, shard_bytes=MIB)
    loaded = assemble(checkpoint=tmp_path, **SMALL)
    drawn = assemble(shape=shape, seed=5, **SMALL)
    history = started(loaded)
    started(drawn)

    assert history.note("checkpoint_bytes") == shape.weight_bytes
    assert loaded.engine.weights_digest() == drawn.engine.weights_digest()
    assert loaded.engine.generate(PROMPTS) == drawn.engine.generate(PROMPTS)
    assert history.knob("checkpoint") == str(tmp_path)


def test_a_missing_shard_fails_before_anything_is_loaded(tmp_path):
    """A checkpoint that is not whole fails in load_weights, and no weight was allocated."""
    model = Decoder(attrs.evolve(SHAPES["tiny"], layers=1, vocabulary=256))
    random_weights(model)
    save_checkpoint(model, tmp_path, shard_bytes=MIB)
    max(tmp_path.glob("*.safetensors")).unlink()
    parts = assemble(checkpoint=tmp_path, **SMALL)
    boot = Bootstrap(plan=parts.plan, device=parts.device, knobs=parts.knobs, journal=None, discover=False)
    with pytest.raises(CheckpointError, match="missing"):
        boot.run(parts.engine)

    failed = boot.history.current
    assert failed is not None
    assert (failed.state, failed.failed.category) == ("load_weights", "raised")
    assert failed.snapshots["fail"][1].allocated_bytes == 0


def test_a_digest_sees_a_changed_weight(monkeypatch: pytest.MonkeyPatch):
    """The digest changes with the weights, whether all bytes are hashed or a sample of them."""
    parts = assemble(plan="eager", **SMALL)
    started(parts)
    assert parts.engine.model is not None
    for limit in (64 * MIB, 0):
        monkeypatch.setattr(module, "_HASHED_WHOLE", limit)
        before = parts.engine.weights_digest()
        assert parts.engine.weights_digest() == before
        parts.engine.model.norm.add_(0.5)
        assert parts.engine.weights_digest() != before


def test_addresses_are_those_of_the_device():
    """Keys and values are recorded with their addresses on the device, with fakes too, and stay where they are."""
    for fake in (False, True):
        history = started(assemble(plan="single_capture", fake=fake, **SMALL))
        reserved = history.visits_of("reserve_kv")[0].probes["kv_addresses"][1].result["addresses"]
        assert len(set(reserved)) == 2 * SHAPES["tiny"].layers
        assert history.visits_of("verify")[0].probes["kv_addresses"][1].result["addresses"] == reserved


def test_profiles_what_verify_runs():
    """The sampler is a part of profiling and of verify, and the workspace is named where it is made."""
    history = started(assemble(**SMALL))

    profiled = history.visits_of("profile_activations")[0]
    assert profiled.part == "sampler"
    assert [probe.result["name"] for _, probe in profiled.workspaces] == ["attention"]
    assert history.visits_of("verify")[0].part == "sampler_warmup"
    assert all(not visit.workspaces for visit in history.visits if visit is not profiled)


def test_implements_the_protocol():
    """It is an engine, with everything that is optional."""
    made = ReferenceEngine(Options(shape="tiny", max_model_len=100, capture_sizes=(4, 2)))

    assert isinstance(made, Engine)
    assert made.longest_request() == LongestRequest(tokens=100, block_tokens=16)
    assert made.profiling_blocks() == 5
    assert made.kv_block_bytes() == SHAPES["tiny"].kv_block_bytes(16)
    assert made.knobs()["capture_sizes"] == [2, 4]
    with pytest.raises(StartupError, match="no weights yet"):
        made.generate([[1]])


def test_default_sizes_are_the_51_of_the_measurement():
    """51 sizes up to 512, and none above the limit."""
    assert len(default_capture_sizes(512)) == 51
    assert default_capture_sizes(20) == (1, 2, 4, 8, 16)
    assert Options(shape="tiny", max_num_seqs=3).sizes == (1, 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not positive"),
        ({"max_model_len": 4_096}, "2048 positions"),
        ({"capture_sizes": (1, 64)}, "not between 1 and max_num_seqs, 32"),
        ({"shape": "huge"}, "no shape has this name"),
    ],
)
def test_refuses_options_that_no_start_can_use(settings: dict, said: str):
    """Impossible sizes are refused with the limit, before anything is started."""
    with pytest.raises(ValueError, match=said):
        Options(**{"shape": "tiny"} | settings)


def test_assembles_what_is_given():
    """What is given wins, what is not fits the shape, and unknown names are refused."""
    parts = assemble(shape="8b", utilization=0.5, retries=2)
    assert (parts.fake, parts.device.has_values, parts.knobs.utilization) == (True, False, 0.5)
    assert parts.plan.allows("verify", "shrink", taken=1)
    assert default_total(SHAPES["70b"], fake=True) == 192 * GIB
    assert default_total(SHAPES["tiny"], fake=False) <= 2 * GIB
    for wrong, kind in (({"plan": "observed"}, ValueError), ({"fault": "none"}, ValueError), ({"size": 3}, TypeError)):
        with pytest.raises(kind, match=r"none of|no setting"):
            assemble(**wrong)
