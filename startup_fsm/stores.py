"""The c10d store that ranks meet in, and how it is opened: torch is loaded here only when that happens."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol


class Store(Protocol):
    """What is used of a c10d store: torch's ``TCPStore``, or any other with these methods."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


def tcp_store(host: str, port: int, *, keeps: bool) -> tuple[Callable[[float], Store], Callable[[], bool]]:
    """
    How to open a store of torch at an address, and whether it turned out to live in this process.

    Where ``keeps`` is set this process makes it, unless somebody listens there already.
    """
    kept = []

    def connect(seconds: float) -> Store:
        from datetime import timedelta

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=seconds)
        if keeps:
            try:
                store: Store = TCPStore(host, port, None, is_master=True, timeout=timeout, wait_for_workers=False)
            except RuntimeError:
                pass
            else:
                kept.append(os.getpid())
                return store
        return TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)

    return lambda seconds: _within(seconds, connect), lambda: bool(kept)


def _within(seconds: float, connect: Callable[[float], Store]) -> Store:
    """Torch's store keeps to no deadline where another service answers at its address, and says nothing."""
    results: list[Store | BaseException] = []

    def run() -> None:
        try:
            results.append(connect(seconds))
        except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
            results.append(error)

    thread = threading.Thread(target=run, name="startup-fsm-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise TimeoutError("whatever answers there is no store")
    result = results[0]
    if isinstance(result, BaseException):
        raise result
    return result
