"""
Memory as numbers: snapshots, the accounting identity, and bytes for people.

    used (CUDA total - free) = torch reserved, by pool + arena mapped + this process outside both
                               + other processes + unexplained
    reserved = active + inactive        active = requested + rounding

All bytes are ints in bytes. Formatting happens at the rim, with :func:`format_bytes`. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30


@attrs.frozen(kw_only=True)
class PoolUsage:
    """
    Bytes of one allocator pool.

    Attributes:
        pool: Identity, such as ``0.0`` for the default pool or ``0.3``.
        purpose: What it was opened for; None where nobody said.
        reserved_bytes: Segments that the pool holds.
        active_bytes: Blocks in use, rounding included.
        requested_bytes: What callers asked for; None where the allocator does not tell.
        use_count: References to the pool; None for the default pool.
    """

    pool: str
    purpose: str | None = None
    reserved_bytes: int
    active_bytes: int
    requested_bytes: int | None = None
    use_count: int | None = None


@attrs.frozen(kw_only=True)
class Tenant:
    """
    Another process on the device.

    Attributes:
        label: A stable name for it, such as its process number.
        bytes: What it holds; None where the driver does not tell.
    """

    label: str
    bytes: int | None = None


@attrs.frozen(kw_only=True)
class Snapshot:
    """
    What memory looked like at one instant; a figure that nothing measured is None.

    Attributes:
        total_bytes, free_bytes: The device, as ``cudaMemGetInfo`` gives it.
        nvml_used_bytes, nvml_free_bytes, nvml_reserved_bytes: The same by NVML (its total is CUDA's plus reserved).
        process_bytes: This process on the device, by NVML or by the simulator.
        allocated_bytes, requested_bytes, reserved_bytes: The caching allocator now.
        allocated_peak_bytes, reserved_peak_bytes: Its peaks since they were last reset; a live start resets them when a
            state begins.
        retries: How often the allocator emptied its cache and tried again.
        ooms: How often memory ran out.
        pools: Bytes by pool; the default pool is one.
        arena_mapped_bytes, arena_reserved_bytes: KV memory held as virtual memory outside the allocator.
        host_rss_bytes, host_pinned_bytes, host_shared_bytes, cgroup_limit_bytes: The host side.
        tenants: Other processes, where they can be named.
        settled: Whether garbage was collected, caches emptied and the reading had come to rest.
        cost_ns: What taking it cost.
        sources: Where each group of figures came from.
    """

    total_bytes: int
    free_bytes: int
    nvml_used_bytes: int | None = None
    nvml_free_bytes: int | None = None
    nvml_reserved_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int = 0
    requested_bytes: int | None = None
    reserved_bytes: int = 0
    allocated_peak_bytes: int = 0
    reserved_peak_bytes: int = 0
    retries: int = 0
    ooms: int = 0
    pools: tuple[PoolUsage, ...] = ()
    arena_mapped_bytes: int = 0
    arena_reserved_bytes: int = 0
    host_rss_bytes: int | None = None
    host_pinned_bytes: int | None = None
    host_shared_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    tenants: tuple[Tenant, ...] = ()
    settled: bool = False
    cost_ns: int = 0
    sources: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def used_bytes(self) -> int:
        """Bytes in use on the whole device, by everybody."""
        return self.total_bytes - self.free_bytes

    @property
    def own_bytes(self) -> int:
        """
        Bytes charged to this process.

        Where the driver does not tell them, all that is used is charged to us, less what named tenants hold.
        """
        if self.process_bytes is not None:
            return self.process_bytes
        return self.used_bytes - self.other_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes of other processes that can be named; 0 where none can."""
        return sum(tenant.bytes or 0 for tenant in self.tenants)

    @property
    def outside_bytes(self) -> int:
        """This process outside torch and arena: context, kernels, graph objects, libraries."""
        return self.own_bytes - self.reserved_bytes - self.arena_mapped_bytes

    @property
    def unexplained_bytes(self) -> int:
        """What the identity leaves over."""
        return self.used_bytes - self.own_bytes - self.other_bytes

    @property
    def foreign_pools(self) -> frozenset[str]:
        """Pools that hold memory and that nobody gave a purpose: an engine opened them, as for graphs of its own."""
        return frozenset(pool.pool for pool in self.pools if pool.purpose is None and pool.reserved_bytes)

    def pool(self, identity: str) -> PoolUsage | None:
        """The usage of one pool, or None when the snapshot does not hold it."""
        return next((pool for pool in self.pools if pool.pool == identity), None)


@attrs.frozen(kw_only=True)
class Account:
    """One term of the accounting identity, with the meter that gave it."""

    account: str
    bytes: int
    source: str


def accounts(snapshot: Snapshot) -> tuple[Account, ...]:
    """The accounting identity of a snapshot, term by term; the terms add up to ``used_bytes``."""
    source = snapshot.sources.get
    allocator = source("torch", "allocator")
    rows = [
        Account(account=f"torch pool {pool.purpose or pool.pool}", bytes=pool.reserved_bytes, source=allocator)
        for pool in snapshot.pools
        if pool.reserved_bytes
    ]
    by_pool = sum(pool.reserved_bytes for pool in snapshot.pools)
    if snapshot.reserved_bytes != by_pool:
        rows.append(Account(account="torch, no pool", bytes=snapshot.reserved_bytes - by_pool, source=allocator))
    if snapshot.arena_mapped_bytes:
        rows.append(Account(account="arena mapped", bytes=snapshot.arena_mapped_bytes, source=source("arena", "arena")))
    rows.append(Account(account="outside torch", bytes=snapshot.outside_bytes, source=source("process", "inferred")))
    rows.append(Account(account="other processes", bytes=snapshot.other_bytes, source=source("tenants", "inferred")))
    rows.append(Account(account="unexplained", bytes=snapshot.unexplained_bytes, source="identity"))
    return tuple(rows)


def format_bytes(value: int) -> str:
    """Bytes for people: binary units, at most two decimals, the sign kept."""
    size = abs(value)
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value} B"
