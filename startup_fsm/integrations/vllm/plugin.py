"""
Which methods of vLLM are which states, and what is done around each.

    Worker.init_device                   init_device
    Worker.load_model                    load_weights
    Worker.determine_available_memory    profile_activations, size_kv; the KV size is corrected at its end
    runner.profile_cudagraph_memory      capture_throwaway
    Worker.initialize_from_config        allocate_kv
    Worker.compile_or_warm_up_model      warmup, and verify after the capture; ready at its end
    runner.capture_model                 capture_graphs
    EngineCore._initialize_kv_caches     where a budget that does not fit is raised
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from startup_fsm.integrations.vllm import facts
from startup_fsm.integrations.vllm.patching import Patches, Target
from startup_fsm.integrations.vllm.recording import Start

_WORKER: Final = ("vllm.v1.worker.gpu_worker", "Worker")
_RUNNERS: Final = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
)
_ENGINE: Final = ("vllm.v1.engine.core", "EngineCore")
#: The V2 runner of these versions has the method and profiles nothing.
_FIRST_V2_PROFILE: Final = (0, 29)

_log = logging.getLogger("startup_fsm")


class Plugin:
    """
    One process of vLLM.

    Args:
        mode: ``record`` or ``enforce``.
        runs: Directory of runs.

    Attributes:
        start: Its journal; None before its worker made a device.
        missing: Names that this version lacks.
    """

    def __init__(self, mode: str, runs: str) -> None:
        self.mode = mode
        self.runs = runs
        self.start: Start | None = None
        self.missing: list[str] = []

    def begun(self, config: Any, rank: int | None) -> Start:
        """A journal for this process."""
        start = self.start = Start(self.runs, config, rank, self.mode)
        for name in self.missing:
            start.decide("name_missing", f"this version of vLLM has no {name}", name=name)
        return start

    def lacks(self, target: Target) -> None:
        """A name that was to be wrapped is not there."""
        name = f"{target.module}.{target.owner}.{target.method}"
        self.missing.append(name)
        if self.start is not None:
            self.start.decide("name_missing", f"this version of vLLM has no {name}", name=name)


class _Step:
    """
    What is done around one method. Nothing of it reaches the engine: what goes wrong here is logged, once a method.

    Args:
        plugin: The process's.
        before, after: Called with the plugin, the object, and keyword arguments or the result.
    """

    def __init__(
        self,
        plugin: Plugin,
        before: Callable[[Plugin, Any, Mapping[str, Any]], Any],
        after: Callable[[Plugin, Any, Any, Any], Any] | None = None,
    ) -> None:
        self._plugin = plugin
        self._before = before
        self._after = after
        self._is_off = False

    def before(self, target: Any, arguments: Mapping[str, Any]) -> Any:
        return self._safely(lambda: self._before(self._plugin, target, arguments), None)

    def after(self, target: Any, token: Any, result: Any) -> Any:
        after = self._after
        return result if after is None else self._safely(lambda: after(self._plugin, target, token, result), result)

    def failed(self, target: Any, token: Any, error: BaseException) -> None:
        start = self._plugin.start
        if start is not None:
            self._safely(lambda: start.fail(error), None)

    def _safely(self, call: Callable[[], Any], otherwise: Any) -> Any:
        if self._is_off:
            return otherwise
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the engine goes on, whatever happens to its journal
            self._is_off = True
            _log.warning("the vLLM plugin cannot record a step: %s: %s", type(error).__name__, error)
            return otherwise


def begin(mode: str, runs: str) -> Plugin:
    """Wait for vLLM's modules and wrap what they have."""
    from startup_fsm import identity

    # Children that are spawned later belong to the same run.
    identity.export_run(identity.run_id()[0])
    plugin = Plugin(mode, runs)
    Patches(_targets(plugin), plugin.lacks).install()
    return plugin


def _targets(plugin: Plugin) -> list[Target]:
    worker = {
        "init_device": _Step(plugin, _initializing, _initialized),
        "load_model": _Step(plugin, _entering("load_weights"), _loaded),
        "determine_available_memory": _Step(plugin, _entering("profile_activations"), _sized),
        "initialize_from_config": _Step(plugin, _entering("allocate_kv"), _left),
        "compile_or_warm_up_model": _Step(plugin, _entering("warmup"), _ready),
    }
    found = [Target(*_WORKER, method, around) for method, around in worker.items()]
    for runner in _RUNNERS:
        found.append(Target(*runner, "profile_cudagraph_memory", _Step(plugin, _throwing_away, _thrown_away)))
        found.append(Target(*runner, "capture_model", _Step(plugin, _capturing, _captured)))
    found.append(Target(*_ENGINE, "_initialize_kv_caches", _Step(plugin, _planning, _planned)))
    return found


def _entering(state: str) -> Callable[[Plugin, Any, Mapping[str, Any]], None]:
    def enter(plugin: Plugin, target: Any, arguments: Mapping[str, Any]) -> None:
        if plugin.start is not None:
            plugin.start.enter(state)

    return enter


