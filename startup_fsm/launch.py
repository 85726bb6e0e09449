"""Starts that the command line makes: an engine is found, taken through its plan, and what came of it is told."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from startup_fsm.bootstrap import Bootstrap
from startup_fsm.budget import Knobs
from startup_fsm.devices.base import Device
from startup_fsm.devices.choice import choose
from startup_fsm.diagnose import diagnose
from startup_fsm.engine import Engine
from startup_fsm.errors import EngineImportError, PeerFailed, RestartRequired, StartupError
from startup_fsm.fold import RunState
from startup_fsm.plan import driven
from startup_fsm.signals import signals_recorded
from startup_fsm.sources import Source
from startup_fsm.verdict import Verdict

if TYPE_CHECKING:
    from startup_fsm.engines.demonstration import Demonstration

_FACTORY_HINT: Final = "write MODULE:FACTORY, where FACTORY() returns an engine, or an engine and options for Bootstrap"


@attrs.frozen(kw_only=True)
class Outcome:
    """
    What came of a start.

    Attributes:
        verdict: By its own events.
        history: Their fold.
        path: Of the journal; None where it could not be written or was not asked for.
        is_interrupted: Whether the keyboard ended it.
        by_peer: Whether another rank ended it.
        in_short: All that this rank has to say, where another one says the rest; None where it says it all itself.
        restart: Why only a new process can go on; None where one cannot, or none is needed.
    """

    verdict: Verdict
    history: RunState
    path: str | None
    is_interrupted: bool = False
    by_peer: bool = False
    in_short: str | None = None
    restart: str | None = None


def start(boot: Bootstrap, engine: Engine) -> Outcome:
    """
    Take an engine through its plan; a failure of the start is part of the outcome, not an exception.

    Raises:
        StartupError: The start was refused before its first state.
    """
    is_interrupted, failure = False, None
    # The command line leaves it off for verbs that only read.
    gc.enable()
    with signals_recorded(boot):
        try:
            boot.run(engine)
        except KeyboardInterrupt:
            is_interrupted = True
        except Exception as error:
            failure = error
            if boot.history.current is None:
                raise
            if not isinstance(error, StartupError) and boot.history.position == "open":
                # Nothing recorded it: this is a fault of ours, which must not pass for one of the engine.
                raise
        finally:
            boot.close()
    writer = boot.recorder.writer
    path = None if writer is None or writer.trouble else str(writer.path)
    verdict = diagnose([Source(run=boot.history)], origin=path)
    by_peer = isinstance(failure, PeerFailed) or bool(boot.history.peer_failures)
    needs_process = isinstance(failure, RestartRequired) or (isinstance(failure, PeerFailed) and failure.restart)
    return Outcome(
        verdict=verdict,
        history=boot.history,
        path=path,
        is_interrupted=is_interrupted,
        by_peer=by_peer,
        in_short=_in_short(boot, verdict),
        restart=failure.message if needs_process and isinstance(failure, StartupError) else None,
    )


def _in_short(boot: Bootstrap, verdict: Verdict) -> str | None:
    """Of many ranks rank 0 tells all of it, and those that failed for a reason of their own."""
    peers = boot.history.peer_failures
    if boot.meetings.is_alone or boot.recorder.rank == 0 or not (peers or verdict.outcome == "ready"):
        return None
    where = f"rank {boot.recorder.rank}: {verdict.outcome}"
    return where if not peers else f"{where}: {peers[0][1].peer} failed in {peers[0][1].state or 'no state'}"


def made(target: str, device: str | None = None) -> tuple[Engine, dict[str, Any]]:
    """
    The engine that ``MODULE:FACTORY`` makes, and the options for ``Bootstrap``: its own, and the device by name.

    A factory with a parameter ``device`` gets the device of this start, by that name or the one at hand.

    Raises:
        EngineImportError: It cannot be imported, cannot be called, or returns something else.
    """
    module_name, _, factory_name = target.partition(":")
    if not module_name or not factory_name:
        raise EngineImportError(f"{target!r} is no MODULE:FACTORY", hint=_FACTORY_HINT)
    here = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        text = f"{module_name} cannot be imported: {_said(error)}"
        raise EngineImportError(text, hint=f"modules are looked for in {here} and where Python has its own") from error
    for name in factory_name.split("."):
        if not hasattr(found, name):
            raise EngineImportError(f"{target}: {module_name} has no {factory_name}", hint=_FACTORY_HINT)
        found = getattr(found, name)
    if not callable(found):
        text = f"{target} is no function: it is {type(found).__name__}"
        raise EngineImportError(text, hint=_FACTORY_HINT)
    given: dict[str, Any] = {"device": _chosen(device or "auto")} if _takes_device(found) else {}
    try:
        returned = found(**given)
    except Exception as error:
        raise EngineImportError(f"{target}() raised {_said(error)}", hint=_frame(error)) from error
    engine, options = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    _check(target, engine, options)
    by_name = {} if device is None or given else {"device": device}
    return engine, given | dict(options) | by_name


def _chosen(device: str) -> Device:
    try:
        return choose(device)
    except (RuntimeError, ValueError) as error:
        text, _, hint = str(error).partition("\nhint: ")
        raise EngineImportError(text, hint=hint or None) from error


def _takes_device(factory: Callable[..., Any]) -> bool:
    """Whether it has a parameter of that name to be filled: none that it has a value of its own for."""
    try:
        # What a decorator takes is what counts, not what it wraps.
        parameter = inspect.signature(factory, follow_wrapped=False).parameters.get("device")
    except (TypeError, ValueError):
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return parameter is not None and parameter.kind in by_name and parameter.default in (inspect.Parameter.empty, None)


def _check(target: str, engine: object, options: object) -> None:
    methods = [name for name in vars(Engine) if not name.startswith("_") and callable(getattr(Engine, name))]
    missing = [name for name in methods if not callable(getattr(engine, name, None))]
    if missing:
        text = f"{target}() returned {type(engine).__name__}, which has no {', '.join(missing)}"
        raise EngineImportError(text, hint=_FACTORY_HINT)
    if not isinstance(options, Mapping):
        text = f"{target}() returned options that are {type(options).__name__}, not a mapping"
        raise EngineImportError(text, hint=_FACTORY_HINT)


def bootstrap_for(
    target: str,
    options: Mapping[str, Any],
    *,
    plan: str | None = None,
    journal: str,
    mirror: bool,
    **knobs: Any,
) -> Bootstrap:
    """
    A start with the options of a factory; what is not None here wins over them.

    Raises:
        EngineImportError: An option does not exist, or has a value that cannot be.
        PlanError: There is no plan of that name to drive an engine through.
    """
    given = {name: value for name, value in knobs.items() if value is not None}
    chosen: dict[str, Any] = {"journal": journal, "mirror": mirror} | dict(options)
    try:
        if given:
            chosen["knobs"] = _with(chosen.get("knobs") or Knobs(), given)
        if plan is not None:
            kept = chosen.get("knobs") or Knobs()
            chosen["plan"] = driven(
                plan, retries=kept.retries, allow_eager=kept.allow_eager, fewer_sizes=kept.fewer_sizes
            )
        return Bootstrap(**chosen)
    except StartupError:
        raise
    except (TypeError, ValueError, attrs.exceptions.NotAnAttrsClassError) as error:
        raise EngineImportError(f"{target}: {_said(error)}", hint=_FACTORY_HINT) from error


def _with(knobs: Knobs, given: Mapping[str, Any]) -> Knobs:
    # Explicit bytes of the factory would win over a share that was typed.
    instead: dict[str, Any] = {"requested_bytes": None} if "utilization" in given else {}
    try:
        return attrs.evolve(knobs, **(instead | dict(given)))
    except ValueError as error:
        raise StartupError(str(error), hint="startup-fsm run --help") from None


def check_device(name: str | None) -> None:
    """
    Refuse a device that does not exist.

    Raises:
        StartupError: It has none of that name.
    """
    if name not in (None, "auto", "sim", "cuda"):
        raise StartupError(f"device: {name!r} is none of auto, sim, cuda", hint="--device sim needs no GPU")


def estimate_from(text: str | None) -> str | int | None:
    """
    What to reserve for graphs: ``measure``, ``none``, or bytes.

    Raises:
        StartupError: It is neither.
    """
    if text is None or text in ("measure", "none"):
        return text
    if not text.isdecimal():
        raise StartupError(f"graph_estimate: {text!r} is none of measure, none, BYTES", hint="bytes are plain digits")
    return int(text)


def sizes_from(text: str | None) -> list[int] | None:
    """
    Batch sizes with commas between them.

    Raises:
        StartupError: One of them is no number.
    """
    if text is None:
        return None
    try:
        return [int(each) for each in text.split(",") if each.strip()]
    except ValueError:
        raise StartupError(f"capture_sizes: {text!r} are no sizes", hint="write them as 1,2,4,8") from None


def demonstration(**given: Any) -> Demonstration:
    """
    The parts of a start of the reference engine.

    Raises:
        StartupError: torch is missing, or something given cannot be.
    """
    from startup_fsm.engines.demonstration import assemble

    try:
        return assemble(**given)
    except StartupError:
        raise
    except ModuleNotFoundError as error:
        text = f"the reference engine needs {error.name}, which is not installed"
        raise StartupError(text, hint="pip install 'startup-fsm[torch]'") from error
    except (ValueError, OSError, RuntimeError) as error:
        text, _, hint = str(error).partition("\nhint: ")
        raise StartupError(text, hint=hint or "startup-fsm demo --help") from error


def bootstrap_of(parts: Demonstration, *, runs: str, mirror: bool) -> Bootstrap:
    """The start of a demonstration."""
    return Bootstrap(
        plan=parts.plan, journal=runs, device=parts.device, knobs=parts.knobs, hooks=parts.hooks, mirror=mirror
    )


def generated(parts: Demonstration) -> list[list[int]] | None:
    """A few tokens of the engine that was started; None where its tensors have no values."""
    if parts.fake:
        return None
    prompts = [[1, 2, 3], [5, 8]]
    answers = parts.engine.generate(prompts, max_new_tokens=8)
    return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]


def _said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _frame(error: BaseException) -> str | None:
    """Where an exception came from: the innermost line, for a hint."""
    from startup_fsm.stacks import stack_lines

    lines = () if error.__traceback__ is None else stack_lines(error.__traceback__)
    return f"it came from {lines[-1]}" if lines else None
