"""Probes: whoever keeps a tensor alive is named, wherever it hides."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from startup_fsm import probes
from startup_fsm.probes import Holder, holders, owner_of

torch = pytest.importorskip("torch")


BYTES = 4 * 1024


class Module:
    """Somebody's layer."""

    def method(self) -> None:
        """Bound below."""


class Slotted:
    __slots__ = ("cache",)


class Inherited(Slotted):
    __slots__ = ("other",)


def tensor() -> Any:
    """A tensor of 4 KiB that nothing else holds."""
    return torch.zeros(1024)


def found_by(make: Callable[[], Any]) -> tuple[str, str]:
    """How the only holder of a fresh tensor is named; what ``make`` returns stays alive meanwhile."""
    keep, address = make()
    found = holders(lambda each: each.data_ptr() == address)
    assert keep is not None
    (holder,) = found
    assert holder.bytes == BYTES
    return holder.path, holder.kind


def put(keep: Any, place: Callable[[Any], None]) -> Callable[[], Any]:
    """A maker: the tensor is placed somewhere inside ``keep`` and forgotten here."""

    def make() -> Any:
        fresh = tensor()
        place(fresh)
        return keep, fresh.data_ptr()

    return make


def test_an_attribute_is_named() -> None:
    """Class and attribute."""
    module = Module()
    path, kind = found_by(put(module, lambda fresh: setattr(module, "kv_cache", fresh)))
    assert path.endswith("Module.kv_cache")
    assert kind == "attribute"


def test_a_list_in_an_attribute_is_named_with_its_index() -> None:
    """The way goes on through containers."""
    module = Module()
    module.caches = [None, None]  # type: ignore[attr-defined]
    path, kind = found_by(put(module, module.caches.append))  # type: ignore[attr-defined]
    assert path.endswith("Module.caches[2]")
    assert kind == "attribute"


def test_a_dict_in_an_attribute_is_named_with_its_key() -> None:
    """Also nested ones."""
    module = Module()
    module.layers = {"layer.3": {}}  # type: ignore[attr-defined]
    path, kind = found_by(put(module, lambda fresh: module.layers["layer.3"].update(key=fresh)))  # type: ignore[attr-defined]
    assert path.endswith("Module.layers['layer.3']['key']")
    assert kind == "attribute"


def test_a_tuple_and_a_set_are_gone_through() -> None:
    """A tuple has an index, a set has none."""
    module = Module()
    path, _ = found_by(put(module, lambda fresh: setattr(module, "pair", (1, fresh))))
    assert path.endswith("Module.pair[1]")
    other = Module()
    path, _ = found_by(put(other, lambda fresh: setattr(other, "seen", {fresh})))
    assert path.endswith("Module.seen")


def test_a_slot_is_named() -> None:
    """Objects without a dict, and slots of a base class."""
    for kind_of in (Slotted, Inherited):
        slotted = kind_of()
        path, kind = found_by(put(slotted, lambda fresh, into=slotted: setattr(into, "cache", fresh)))
        assert path.endswith(f"{kind_of.__name__}.cache")
        assert kind == "attribute"


def test_a_closure_is_named() -> None:
    """The function that closed over it."""

    def make() -> Any:
        fresh = tensor()

        def hook() -> Any:
            return fresh

        return hook, fresh.data_ptr()

    path, kind = found_by(make)
    assert "test_a_closure_is_named" in path
    assert path.endswith("hook[0]")
    assert kind == "closure"


def test_a_partial_is_named() -> None:
    """The function of the partial."""

    def make() -> Any:
        fresh = tensor()
        return functools.partial(Module.method, fresh), fresh.data_ptr()

    path, kind = found_by(make)
    assert path == "functools.partial of Module.method[0]"
    assert kind == "partial"


def test_a_default_argument_is_named() -> None:
    """Functions keep their defaults."""

    def make() -> Any:
        fresh = tensor()

        def forward(cache: Any = fresh) -> Any:
            return cache

        address = fresh.data_ptr()
        del fresh
        return forward, address

    path, kind = found_by(make)
    assert "forward" in path
    assert kind == "closure"


