"""Where the bytes of a logged start were, as far as it printed them; only what is known, each with its source."""

from __future__ import annotations

from typing import Final

import attrs

from startup_fsm.logged.facts import snapshot_of
from startup_fsm.logged.sizing import foreign_bytes, kv_bytes_of
from startup_fsm.logged.start import Start
from startup_fsm.memory import MIB, Account, accounts


@attrs.frozen(kw_only=True)
class Ledger:
    """
    Accounts, and what they leave over.

    Attributes:
        accounts: In the order of a start.
        unexplained_bytes: The total less all of them; None where the total or what is free was not printed.
    """

    accounts: tuple[Account, ...] = ()
    unexplained_bytes: int | None = None


def ledger(start: Start) -> Ledger:
    """The ledger of a start: its last snapshot, else its out-of-memory sentence, else the engine's own terms."""
    last = snapshot_of(start.facts)
    if last is not None:
        return Ledger(accounts=accounts(last), unexplained_bytes=last.unexplained_bytes)
    at_failure = _by_sentence(start)
    return _by_terms(start) if at_failure is None else at_failure


def _by_sentence(start: Start) -> Ledger | None:
    total, own, free = (start.size(name) for name in ("total_bytes", "process_bytes", "oom_free_bytes"))
    allocated = start.size("torch_allocated_bytes")
    reserved = start.size("torch_reserved_bytes")
    if total is None or free is None or allocated is None or (own is None and reserved is None):
        return None
    source, rest = "torch's sentence", "torch's sentence, what is left"
    idle = start.size("torch_reserved_unallocated_bytes")
    if idle is None:
        idle = 0 if reserved is None else reserved - allocated
    graphs = start.size("graph_private_pool_bytes") or 0
    rows = [
        *_inside(start, allocated - graphs),
        Account(account="torch, pools of graphs", bytes=graphs, source=source),
        Account(account="torch, reserved and not allocated", bytes=idle, source=source),
    ]
    if own is None:
        others = total - free - allocated - idle
        rows.append(Account(account="outside torch, and other processes", bytes=others, source=rest))
    else:
        rows.append(Account(account="this process outside torch", bytes=own - allocated - idle, source=rest))
        others = foreign_bytes(start.facts) or 0
        if others > _PRINTED:
            rows.append(Account(account="other processes", bytes=others, source=rest))
    rows.append(Account(account="free", bytes=free, source=source))
    rows = [row for row in rows if row.bytes]
    return Ledger(accounts=tuple(rows), unexplained_bytes=total - sum(row.bytes for row in rows))


def _inside(start: Start, allocated: int) -> list[Account]:
    """What torch had given out, in weights, KV cache and the rest, where they were printed and fit into it."""
    named = {
        "weights": start.size("weights_bytes"),
        "KV cache": start.size("kv_cache_bytes") or _sized(start),
    }
    known = {name: size for name, size in named.items() if size is not None and size > 0}
    if sum(known.values()) > allocated:
        known = {}
    rows = [Account(account=name, bytes=size, source="the engine") for name, size in known.items()]
    rest = allocated - sum(known.values())
    return [*rows, Account(account="torch, everything else", bytes=rest, source="torch's sentence")]


def _sized(start: Start) -> int | None:
    is_allocated = start.ending.state in ("warmup", "capture_graphs", "verify", "serving", None)
    return start.size("kv_available_bytes") if is_allocated else None


def _by_terms(start: Start) -> Ledger:
    facts = start.facts
    total, first = start.size("total_bytes"), start.size("free_at_start_bytes")
    rows: list[Account] = []
    if total is not None and first is not None:
        rows.append(Account(account="before the engine looked first", bytes=total - first, source="total less free"))
    for name, account in _TERMS.items():
        if (size := start.size(name)) is not None:
            source = "inferred" if name in facts.inferred else "the engine"
            rows.append(Account(account=account, bytes=size, source=source))
    is_sized = start.ending.state not in ("init_device", "load_weights", "profile_activations", "size_kv")
    kv_bytes = kv_bytes_of(facts) if start.is_ready or is_sized else None
    if kv_bytes is not None:
        rows.append(Account(account="KV cache", bytes=kv_bytes, source="the engine"))
    graphs = start.size("graph_actual_bytes")
    if graphs is not None:
        rows.append(Account(account="graphs", bytes=graphs, source="the engine"))
    free = _free(start)
    if free is None:
        return Ledger(accounts=tuple(rows))
    rows.append(Account(account="free", bytes=free, source="the engine"))
    # A remainder of which the weights or the cache are a part explains nothing.
    has_weights = {"weights", "weights and outside torch"} & {row.account for row in rows}
    over = (
        total - sum(row.bytes for row in rows) if total is not None and has_weights and kv_bytes is not None else None
    )
    return Ledger(accounts=tuple(rows), unexplained_bytes=over)


def _free(start: Start) -> int | None:
    """What was free at the last edge that printed it."""
    names = (
        "oom_free_bytes",
        "avail_final_bytes",
        "avail_after_capture_bytes",
        "avail_last_batch_bytes",
        "avail_first_batch_bytes",
        "avail_before_capture_bytes",
        "avail_after_pool_bytes",
        "avail_after_load_bytes",
    )
    return next((size for name in names if (size := start.size(name)) is not None), None)


#: What two figures of two decimals of GiB may leave over between them, with nobody there.
_PRINTED: Final = 32 * MIB
_TERMS: Final = {
    "weights_and_non_torch_bytes": "weights and outside torch",
    "weights_bytes": "weights",
    "engine_outside_torch_bytes": "outside torch",
    "engine_activation_bytes": "largest step, for as long as it runs",
}
