"""The vLLM plugin on a stand-in with vLLM's names: states, figures, failures, names that are missing, the closed loop."""

from __future__ import annotations

import importlib
import sys
import textwrap
import types
from pathlib import Path

import pytest

from startup_fsm import identity
from startup_fsm.integrations import vllm as integration
from startup_fsm.integrations.vllm import enforcing, facts, plugin, recording
from startup_fsm.integrations.vllm.patching import Patches, Target
from startup_fsm.memory import GIB, MIB, Snapshot
from startup_fsm.reading import read_starts
from startup_fsm.verdicts import judge

#: What the device of the stand-in has, and what its process holds at a moment.
TOTAL = 100 * GIB

STATE = """
class Held:
    bytes = 0

    def add(self, size):
        self.bytes += size

HELD = Held()
FAIL = {}
"""

RUNNER = """
from vllm.state import FAIL, HELD

class GPUModelRunner:
    model_memory_usage = 15 << 30
    kv_cache_config = None

    def profile_cudagraph_memory(self):
        return 0

    def capture_model(self):
        HELD.add(1 << 30)
        if FAIL.get("capture"):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 100.00 GiB"
                               " of which 1.00 GiB is free.")
        return 1 << 30
"""

WORKER = """
import types
from vllm.state import HELD
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

class Device:
    index = 0

class Worker:
    rank = 0
    device = Device()

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.model_runner = None

    def init_device(self):
        HELD.add(512 << 20)
        self.init_snapshot = types.SimpleNamespace(total_memory=100 << 30, free_memory=(100 << 30) - (512 << 20))
        self.requested_memory = 90 << 30
        self.model_runner = GPUModelRunner()

    def load_model(self, *, load_dummy_weights=False):
        HELD.add(15 << 30)
        return "loaded"

    def determine_available_memory(self):
        self.peak_activation_memory = 2 << 30
        self.non_torch_memory = 256 << 20
        self.cudagraph_memory_estimate = 0
        self.available_kv_cache_memory_bytes = (90 << 30) - (15 << 30) - (2 << 30) - (256 << 20)
        return self.available_kv_cache_memory_bytes

    def initialize_from_config(self, kv_cache_config):
        self.model_runner.kv_cache_config = kv_cache_config
        HELD.add(sum(each.size for each in kv_cache_config.kv_cache_tensors))

    def compile_or_warm_up_model(self):
        self.model_runner.capture_model()
        HELD.add(512 << 20)
        return 1.5
"""

ENGINE = """
import types
from vllm.state import FAIL
from vllm.v1.worker.gpu_worker import Worker

class EngineCore:
    def __init__(self, vllm_config):
        self.worker = Worker(vllm_config)
        self.vllm_config = vllm_config
        self.worker.init_device()
        assert self.worker.load_model(load_dummy_weights=True) == "loaded"
        self._initialize_kv_caches(vllm_config)

    def _initialize_kv_caches(self, vllm_config):
        available = self.worker.determine_available_memory()
        if FAIL.get("plan"):
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
        self.kv_bytes = available // (1 << 20) * (1 << 20)
        tensors = [types.SimpleNamespace(size=self.kv_bytes)]
        config = types.SimpleNamespace(kv_cache_tensors=tensors, num_blocks=self.kv_bytes >> 20)
        self.worker.initialize_from_config(config)
        self.took = self.worker.compile_or_warm_up_model()
        return config
"""

CONFIG = """
import types

__version__ = "0.25.1"

def config(utilization=0.9, shards=1):
    part = types.SimpleNamespace
    return part(
        cache_config=part(gpu_memory_utilization=utilization, kv_cache_memory_bytes=None, cache_dtype="auto"),
        model_config=part(model="/models/x", max_model_len=8192, enforce_eager=False, quantization=None, dtype="bfloat16",
                          hf_text_config=part(vocab_size=128256)),
        scheduler_config=part(max_num_seqs=1024, max_num_batched_tokens=8192),
        parallel_config=part(tensor_parallel_size=shards, pipeline_parallel_size=1),
        compilation_config=part(cudagraph_capture_sizes=[1, 2, 4], cudagraph_mode=part(name="FULL_AND_PIECEWISE")),
    )
"""


