"""Checks of who holds memory: the request, weights, what stays after profiling, neighbours, workspaces."""

from __future__ import annotations

from typing import Final

from startup_fsm.checks.readings import requested_bytes, sequence_numbers, workspace_before, workspaces_in
from startup_fsm.findings import Finding
from startup_fsm.fold import RunState, Visit
from startup_fsm.memory import MIB, Snapshot, format_bytes

#: Readings differ by a page or two without anybody's doing.
PAGE: Final = 2 * MIB
#: What may stay after profiling without a name: small caches of libraries.
RESIDUE: Final = 48 * MIB
#: More than this no state of ours takes outside torch: kernels, graphs and libraries together.
UNNAMED: Final = 512 * MIB


def enough_free(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """The device can give what was requested."""
    if after is None:
        return []
    requested = requested_bytes(run, after.total_bytes)
    reachable = after.own_bytes + after.free_bytes
    # A driver keeps a few pages to itself, and the margin of the budget is as much again.
    tolerance = max(8 * PAGE, after.total_bytes // 1000)
    if requested is None or requested <= reachable + tolerance:
        return []
    return [
        Finding(
            code="device.not_enough_free",
            severity="warning",
            state=visit.state,
            message=f"{format_bytes(requested)} were requested, {format_bytes(reachable)} can be had",
            observed=reachable,
            expected=requested,
            tolerance=tolerance,
            scope="device",
            bytes=requested - reachable,
            evidence=sequence_numbers(visit, "leave"),
        )
    ]


def tenants(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """Who else holds the device."""
    if after is None or not after.other_bytes:
        return []
    who = ", ".join(f"{tenant.label} ({format_bytes(tenant.bytes or 0)})" for tenant in after.tenants)
    return [
        Finding(
            code="device.neighbour_present",
            severity="note",
            state=visit.state,
            message=f"other processes hold {format_bytes(after.other_bytes)} of the device: {who}",
            observed=after.other_bytes,
            scope="device",
            bytes=after.other_bytes,
            evidence=sequence_numbers(visit, "leave"),
        )
    ]


def weights_once(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """Weights took what the checkpoint has; there is no second copy."""
    expected = visit.notes.get("checkpoint_bytes")
    if before is None or after is None or not isinstance(expected, int):
        return []
    grown = after.allocated_bytes - before.allocated_bytes
    tolerance = max(64 * MIB, expected // 20)
    if grown <= expected + tolerance:
        return []
    return [
        Finding(
            code="weights.second_copy",
            severity="warning",
            state=visit.state,
            message=f"weights took {format_bytes(grown)}, the checkpoint has {format_bytes(expected)}",
            observed=grown,
            expected=expected,
            tolerance=tolerance,
            scope="allocator",
            bytes=grown - expected,
            evidence=sequence_numbers(visit, "enter", "leave"),
        )
    ]


def nothing_unnamed_stays(
    visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState
) -> list[Finding]:
    """After profiling only named workspaces stay."""
    if before is None or after is None:
        return []
    named = sum(workspaces_in(visit).values())
    left = after.allocated_bytes - before.allocated_bytes - named
    if left <= RESIDUE:
        return []
    return [
        Finding(
            code="profile.residue",
            severity="warning",
            state=visit.state,
            message=f"{format_bytes(left)} stay after profiling that nobody named ({format_bytes(named)} are named)",
            observed=left,
            expected=0,
            tolerance=RESIDUE,
            scope="allocator",
            bytes=left,
            evidence=sequence_numbers(visit, "enter", "leave"),
        )
    ]


def neighbours_still(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """No other process took or released memory meanwhile."""
    if before is None or after is None:
        return []
    moved = after.other_bytes - before.other_bytes
    drift = after.unexplained_bytes - before.unexplained_bytes
    found: list[Finding] = []
    if abs(moved) > PAGE:
        was = {tenant.label: tenant.bytes or 0 for tenant in before.tenants}
        now = {tenant.label: tenant.bytes or 0 for tenant in after.tenants}
        who = max(was | now, key=lambda label: abs(now.get(label, 0) - was.get(label, 0)))
        code, did = ("device.neighbour_grew", "took") if moved > 0 else ("device.neighbour_shrank", "released")
        found.append(
            Finding(
                code=code,
                severity="warning",
                state=visit.state,
                message=f"{who} {did} {format_bytes(abs(moved))} while we were in {visit.state}",
                observed=after.other_bytes,
                expected=before.other_bytes,
                tolerance=PAGE,
                scope="device",
                bytes=abs(moved),
                evidence=sequence_numbers(visit, "enter", "leave", "fail"),
            )
        )
    if after.process_bytes is None and visit.state != "init_device":
        # All is charged to us: what we cannot have done ourselves was somebody else.
        moved_by_us = after.outside_bytes - before.outside_bytes
        # Where graphs die a driver may give their memory back.
        least = -UNNAMED if visit.state in ("teardown", "recover_allocator") else -8 * PAGE
        drift = 0 if least <= moved_by_us <= UNNAMED else moved_by_us
    if abs(drift) > 8 * PAGE:
        found.append(
            Finding(
                code="device.drift",
                severity="warning",
                state=visit.state,
                message=f"free memory moved by {format_bytes(-drift)} in {visit.state} and nobody can be named",
                observed=drift,
                expected=0,
                tolerance=8 * PAGE,
                scope="device",
                bytes=abs(drift),
                evidence=sequence_numbers(visit, "enter", "leave", "fail"),
            )
        )
    return found


def workspaces_still(visit: Visit, before: Snapshot | None, after: Snapshot | None, run: RunState) -> list[Finding]:
    """Persistent workspaces do not grow while capturing: they would be counted twice."""
    now = workspaces_in(visit)
    found: list[Finding] = []
    for name, size in now.items():
        was = workspace_before(run, visit, name)
        if was is not None and size > was:
            found.append(
                Finding(
                    code="workspace.grew",
                    severity="warning",
                    state=visit.state,
                    message=f"workspace {name} grew from {format_bytes(was)} to {format_bytes(size)} while capturing",
                    observed=size,
                    expected=was,
                    tolerance=0,
                    scope="process",
                    bytes=size - was,
                    evidence=tuple(seq for seq, _ in visit.workspaces),
                )
            )
    return found