def _initializing(plugin: Plugin, worker: Any, arguments: Mapping[str, Any]) -> None:
    rank = facts.attribute(worker, "rank")
    start = plugin.begun(facts.attribute(worker, "vllm_config"), rank if isinstance(rank, int) else 0)
    start.enter("init_device")


def _initialized(plugin: Plugin, worker: Any, token: Any, result: Any) -> Any:
    start = plugin.start
    if start is not None:
        index = facts.attribute(worker, "device", "index")
        start.look(index if isinstance(index, int) else 0)
        start.figures(facts.baseline(worker))
        if (runner := facts.runner_of(worker)) is not None:
            start.decide("runner", "by the module of the runner", runner=runner)
        start.leave()
    return result


def _loaded(plugin: Plugin, worker: Any, token: Any, result: Any) -> Any:
    if plugin.start is not None:
        plugin.start.figures(facts.weights(worker))
        plugin.start.leave()
    return result


def _sized(plugin: Plugin, worker: Any, token: Any, result: Any) -> Any:
    start = plugin.start
    if start is None:
        return result
    start.enter("size_kv")
    start.figures(facts.profile(worker))
    applied = facts.is_estimate_applied()
    if facts.attribute(worker, "cudagraph_memory_estimate") and applied is not None:
        start.decide(
            "graph_profile_enabled" if applied else "graph_profile_disabled", "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
        )
    if not isinstance(result, int):
        return result
    pinned = facts.attribute(worker, "cache_config", "kv_cache_memory_bytes")
    if pinned:
        start.decide("kv_pinned", "kv_cache_memory_bytes is set")
        start.figures([("kv_cache_bytes", result)])
        return result
    start.figures([("kv_available_bytes", result)])
    if plugin.mode != "enforce":
        return result
    from startup_fsm.integrations.vllm.enforcing import corrected

    wanted = corrected(start, worker, result)
    if wanted != result:
        # What vLLM prints later shall be what it did.
        worker.available_kv_cache_memory_bytes = wanted
    return wanted


def _left(plugin: Plugin, worker: Any, token: Any, result: Any) -> Any:
    if plugin.start is not None:
        config = facts.attribute(worker, "model_runner", "kv_cache_config")
        size, blocks = facts.kv_bytes(config), facts.attribute(config, "num_blocks")
        plugin.start.figures(
            (name, value)
            for name, value in (("kv_cache_bytes", size), ("gpu_blocks", blocks))
            if isinstance(value, int)
        )
        plugin.start.leave()
    return result


def _throwing_away(plugin: Plugin, runner: Any, arguments: Mapping[str, Any]) -> bool:
    start = plugin.start
    if start is None or start.state != "profile_activations" or _is_stub(runner):
        return False
    start.enter("capture_throwaway")
    return True


def _thrown_away(plugin: Plugin, runner: Any, token: Any, result: Any) -> Any:
    if token and plugin.start is not None:
        plugin.start.leave()
    return result


def _is_stub(runner: Any) -> bool:
    if ".worker.gpu.model_runner" not in type(runner).__module__:
        return False
    numbers = [int(each) for each in (facts.version() or "").split(".")[:2] if each.isdigit()]
    return len(numbers) == 2 and tuple(numbers) < _FIRST_V2_PROFILE


def _capturing(plugin: Plugin, runner: Any, arguments: Mapping[str, Any]) -> bool:
    start = plugin.start
    if start is None or start.state == "capture_throwaway":
        return False
    start.enter("capture_throwaway" if arguments.get("profile_only") else "capture_graphs")
    return True


def _captured(plugin: Plugin, runner: Any, token: Any, result: Any) -> Any:
    start = plugin.start
    if not token or start is None:
        return result
    is_real = start.state == "capture_graphs"
    if is_real and isinstance(result, int) and result:
        start.figures([("graph_actual_bytes", result)])
    start.leave()
    if is_real:
        start.enter("verify")
    return result


def _ready(plugin: Plugin, worker: Any, token: Any, result: Any) -> Any:
    start = plugin.start
    if start is None:
        return result
    shot = start.snapshot("peak")
    if shot is not None:
        # The peak of what torch held since vLLM reset it, long before the KV cache: all that came after is in it.
        outside = shot.own_bytes - shot.reserved_bytes
        start.figures([("used_peak_bytes", outside + shot.reserved_peak_bytes), ("outside_torch_bytes", outside)])
    start.finish("ready")
    return result


def _planning(plugin: Plugin, engine: Any, arguments: Mapping[str, Any]) -> bool:
    if plugin.start is not None:
        return False
    # The workers are processes of their own; this one only plans.
    start = plugin.begun(facts.attribute(engine, "vllm_config"), None)
    start.enter("size_kv")
    return True


def _planned(plugin: Plugin, engine: Any, token: Any, result: Any) -> Any:
    if token and plugin.start is not None:
        plugin.start.finish("ready")
    return result
