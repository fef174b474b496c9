"""What verl 0.9.1 lacks to compute on CPUs, for tests and for runs without a GPU. It imports this by itself where
VERL_PLATFORM is "cpu" and VERL_USE_EXTERNAL_MODULES names this module; nothing here is used on a GPU.

Four things: a platform, through verl's own registry; its FSDP engine registered for the device, through that of
engines; FlashAttention's functions in plain PyTorch (`packed_attention`), for rows that workers share; and one
function of verl replaced, because it knows no other way. `initialize_global_process_group_ray` makes the backend
"cpu:gloo,{device}:{backend}", which names the CPU twice, and torch refuses that.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from agentlightning.learner.verl.packed_attention import register as register_attention


class Device(ModuleType):
    """`torch.cpu`, and 0 for the memory that torch counts on accelerators."""

    def __getattr__(self, name: str) -> Any:
        if "memory" in name:
            return lambda *_: 0
        return getattr(torch.cpu, name)

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None:
        pass


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformBase):
    """See `PlatformBase`."""

    device_name = vendor_name = "cpu"
    device_module = Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register_engine() -> None:
    """Let verl's FSDP engine be found for this device, and its ranks meet over gloo."""
    import verl.utils.distributed as meeting
    import verl.workers.engine_workers as workers
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
    over_gloo = functools.partial(meeting.initialize_global_process_group_ray, backend="gloo")
    register_attention()
    workers.initialize_global_process_group_ray = meeting.initialize_global_process_group_ray = over_gloo
