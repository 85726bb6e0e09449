"""
Methods of classes wrapped when their modules are imported, and nothing imported for it.

A general plugin runs before the worker's modules are loaded, and in processes that never load them. So a finder waits
for the modules by name, and wraps right after each is executed. A name that a version lacks is reported, never raised.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Final, Protocol

import attrs

#: Marks a method that is wrapped already.
_MARK: Final = "__startup_fsm__"


class Around(Protocol):
    """What happens around one call of a method; it must not raise."""

    def before(self, target: Any, arguments: Mapping[str, Any]) -> Any:
        """Before the call; what it returns is handed on."""

    def after(self, target: Any, token: Any, result: Any) -> Any:
        """After it returned; gives the result that the caller gets."""

    def failed(self, target: Any, token: Any, error: BaseException) -> None:
        """After it raised; the exception goes on as it is."""


@attrs.frozen
class Target:
    """
    A method to be wrapped.

    Attributes:
        module, owner, method: Where it is.
        around: What is done around it.
    """

    module: str
    owner: str
    method: str
    around: Around


class _Loader(importlib.abc.Loader):
    """The loader of a module, and what is done after it."""

    def __init__(self, inner: importlib.abc.Loader, done: Callable[[ModuleType], None]) -> None:
        self._inner = inner
        self._done = done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        self._done(module)

    def __getattr__(self, name: str) -> Any:
        # Tools ask a loader for sources and files.
        return getattr(self._inner, name)


class Patches(importlib.abc.MetaPathFinder):
    """
    Waits for modules and wraps their methods.

    Args:
        targets: Which.
        missing: Called with module, owner and method of a name that is not there.
    """

    def __init__(self, targets: Sequence[Target], missing: Callable[[Target], None]) -> None:
        self._targets: dict[str, list[Target]] = {}
        for target in targets:
            self._targets.setdefault(target.module, []).append(target)
        self._missing = missing

    def install(self) -> None:
        """From now on; what is imported already is wrapped at once."""
        for name in self._targets:
            module = sys.modules.get(name)
            if module is not None and getattr(module.__spec__, "_initializing", False) is False:
                self._wrap(module)
        sys.meta_path.insert(0, self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the others find, with a loader of ours around theirs."""
        if fullname not in self._targets:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._wrap)
                return spec
        return None

    def _wrap(self, module: ModuleType) -> None:
        for target in self._targets.get(module.__name__, ()):
            owner = getattr(module, target.owner, None)
            method = None if owner is None else owner.__dict__.get(target.method)
            if method is None or not callable(method):
                self._missing(target)
            elif not hasattr(method, _MARK):
                setattr(owner, target.method, _wrapped(method, target.around))


def _wrapped(method: Callable[..., Any], around: Around) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        token = around.before(target, kwargs)
        try:
            result = method(target, *args, **kwargs)
        except BaseException as error:
            around.failed(target, token, error)
            raise
        return around.after(target, token, result)

    setattr(call, _MARK, True)
    return call