def test_a_local_of_a_running_function_is_named_with_its_line() -> None:
    """Here, and on another thread."""
    cache = tensor()
    address = cache.data_ptr()
    (holder,) = holders(lambda each: each.data_ptr() == address)
    assert holder.kind == "frame"
    assert holder.path.startswith("local cache in test_a_local_of_a_running_function")
    assert "(line " in holder.path


def test_a_local_on_another_thread_is_named() -> None:
    """A worker that never came back."""
    ready, release = threading.Event(), threading.Event()
    addresses = []

    def work() -> None:
        held = tensor()
        addresses.append(held.data_ptr())
        ready.set()
        release.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        (holder,) = holders(lambda each: each.data_ptr() == addresses[0])
    finally:
        release.set()
        thread.join()
    assert "local held in" in holder.path
    assert "work" in holder.path


def test_a_generator_that_is_not_running_is_named() -> None:
    """A suspended frame keeps its locals."""

    def steps() -> Iterator[int]:
        scratch = tensor()
        yield scratch.data_ptr()
        yield int(scratch[0])

    generator = steps()
    address = next(generator)
    (holder,) = holders(lambda each: each.data_ptr() == address)
    assert "steps" in holder.path
    assert holder.kind == "frame"
    generator.close()


def test_a_coroutine_that_waits_is_named() -> None:
    """The same for asynchronous code."""

    @types.coroutine
    def pause() -> Iterator[None]:
        yield

    async def serve() -> None:
        scratch = tensor()
        addresses.append(scratch.data_ptr())
        await pause()  # type: ignore[misc]
        print(scratch)

    addresses: list[int] = []
    waiting = serve()
    waiting.send(None)
    (holder,) = holders(lambda each: each.data_ptr() == addresses[0])
    waiting.close()
    assert holder.path.startswith("local scratch in test_a_coroutine_that_waits_is_named.<locals>.serve (line ")


def test_a_module_global_is_named() -> None:
    """The module and the name in it."""
    module = types.ModuleType("somebodys_module")
    sys.modules["somebodys_module"] = module
    try:
        path, kind = found_by(put(module, lambda fresh: setattr(module, "_STATIC_CACHE", fresh)))
        assert path == "somebodys_module._STATIC_CACHE"
        assert kind == "module"
        path, kind = found_by(put(module, lambda fresh: setattr(module, "CACHES", {"a": [fresh]})))
        assert path == "somebodys_module.CACHES['a'][0]"
    finally:
        del sys.modules["somebodys_module"]


def test_a_parameter_of_a_real_module_is_named() -> None:
    """torch.nn.Module keeps parameters and buffers in dicts of its own."""
    layer = torch.nn.Linear(32, 32, bias=False)
    address = layer.weight.data_ptr()
    (holder,) = [each for each in holders(lambda each: each.data_ptr() == address) if each.kind != "frame"]
    assert holder.path.endswith("Linear._parameters['weight']")
    buffered = torch.nn.Module()
    buffered.register_buffer("kv", tensor())
    address = buffered.kv.data_ptr()
    (holder,) = [each for each in holders(lambda each: each.data_ptr() == address) if each.kind != "frame"]
    assert holder.path.endswith("Module._buffers['kv']")


def test_a_view_is_named_instead_of_its_base() -> None:
    """A strided view keeps the whole storage; the base without an owner is left out."""
    module = Module()

    def make() -> Any:
        base = tensor()
        module.view = base[::2]  # type: ignore[attr-defined]
        return module, base.data_ptr()

    path, kind = found_by(make)
    assert path.endswith("Module.view")
    assert kind == "attribute"


def test_a_frozen_heap_is_thawed() -> None:
    """gc.freeze hides objects from the collector, and from us; so it is thawed first."""
    module = Module()
    module.cache = tensor()  # type: ignore[attr-defined]
    address = module.cache.data_ptr()  # type: ignore[attr-defined]
    gc.freeze()
    try:
        (holder,) = holders(lambda each: each.data_ptr() == address)
    finally:
        gc.unfreeze()
    assert holder.path.endswith("Module.cache")


