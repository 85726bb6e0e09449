"""
The OutOfMemoryError sentence of torch, alone: text to figures. Units are printed with two decimals.

Shapes: 1.x to 2.0 put everything in brackets after the GPU; 2.1 on writes sentences (and once "capacty"); 2.5 on names
private pools. HIP writes the same body, NPU and MUSA the first one, XPU either without what is free. The backend of
``cudaMallocAsync`` writes a small table instead. A figure of 2^64 - 1 bytes is a driver that does not tell (WSL):
unknown. A terminal may have wrapped the sentence between words; of one that is cut, what stands before the cut counts.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

_UNITS: Final = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = r"(\d{1,12}(?:\.\d{1,6})?) (bytes|[KMGT]iB)"
#: No process holds this much: what a driver prints that does not know.
_UNKNOWN: Final = 1 << 60
#: That torch prints of anything but whole bytes.
_DECIMALS: Final = 2

_GAP: Final = r"\s{1,80}"
_BEGIN: Final = re.compile(
    rf"(?:Tried|NPUWorkspaceAllocator{_GAP}tried){_GAP}to{_GAP}allocate{_GAP}\d"
    rf"|Allocation{_GAP}on{_GAP}device{_GAP}\d{{1,4}}{_GAP}would{_GAP}exceed{_GAP}allowed{_GAP}memory"
)
_PATTERNS: Final[dict[str, re.Pattern[str]]] = {
    "tried_bytes": re.compile(rf"[Tt]ried to allocate {_SIZE}|Requested {{0,24}}: {_SIZE}"),
    "total_bytes": re.compile(
        rf"has a total capac(?:i)?ty of {_SIZE}|; {_SIZE} total capacity|Device limit {{0,24}}: {_SIZE}"
    ),
    "free_bytes": re.compile(rf"of which {_SIZE} is free|; {_SIZE} free|Free \(according to CUDA\) {{0,24}}: {_SIZE}"),
    "process_bytes": re.compile(rf"this process has {_SIZE} memory in use"),
    "allocated_bytes": re.compile(
        rf"Of the allocated memory {_SIZE} is allocated by|; {_SIZE} already allocated"
        rf"|Currently allocated {{0,24}}: {_SIZE}"
    ),
    "private_pool_bytes": re.compile(rf"with {_SIZE} allocated in private pools"),
    "reserved_unallocated_bytes": re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated"),
    "reserved_bytes": re.compile(rf"; {_SIZE} (?:reserved in total by PyTorch|cached)"),
    "allowed_bytes": re.compile(rf"{_SIZE} allowed|PyTorch limit [^:]{{0,80}}: {_SIZE}"),
}
_GPU: Final = re.compile(r"(?:[GNXH]PU|MUSA|MLU|DCU) (\d{0,4}) ?(?:has a total|;)|Allocation on device (\d{1,4})")
_TENANT: Final = re.compile(rf"Process (\d{{1,12}}) has {_SIZE} memory in use")


@attrs.frozen(kw_only=True)
class Sentence:
    """
    Figures of one sentence, in bytes; None where it does not say, or says that nobody knows.

    Attributes:
        gpu: Index as printed.
        tenants: Other processes: pid and bytes.
    """

    tried_bytes: int | None = None
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    allocated_bytes: int | None = None
    private_pool_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    reserved_bytes: int | None = None
    allowed_bytes: int | None = None
    tenants: tuple[tuple[int, int | None], ...] = ()


def parse_sentence(text: str) -> Sentence | None:
    """The figures of an out-of-memory sentence; None when ``text`` holds none."""
    body = _body(text)
    if body is None:
        return None
    gpu = _GPU.search(body)
    index = next((group for group in gpu.groups() if group), None) if gpu else None
    return Sentence(
        gpu=None if index is None else int(index),
        tenants=tuple((int(found[1]), _size(found[2], found[3])) for found in _TENANT.finditer(body)),
        **{name: _size(*_told(found)) for name, found in _found(body).items()},
    )


def parse_prints(text: str) -> dict[str, tuple[str, int]]:
    """By figure of the same sentence: its unit as printed, and the half width of its last digit in bytes."""
    body = _body(text)
    return {} if body is None else {name: _print(*_told(found)) for name, found in _found(body).items()}


def _body(text: str) -> str | None:
    """The sentence as one line; None where there is none."""
    begin = _BEGIN.search(text)
    if begin is None:
        return None
    # What follows is one sentence of a few hundred characters; a log may go on for gigabytes, or with the next one.
    most = begin.start() + 4_096
    following = _BEGIN.search(text, begin.end(), most)
    return " ".join(text[begin.start() : most if following is None else following.start()].split())


def _found(body: str) -> dict[str, re.Match[str]]:
    return {name: found for name, pattern in _PATTERNS.items() if (found := pattern.search(body)) is not None}


def _told(found: re.Match[str]) -> tuple[str, str]:
    """Number and unit of whichever alternative matched."""
    number, unit = [group for group in found.groups() if group is not None][:2]
    return number, unit


def _print(number: str, unit: str) -> tuple[str, int]:
    """The unit, and half a unit of the last digit; whole bytes are exact."""
    is_exact = _UNITS[unit] == 1 and "." not in number
    decimals = max(_DECIMALS, len(number.partition(".")[2]))
    return unit, 0 if is_exact else round(_UNITS[unit] / 10**decimals / 2)


def _size(number: str, unit: str) -> int | None:
    value = round(float(number) * _UNITS[unit])
    return None if value >= _UNKNOWN else value
