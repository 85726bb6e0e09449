"""
KV memory as CUDA virtual memory, through cuda-python and without an extension of our own.

One range is reserved; each of its equal sub-ranges is mapped from its own front, whole pages at a time, and never
moves. Nothing is mapped while a stream captures, fresh pages are zeroed, and mapping never shrinks: what was captured
keeps its addresses. Rules: CUDA driver API, virtual memory management.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from startup_fsm.pages import MIB, format_size

#: Largest piece of physical memory that is made at once, in bytes: few calls, and little is lost when one fails.
_PIECE: Final = 1024 * MIB


class CudaArena:
    """
    An arena of ``count`` sub-ranges for ``blocks`` blocks of ``block_bytes`` bytes each.

    Raises:
        NotImplementedError: No virtual memory management here, or no cuda-python.
        RuntimeError: The driver refuses, in its words.
    """

    def __init__(self, index: int, *, count: int, block_bytes: int, blocks: int) -> None:
        if min(count, block_bytes, blocks) < 1:
            msg = f"an arena of {count} sub-ranges, {blocks} blocks of {block_bytes} bytes"
            raise ValueError(msg)
        # The driver knows nothing before somebody began, and maps into the context that is current.
        torch.cuda.mem_get_info(index)
        self._driver = _driver(index)
        self._index = index
        self._count, self._block_bytes, self._blocks = count, block_bytes, blocks
        self._properties = self._allocation_properties()
        flags = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._page = int(self._call(self._driver.cuMemGetAllocationGranularity(self._properties, flags)))
        self._stride = self._whole(block_bytes * blocks)
        self._base = int(self._call(self._driver.cuMemAddressReserve(self._stride * count, self._page, 0, 0)))
        self._mapped = 0
        self._mappings: list[tuple[int, int]] = []
        self.is_closed = False

    def _allocation_properties(self) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        return properties

    def _whole(self, size: int) -> int:
        return -(-size // self._page) * self._page

    def _call(self, result: tuple[Any, ...]) -> Any:
        if result[0] != self._driver.CUresult.CUDA_SUCCESS:
            name = self._driver.cuGetErrorName(result[0])[1]
            text = name.decode() if isinstance(name, bytes) else str(name)
            raise RuntimeError(f"CUDA error: {text} in the KV arena")
        return result[1] if len(result) > 1 else None

    @property
    def base(self) -> int:
        """Address of the range; never changes."""
        return self._base

    @property
    def reserved_bytes(self) -> int:
        """Address space, all sub-ranges."""
        return self._stride * self._count

    @property
    def mapped_bytes(self) -> int:
        """Bytes with memory behind them."""
        return self._mapped * self._count

    @property
    def granule_bytes(self) -> int:
        """Smallest growth: one page in every sub-range."""
        return self._page * self._count

    def blocks_within(self, size: int) -> int:
        """Most blocks whose mapping takes at most ``size`` bytes in all, granules included."""
        pages = max(0, size) // self.granule_bytes
        return min(self._blocks, pages * self._page // self._block_bytes)

    def map_blocks(self, blocks: int) -> None:
        """
        Map enough that the first ``blocks`` blocks of every sub-range are usable, zeroed; never shrinks.

        Raises:
            RuntimeError: A capture is open, or the driver refuses.
            torch.OutOfMemoryError: The device has not that much.
            ValueError: More than the capacity.
        """
        if self.is_closed or not 0 <= blocks <= self._blocks:
            msg = f"arena of {self._blocks} blocks asked to map {blocks}{' after it was closed' * self.is_closed}"
            raise ValueError(msg)
        if torch.cuda.is_current_stream_capturing():
            msg = "the KV arena cannot be mapped while a capture is open\nhint: growth is a state of its own"
            raise RuntimeError(msg)
        target = self._whole(blocks * self._block_bytes)
        if target <= self._mapped:
            return
        fresh = [
            (self._base + place * self._stride + self._mapped, target - self._mapped) for place in range(self._count)
        ]
        done = len(self._mappings)
        try:
            for address, size in fresh:
                self._map(address, size)
        except RuntimeError as error:
            # All sub-ranges grow or none does: a half-grown arena has no size.
            self._unmap(done)
            if "OUT_OF_MEMORY" not in str(error):
                raise
            growth = format_size((target - self._mapped) * self._count)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {growth} for the KV arena ({error})"
            ) from None
        for address, size in fresh:
            self._call(self._driver.cuMemsetD8(address, 0, size))
        # Zeroed on the legacy stream, which the streams of torch do not wait for.
        torch.cuda.synchronize(self._index)
        self._mapped = target

    def _map(self, address: int, size: int) -> None:
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        while size > 0:
            piece = min(size, _PIECE)
            handle = self._call(driver.cuMemCreate(piece, self._properties, 0))
            try:
                self._call(driver.cuMemMap(address, piece, 0, handle, 0))
                self._mappings.append((address, piece))
                self._call(driver.cuMemSetAccess(address, piece, [access], 1))
            finally:
                # Legal right after mapping; the memory lives until it is unmapped.
                self._call(driver.cuMemRelease(handle))
            address, size = address + piece, size - piece

    def _unmap(self, keep: int) -> None:
        while len(self._mappings) > keep:
            address, size = self._mappings.pop()
            self._call(self._driver.cuMemUnmap(address, size))

    def buffers(self) -> list[Any]:
        """
        One ``uint8`` tensor a sub-range, over its whole capacity. They do not own the range.

        The first page is mapped where none is: a torch that is not told the device asks the driver where an address
        lives.
        """
        if not self._mapped:
            self.map_blocks(1)
        size = self._block_bytes * self._blocks
        device = torch.device("cuda", self._index)
        return [
            torch.as_tensor(_Range(self._base + place * self._stride, size), device=device)
            for place in range(self._count)
        ]

    def close(self) -> None:
        """Unmap and free the range. Nothing may use it any more."""
        if self.is_closed:
            return
        torch.cuda.synchronize(self._index)
        self.is_closed = True
        self._unmap(0)
        self._mapped = 0
        self._call(self._driver.cuMemAddressFree(self._base, self._stride * self._count))


class _Range:
    """An address range by the CUDA array interface, version 3."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _driver(index: int) -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        msg = "virtual memory needs cuda-python, which is not installed"
        raise NotImplementedError(msg) from None
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    result = driver.cuDeviceGetAttribute(attribute, index)
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        msg = f"the driver does not say whether it has virtual memory management: {result[0]}"
        raise NotImplementedError(msg)
    if not int(result[1]):
        msg = "this device has no virtual memory management"
        raise NotImplementedError(msg)
    return driver