def test_nothing_is_found_where_nothing_is() -> None:
    """No tensor, no holder."""
    assert holders(lambda _: False) == []


def test_at_most_so_many_are_named() -> None:
    """A leak of a thousand blocks is told by a few."""
    module = Module()
    module.many = [tensor() for _ in range(20)]  # type: ignore[attr-defined]
    addresses = {each.data_ptr() for each in module.many}  # type: ignore[attr-defined]
    found = holders(lambda each: each.data_ptr() in addresses, most=3)
    assert len(found) == 3
    assert all(isinstance(each, Holder) for each in found)


def test_tensors_that_refuse_a_question_are_passed_over() -> None:
    """A test that raises, as for a tensor without storage, does not end the search."""
    module = Module()
    module.cache = tensor()  # type: ignore[attr-defined]
    module.meta = torch.zeros(3, device="meta")  # type: ignore[attr-defined]
    address = module.cache.data_ptr()  # type: ignore[attr-defined]

    def lives_here(each: Any) -> bool:
        if each.device.type == "meta":
            raise NotImplementedError
        return bool(each.data_ptr() == address)

    (holder,) = holders(lives_here)
    assert holder.path.endswith("Module.cache")


def test_objects_with_a_hostile_getattr_are_not_asked() -> None:
    """Looking at the heap calls no code of somebody else."""

    class Trap:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = None  # type: ignore[assignment]

    trap = Trap()
    fresh = tensor()
    vars(trap)["cache"] = fresh
    address = fresh.data_ptr()
    del fresh
    (holder,) = holders(lambda each: each.data_ptr() == address)
    assert holder.path.endswith("Trap.cache")


def test_without_torch_nothing_can_hold_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is looked up, never imported."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    assert list(probes.tensors()) == []
    assert holders(lambda _: True) == []


def test_plain_objects_have_owners_too() -> None:
    """The chain is found for anything."""
    module = Module()
    module.box = [object()]  # type: ignore[attr-defined]
    path, _ = owner_of(module.box)  # type: ignore[attr-defined]
    assert path.endswith("Module.box")


class Cycle:
    """Garbage as soon as its name is gone; its end may take a while."""

    def __init__(self, ending: Callable[[], object] = lambda: None) -> None:
        self.own, self.ending = self, ending

    def __del__(self) -> None:
        self.ending()


class Elsewhere:
    """Another thread that comes into the middle of its work, and stays there for a moment more."""

    def __init__(self) -> None:
        self._begun, self._over = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        self._over.wait(10)

    @contextmanager
    def inside(self, work: Callable[[], object]) -> Iterator[Callable[[], None]]:
        """The body runs meanwhile; what it gets lets the other go on soon."""
        thread = threading.Thread(target=work)
        thread.start()
        assert self._begun.wait(10)
        yield threading.Timer(0.2, self._over.set).start
        thread.join()


def test_garbage_is_collected_while_another_thread_collects() -> None:
    """A collection that returned at once because one was under way is made again."""
    elsewhere = Elsewhere()
    Cycle(elsewhere)
    with elsewhere.inside(gc.collect) as go_on:
        gone = weakref.ref(Cycle())
        gc.collect()
        assert gone() is not None
        go_on()
        probes.collect_garbage()
        assert gone() is None


def test_a_look_at_the_heap_keeps_nothing_alive_for_others() -> None:
    """Whoever settles on another thread waits until the list of all objects is gone."""
    elsewhere, fresh = Elsewhere(), tensor()
    address = fresh.data_ptr()

    def lives_here(each: Any) -> bool:
        if each.data_ptr() == address:
            elsewhere()
        return False

    with elsewhere.inside(lambda: holders(lives_here)) as go_on:
        gone = weakref.ref(fresh)
        del fresh
        assert gone() is not None
        go_on()
        probes.collect_garbage()
        assert gone() is None


def test_what_an_engine_froze_is_collected_and_frozen_again() -> None:
    """Only where that is asked for."""
    gone = weakref.ref(Cycle())
    gc.freeze()
    try:
        probes.collect_garbage()
        assert gone() is not None
        probes.collect_garbage(thaw=True)
        assert gone() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
