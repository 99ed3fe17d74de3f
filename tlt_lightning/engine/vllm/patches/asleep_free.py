"""Free the memory of a sleeping engine without waking it, so that another one can sleep after it.

vLLM's allocator unmaps what it frees, and cannot unmap what `sleep` has unmapped already. Waking the whole engine first
takes memory that the trainer may hold by then. Here each allocation is mapped alone, right before it is unmapped for
good. The largest is the whole KV cache. Where one does not fit, all of its addresses are mapped to one small piece of
memory, again and again (virtual aliasing in CUDA's programming guide): that they are mapped is asked for, not to what.
"""

import ctypes
import gc
import logging
import struct
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch

log = logging.getLogger(__name__)


PIECE = 16 * 2**20
"""Bytes that stand in for memory that does not fit."""


def _free_awake(free: Any, allocator: Any, pointer: int) -> Any:
    from vllm.device_allocator.cumem import create_and_map

    data = allocator.pointer_to_data[pointer]
    if data.is_asleep:
        fits = torch.cuda.mem_get_info(data.handle[0])[0] > data.handle[1] + PIECE
        try:
            (create_and_map if fits else _map_to_one_piece)(data.handle)
        except RuntimeError as error:  # raised through the caller, which is C, it would keep Python's lock
            log.warning("The device had no memory to free what a sleeping engine holds (%s).", error)
        data.is_asleep = False
    return free(allocator, pointer)


def _map_to_one_piece(handle: tuple[int, int, int, int]) -> None:
    """Map all addresses of an allocation to one piece of memory, and leave that for vLLM to release.

    Args:
        handle: vLLM's: device, bytes, address, and the address where the memory's handle is kept.

    Raises:
        RuntimeError: The driver has no memory for the piece, or did not map it.
    """
    device, size, address, kept_at = handle
    driver, piece = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    # CUmemAllocationProp: pinned, without a handle to share, on a device, its number, no metadata, no flags
    kind = ctypes.create_string_buffer(struct.pack("4i2Q", 1, 0, 1, device, 0, 0), 32)
    status = driver.cuMemCreate(ctypes.byref(piece), ctypes.c_size_t(PIECE), kind, ctypes.c_uint64(0))
    for start in range(address, address + size, PIECE):
        length = ctypes.c_size_t(min(PIECE, address + size - start))
        status = status or driver.cuMemMap(
            ctypes.c_uint64(start), length, ctypes.c_size_t(0), piece, ctypes.c_uint64(0)
        )
    if status:
        raise RuntimeError(f"CUDA driver error {status}")
    ctypes.c_uint64.from_address(kept_at).value = piece.value


PATCH = Patch(
    why="Memory that is freed while its engine sleeps is unmapped twice: closing a sleeper breaks the allocator.",
    versions="0.32, CUDA",
    is_needed=lambda: not is_cpu_build() and torch.version.hip is None,
    around={"vllm.device_allocator.cumem.CuMemAllocator._python_free_callback": _free_awake},
)

_lives: bool | None = None
"""Whether the engine that claimed sleep mode last lives; None before the first."""


def asleep_bytes() -> float:
    """Return the memory that vLLM's allocator has unmapped and keeps addresses for."""
    from vllm.device_allocator.cumem import CuMemAllocator

    kept = CuMemAllocator.get_instance().pointer_to_data.values()
    return float(sum(data.handle[1] for data in kept if data.is_asleep))


def claim_sleep_mode() -> None:
    """Raise RuntimeError if another engine that can sleep lives or holds memory: vLLM's allocator serves one."""
    global _lives
    holder = "another one lives" if _lives else "" if _lives is None else _memory_left()
    if holder:
        raise RuntimeError(
            f"vLLM's sleep mode serves one engine at a time, and {holder} in this process. Close that one, run "
            "`validate` or `predict` in a process of their own, or set `sleep: false` on the engine."
        )
    _lives = True
    # vLLM imports it while weights load, and the tensor that it makes then would keep memory of the closed engine.
    with suppress(ImportError), torch.device("cpu"):
        import_module("compressed_tensors.compressors.nvfp4.helpers")


def release_sleep_mode() -> None:
    """Let another engine sleep, which may claim it once the memory of this one is free."""
    global _lives
    _lives = False


def free_pools() -> Any:
    """Give back the memory of a closed engine that nothing holds any more; return vLLM's allocator."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    allocator.release_pools()
    return allocator


def _memory_left() -> str:
    """Describe the memory that earlier engines still hold; vLLM would refuse to load the next one's weights."""
    gc.collect()  # an engine that failed to start had no `close`
    allocator = free_pools()
    left = allocator.get_current_usage() / 2**20
    return f"a closed one still holds {left:,.1f} MiB" if left else ""
