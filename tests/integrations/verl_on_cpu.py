"""verl on a CPU, through verl's own plug-in points: a platform, VERL_PLATFORM=cpu, for its FSDP2 engine.

verl 0.9.1 has platforms for CUDA, ROCm and NPU alone. Load with VERL_USE_EXTERNAL_MODULES=verl_on_cpu.
"""

import types
from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _device_module():
    """``torch.cpu`` with the calls on memory that verl makes on its device."""
    module = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[0] != "_"})
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(module, name, lambda *a, **k: 0)
    module.mem_get_info = lambda *a, **k: (0, 0)
    module.empty_cache = module.ipc_collect = module.reset_peak_memory_stats = lambda *a, **k: None
    module.get_device_name = lambda *a, **k: "CPU"
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "cpu", _device_module()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
