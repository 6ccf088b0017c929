"""FSDP2 on CPU processes, for tests: accelerate takes FSDP only where it sees an accelerator, else DDP, silently."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def allow_fsdp2_on_cpu() -> None:
    """Set up the process group on the CPU, and say that it is of the kind that FSDP may use.

    The training arguments then need ``accelerator_config: {use_configured_state: true}``.
    """
    state = PartialState(cpu=True)
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    state._shared_state["device"] = torch.device("cpu")


if __name__ == "__main__":  # accelerate launch --config_file recipes/accelerate/cpu_fsdp2.yaml THIS --config ...
    allow_fsdp2_on_cpu()
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "recipes" / "grpo.py"), run_name="__main__")
