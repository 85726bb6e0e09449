"""
Looks at the live process that checks cannot take: who holds a storage, and what only garbage still holds.

Results are raw facts for the journal.

torch is looked up, never imported: where it is not loaded, nothing can hold a tensor.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import attrs

_DEPTH: Final = 8
_BREADTH: Final = 2_000
_OLDEST: Final = 2
#: How long another thread's collection is waited for, and how often it is looked at, in seconds.
_OTHER_S: Final = 2.0
_AGAIN_S: Final = 0.002
_HEAP: Final = threading.RLock()
#: What waits in the middle of a function, and where its frame is.
_SUSPENDED: Final[dict[type, str]] = {
    types.GeneratorType: "gi_frame",
    types.CoroutineType: "cr_frame",
    types.AsyncGeneratorType: "ag_frame",
}


@attrs.frozen
class Holder:
    """
    What keeps a storage alive.

    Attributes:
        path: From a module, an attribute, a closure or a frame down to the tensor.
        kind: ``attribute``, ``closure``, ``partial``, ``frame``, ``module`` or ``unknown``.
        bytes: Size of the tensor that was found; 0 for a graph.
    """

    path: str
    kind: str
    bytes: int


def collect_garbage(*, thaw: bool = False) -> None:
    """
    Collect garbage, and again where there was some: what a finalizer dropped is garbage only then.

    Args:
        thaw: Collect what an engine froze, too; it is frozen again.
    """
    with _alone(), _thawed() if thaw else nullcontext():
        if _collected():
            _collected()


@contextmanager
def _thawed() -> Iterator[None]:
    """``gc.freeze`` hides objects from the collector and from whoever asks it; what was frozen is frozen again."""
    was_frozen = gc.get_freeze_count() > 0
    if was_frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        if was_frozen:
            gc.freeze()


@contextmanager
def _alone() -> Iterator[None]:
    """
    Of several starts in one process, one at a time: a list of all objects keeps alive what another one has dropped.

    Whoever waits goes on after a while: a child that was forked meanwhile has a lock that nobody gives back.
    """
    mine = _HEAP.acquire(timeout=_OTHER_S)
    try:
        yield
    finally:
        if mine:
            _HEAP.release()


def _collected() -> int:
    """
    Objects that one full collection found.

    While another thread collects, ``gc.collect`` returns at once and has done nothing: then it is called again.
    """
    thread, begun = threading.get_ident(), []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == thread and info["generation"] == _OLDEST:
            begun.append(True)

    gc.callbacks.append(note)
    try:
        until = time.monotonic() + _OTHER_S
        while True:
            found = gc.collect()
            if begun or time.monotonic() > until:
                return found
            time.sleep(_AGAIN_S)
    finally:
        gc.callbacks.remove(note)


def tensors() -> Iterator[Any]:
    """Every live Python tensor that is not frozen."""
    torch = sys.modules.get("torch")
    return iter(()) if torch is None else _alive(torch.Tensor)


def graphs() -> Iterator[Any]:
    """Every live CUDA graph that torch captured, whoever asked for it, and that is not frozen."""
    torch = sys.modules.get("torch")
    return iter(()) if torch is None else _alive(torch.cuda.CUDAGraph)


def _alive(kind: type) -> Iterator[Any]:
    for thing in gc.get_objects():
        # ``type()`` touches no attribute of a foreign object; a lazy module's __getattr__ may do anything.
        if issubclass(type(thing), kind):
            yield thing


def holders(lives_in: Callable[[Any], bool], *, most: int = 8) -> list[Holder]:
    """
    Name what holds the tensors for which ``lives_in`` is true, else the graphs, at most ``most`` of them.

    An empty list with the pool still alive means that C++ holds it: a workspace, an autograd graph, a static registry.
    """
    with _alone(), _thawed():
        found = _found(tensors(), lives_in, most)
        # A base whose only owner is a view of it has no Python owner; the view is the one to name.
        named = [holder for holder in found if holder.kind != "unknown"]
        return named or _found(graphs(), lives_in, most) or found


def _found(things: Iterator[Any], lives_in: Callable[[Any], bool], most: int) -> list[Holder]:
    found: list[Holder] = []
    for thing in things:
        if len(found) >= most:
            break
        try:
            if not lives_in(thing):
                continue
            size = int(thing.untyped_storage().nbytes()) if hasattr(type(thing), "untyped_storage") else 0
        except (RuntimeError, NotImplementedError):
            continue
        path, kind = owner_of(thing)
        found.append(Holder(path, kind, size))
    return found


def any_graph(lives_in: Callable[[Any], bool]) -> bool:
    """Whether a live CUDA graph is one for which ``lives_in`` is true; what is only garbage counts."""
    with _alone(), _thawed():
        return any(lives_in(graph) for graph in graphs())


def owner_of(thing: object) -> tuple[str, str]:
    """The shortest chain of owners from a name that people know down to ``thing``, and its kind."""
    own = {id(sys._getframe())}  # noqa: SLF001 - our own frame refers to what we look for
    queue: list[tuple[object, str]] = [(thing, "")]
    passed: list[tuple[object, str]] = []
    seen = {id(thing), id(queue)}
    for _ in range(_DEPTH):
        following: list[tuple[object, str]] = []
        seen |= {id(following), id(passed)}
        passed += queue
        for target, below in queue[:_BREADTH]:
            referrers = gc.get_referrers(target)
            seen.add(id(referrers))
            for referrer in sorted(referrers, key=_preference):
                if id(referrer) in seen or id(referrer) in own or _is_ours(referrer):
                    continue
                seen.add(id(referrer))
                named = _named(referrer, target, below)
                if named is not None:
                    return named
                step = _step(referrer, target)
                if step is not None:
                    following.append((referrer, step + below))
        queue = following
    return _running_frame(passed) or ("no Python owner found", "unknown")


def _running_frame(passed: list[tuple[object, str]]) -> tuple[str, str] | None:
    """The local variable of a running function: the collector does not know frames that are still on the stack."""
    known = {id(thing): below for thing, below in passed}
    for top in sys._current_frames().values():  # noqa: SLF001 - the only way to other threads' frames
        frame: types.FrameType | None = top
        while frame is not None:
            if not _is_ours(frame):
                for name, value in frame.f_locals.items():
                    if id(value) in known:
                        where = f"{frame.f_code.co_qualname} (line {frame.f_lineno})"
                        return f"local {name} in {where}{known[id(value)]}", "frame"
            frame = frame.f_back
    return None


def _preference(referrer: object) -> int:
    """Names that people know first, frames last: a frame often only passes a value on."""
    return 2 if isinstance(referrer, types.FrameType) else 1 if isinstance(referrer, types.CellType) else 0


def _is_ours(referrer: object) -> bool:
    # Frames of this module and of the iterator above hold the tensor only because we look.
    suspended = _SUSPENDED.get(type(referrer))
    frame = referrer if suspended is None else getattr(referrer, suspended)
    return isinstance(frame, types.FrameType) and frame.f_code.co_filename == __file__


def _key_of(mapping: dict[Any, Any], target: object) -> str | None:
    for key, value in list(mapping.items()):
        if value is target:
            return str(key)
    return None


def _named(referrer: object, target: object, below: str) -> tuple[str, str] | None:
    """A final answer when ``referrer`` has a name of its own; None when the search must go on."""
    suspended = _SUSPENDED.get(type(referrer))
    if suspended is not None:
        referrer = getattr(referrer, suspended)
    if isinstance(referrer, types.FrameType):
        names = [name for name, value in referrer.f_locals.items() if value is target]
        where = f"{referrer.f_code.co_qualname} (line {referrer.f_lineno})"
        return (f"local {names[0]} in {where}{below}", "frame") if names else None
    if isinstance(referrer, functools.partial):
        return f"functools.partial of {getattr(referrer.func, '__qualname__', referrer.func)}{below}", "partial"
    if isinstance(referrer, types.FunctionType):
        return f"closure of {referrer.__module__}.{referrer.__qualname__}{below}", "closure"
    if isinstance(referrer, dict):
        return _named_mapping(referrer, target, below)
    if isinstance(referrer, (list, tuple, set, frozenset, types.CellType, types.MethodType)) or _is_tensor(referrer):
        return None
    attributes = getattr(referrer, "__dict__", None)
    key = _key_of(attributes, target) if isinstance(attributes, dict) else _slot_of(referrer, target)
    return None if key is None else (f"{_type_name(referrer)}.{key}{below}", "attribute")


def _named_mapping(mapping: dict[Any, Any], target: object, below: str) -> tuple[str, str] | None:
    name = mapping.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and vars(module) is mapping:
        return f"{name}.{_key_of(mapping, target)}{below}", "module"
    owner = _instance_of(mapping)
    return None if owner is None else (f"{_type_name(owner)}.{_key_of(mapping, target)}{below}", "attribute")


def _slot_of(referrer: object, target: object) -> str | None:
    for kind in type(referrer).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                if object.__getattribute__(referrer, name) is target:
                    return str(name)
            except AttributeError:
                continue
    return None


def _step(referrer: object, target: object) -> str | None:
    """How ``referrer`` reaches ``target``, for containers without a name; None where the search ends."""
    if isinstance(referrer, dict):
        return f"[{_key_of(referrer, target)!r}]"
    if isinstance(referrer, (list, tuple)):
        index = next((at for at, value in enumerate(referrer) if value is target), None)
        return "[...]" if index is None else f"[{index}]"
    if isinstance(referrer, (set, frozenset, types.CellType, types.MethodType)):
        return ""
    return "" if _is_tensor(referrer) else None


def _instance_of(attributes: dict[Any, Any]) -> object | None:
    """The object whose ``__dict__`` this is, or None for a plain dict."""
    owner: object
    for owner in gc.get_referrers(attributes):
        if isinstance(owner, (types.FrameType, dict, list, tuple)):
            continue
        try:
            if object.__getattribute__(owner, "__dict__") is attributes:
                return owner
        except AttributeError:
            continue
    return None


def _is_tensor(thing: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(thing), torch.Tensor)


def _type_name(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
