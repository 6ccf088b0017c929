"""All that stands in for CUDA when a whole training of verl runs on a CPU. Load with VERL_USE_EXTERNAL_MODULES.

verl imports it in each of its processes. Nothing here touches the loss, the advantages or the trainer.
"""

import sys
from functools import partial
from pathlib import Path

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_whole_on_cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl's own switch: its FSDP2 engine, in which nothing needs CUDA
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and engine share the cores
    "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_worker_register_timeout_seconds": "900",  # processes start one after the other on few cores
    "RAY_USAGE_STATS_ENABLED": "0",
}
OVERRIDES = [
    "trainer.device=cpu",
    "trainer.ray_wait_register_center_timeout=900",
    "+ray_kwargs.ray_init.num_gpus=1",  # in name only: verl counts Ray's GPUs or NPUs, and no other resource
    "ray_kwargs.ray_init.num_cpus=8",  # places for processes, not cores
    "+ray_kwargs.ray_init.address=local",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.object_store_memory=500000000",
    "actor_rollout_ref.rollout.free_cache_engine=False",  # vLLM's sleep frees a GPU's memory; its CPU worker has none
    "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_vllm_on_cpu.KeepsWeights",
    "actor_rollout_ref.model.use_remove_padding=False",  # needs flash-attn
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.rollout.agent.num_workers=1",  # few processes
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]
"""Lines of verl's configuration for such a machine."""


def name_vllm(folder: Path, version: str) -> Path:
    """A folder for PYTHONPATH with metadata of a package ``vllm``, which verl asks for: vllm-cpu has only its own."""
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


def _stand_in() -> None:
    """Register the platform, and name gloo once."""
    import verl.utils.distributed as distributed
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl_on_cpu import PlatformCPU

    class PlatformWholeCPU(PlatformCPU):
        def ray_resource_name(self) -> str:
            return "GPU"

    PlatformRegistry.register(platform="cpu")(PlatformWholeCPU)
    # verl would ask for "cpu:gloo,cpu:gloo", and torch refuses a device that is named twice
    start = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = partial(start, backend="cpu:gloo")


if "verl" in sys.modules:  # verl loads this module at the end of its own import
    _stand_in()
