"""Let an engine fall asleep on a device whose memory other programs take at the same moment."""

from typing import Any

from tlt_lightning.engine.vllm.patches.patch import Patch


def _sleep_beside_others(sleep: Any, worker: Any, level: int = 1) -> None:
    try:
        sleep(worker, level)
    except AssertionError:
        from vllm.device_allocator.cumem import CuMemAllocator

        # What it asserts last is about the device; what it asserts before leaves memory awake.
        held = CuMemAllocator.get_instance().pointer_to_data.values()
        if not held or not all(data.is_asleep for data in held):
            raise


PATCH = Patch(
    why="An engine that has fallen asleep asserts that the device has more free memory than before; on a device that "
    "other programs use too, a run dies of what they took meanwhile.",
    versions="0.32",
    around={"vllm.v1.worker.gpu_worker.Worker.sleep": _sleep_beside_others},
)