class FakeReadings:
    """The device as the stand-in fills it."""

    name = "cuda:0 stand-in"

    def __init__(self, index):
        self.index = index

    def snapshot(self):
        """Torch holds all but the context and what is outside it."""
        held = sys.modules["vllm.state"].HELD.bytes
        return Snapshot(
            total_bytes=TOTAL,
            free_bytes=TOTAL - held,
            process_bytes=held,
            allocated_bytes=max(0, held - 512 * MIB),
            reserved_bytes=max(0, held - 512 * MIB),
            allocated_peak_bytes=max(0, held - 512 * MIB),
            reserved_peak_bytes=max(0, held - 512 * MIB),
        )


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package with vLLM's names, not imported yet, and an environment of its own."""
    root = tmp_path / "site"
    for name, text in {
        "vllm/__init__.py": CONFIG,
        "vllm/v1/__init__.py": "",
        "vllm/v1/worker/__init__.py": "",
        "vllm/state.py": STATE,
        "vllm/v1/worker/gpu/__init__.py": "",
        "vllm/v1/worker/gpu/model_runner.py": RUNNER,
        "vllm/v1/worker/gpu_worker.py": WORKER,
        "vllm/v1/engine/__init__.py": "",
        "vllm/v1/engine/core.py": ENGINE,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(recording, "Readings", FakeReadings)
    for variable in ("STARTUP_FSM_RUN", "STARTUP_FSM_RUN_OWNER"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    finders = list(sys.meta_path)
    yield tmp_path / "runs"
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


def started(runs, mode, *, utilization=0.9, rank=0, shards=1, **fails):
    """One start of the stand-in; its engine, and what it raised."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Patches)]
    if mode is not None:
        plugin.begin(mode, str(runs))
    core = importlib.import_module("vllm.v1.engine.core")
    core.FAIL.update(fails)
    core.Worker.rank = rank
    try:
        return core.EngineCore(importlib.import_module("vllm").config(utilization, shards)), None
    except (RuntimeError, ValueError) as error:
        return None, error


def test_off_means_nothing(vllm, monkeypatch):
    """Without its variable the plugin touches nothing and imports nothing of itself."""
    monkeypatch.delenv(integration.MODE_VARIABLE, raising=False)
    before = list(sys.meta_path)
    integration.install()
    assert sys.meta_path == before


def test_record_changes_nothing(vllm):
    """The engine gets the same sizes and results with a journal as without one."""
    plain, _ = started(vllm, None)
    recorded, _ = started(vllm, "record")
    assert (recorded.kv_bytes, recorded.took) == (plain.kv_bytes, 1.5)


def test_states_and_figures(vllm):
    """The worker's methods are states in their order, and its own numbers are figures."""
    started(vllm, "record")
    (start,) = read_starts(vllm)
    (process,) = start.processes
    assert [visit.state for visit in process.history.visits] == [
        *("init_device", "load_weights", "profile_activations", "size_kv"),
        *("allocate_kv", "warmup", "capture_graphs", "verify"),
    ]
    verdict = judge(start.sources, source=start.source, origin=start.origin)
    assert verdict.outcome == "ready"
    assert verdict.engine_version == "0.25.1"
    figures = verdict.figures
    assert figures["requested_bytes"] == 90 * GIB
    assert figures["weights_bytes"] == 15 * GIB
    assert figures["graph_actual_bytes"] == GIB
    assert figures["kv_cache_bytes"] == figures["kv_available_bytes"]
    # 512 MiB of context, the weights, the KV cache, the graphs, and 512 MiB that the first step left.
    assert figures["used_peak_bytes"] == figures["kv_cache_bytes"] + 17 * GIB
    assert verdict.findings[0].finding.code == "graphs.not_reserved"


def test_ranks_have_the_names_of_the_log(vllm, monkeypatch):
    """The workers of one start are its ranks, each with figures of its own."""
    # Each is a process of its own there, and the run is another one's.
    monkeypatch.setenv("STARTUP_FSM_RUN", "one-run")
    monkeypatch.setattr(identity, "export_run", lambda _: None)
    for rank in range(2):
        started(vllm, "record", rank=rank, shards=2)
    (start,) = read_starts(vllm)
    verdict = judge(start.sources, source=start.source, origin=start.origin)

    assert verdict.ranks == 2
    assert {name: each["weights_bytes"] for name, each in verdict.figures_by_rank.items()} == {
        "TP0": 15 * GIB,
        "TP1": 15 * GIB,
    }


@pytest.mark.parametrize(
    ("stages", "shards", "rank", "expected"),
    [
        (1, 1, 0, None),
        (1, 4, 3, "TP3"),
        (2, 1, 1, "PP1"),
        (2, 4, 6, "PP1 TP2"),
        (None, None, 0, None),
        (2, 2, None, None),
    ],
)
def test_names_of_ranks(stages, shards, rank, expected):
    """As vLLM numbers its workers: stage by stage, within each the shards."""
    part = types.SimpleNamespace
    config = part(parallel_config=part(pipeline_parallel_size=stages, tensor_parallel_size=shards))

    assert facts.label(config, rank) == expected


def test_failure_goes_on_as_it_is(vllm):
    """The engine's exception is the caller's, and the journal says state, reason and figures."""
    engine, error = started(vllm, "record", capture=True)
    assert engine is None
    assert "Tried to allocate 2.00 GiB" in str(error)
    (start,) = read_starts(vllm)
    verdict = judge(start.sources, source=start.source, origin=start.origin)
    assert (verdict.outcome, verdict.failed_state) == ("oom", "capture_graphs")
    assert verdict.figures["oom_tried_bytes"] == 2 * GIB
    assert verdict.findings[0].finding.code == "graphs.not_reserved"


def test_budget_that_does_not_fit(vllm):
    """What the engine's core raises after its worker measured is a failure of sizing."""
    _, error = started(vllm, "record", plan=True)
    assert isinstance(error, ValueError)
    (start,) = read_starts(vllm)
    verdict = judge(start.sources, source=start.source, origin=start.origin)
    assert (verdict.outcome, verdict.failed_state) == ("error", "size_kv")
    assert verdict.findings[0].finding.code == "budget.negative"


def test_enforce_closes_the_loop(vllm):
    """A second start stands within its request, with the margin left and no more."""
    first, _ = started(vllm, "enforce")
    second, _ = started(vllm, "enforce")
    starts = {start.run: start for run in vllm.iterdir() for start in read_starts(run)}
    peaks = sorted(
        (run, figures["used_peak_bytes"], figures["requested_bytes"])
        for run, start in starts.items()
        for figures in [judge(start.sources, source=start.source, origin=None).figures]
    )
    assert first.kv_bytes != second.kv_bytes
    left = [requested - peak for _, peak, requested in peaks]
    assert enforcing.MARGIN in left
    assert all(each >= 0 for each in left)


def test_enforce_needs_the_same_start(vllm):
    """A start with other settings is no measure: the bound is taken, and the journal says so."""
    started(vllm, "record")
    started(vllm, "enforce", utilization=0.8)
    newest = max(vllm.iterdir(), key=lambda run: run.stat().st_mtime_ns)
    (start,) = read_starts(newest)
    (reason,) = [event.reason for _, event in start.processes[0].history.decisions if event.decision == "kv_corrected"]
    assert "no ready start of this fingerprint" in reason


def test_names_that_a_version_lacks(vllm):
    """A method that is not there is a decision in the journal, and no crash."""
    path = vllm.parent / "site" / "vllm" / "v1" / "worker" / "gpu_worker.py"
    path.write_text(path.read_text(encoding="utf-8").replace("def load_model", "def load"), encoding="utf-8")
    core = vllm.parent / "site" / "vllm" / "v1" / "engine" / "core.py"
    text = core.read_text(encoding="utf-8").replace("self.worker.load_model(", "self.worker.load(")
    core.write_text(text, encoding="utf-8")
    engine, _ = started(vllm, "record")
    assert engine is not None
    (start,) = read_starts(vllm)
    missing = [
        event.inputs["name"] for _, event in start.processes[0].history.decisions if event.decision == "name_missing"
    ]
    assert missing == ["vllm.v1.worker.gpu_worker.Worker.load_model"]


def test_trouble_of_ours_stays_ours(vllm, monkeypatch):
    """A journal that cannot be written, or a reading that raises, never reaches the engine."""
    monkeypatch.setattr(FakeReadings, "snapshot", lambda _: 1 / 0)
    engine, error = started(vllm, "enforce")
    assert error is None
    assert engine.kv_bytes == (90 << 30) - (15 << 30) - (2 << 30) - (256 << 20)


def test_patches_wrap_once(tmp_path, monkeypatch):
    """A module that is imported already is wrapped at once, and never twice."""
    (tmp_path / "wrapped_once.py").write_text("class A:\n    def f(self):\n        return 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls: list[str] = []

    class Around:
        def before(self, target, arguments):
            calls.append("before")

        def after(self, target, token, result):
            return result + 1

        def failed(self, target, token, error):
            calls.append("failed")

    module = importlib.import_module("wrapped_once")
    finders = list(sys.meta_path)
    for _ in range(2):
        Patches([Target("wrapped_once", "A", "f", Around())], lambda _: None).install()
    sys.meta_path[:] = finders
    assert module.A().f() == 2
    assert calls == ["before"]
    del sys.modules["wrapped_once"]


def test_entry_point_is_declared():
    """The distribution names the plugin for vLLM."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert (
        '[project.entry-points."vllm.general_plugins"]\nstartup_fsm = "startup_fsm.integrations.vllm:install"' in text
    )
