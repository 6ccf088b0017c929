"""Strategies of Lightning that shard, on a CPU, and what the runs under them share.

Lightning refuses FSDP1 and DeepSpeed on a CPU, although torch and DeepSpeed run there: two subclasses leave out the
refusal.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_runs import Watch
from tiny_models import tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_module import models

LORA = {"r": 4, "lora_alpha": 32, "target_modules": "all-linear", "exclude_modules": ["lm_head"]}
SHARDED = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
PROMPTS = [{"prompt": f"w{i} w{i + 1}"} for i in range(36)]
GENERATE_STEPS = 3
ENDS = list(range(1, 44))
"""A third of the tokens ends a completion, so that the longest one of a rank is seldom that of the other."""


class FSDPOnCPU(FSDPStrategy):
    """Lightning refuses the class by its exact type on a CPU, so a subclass passes. torch wants the device named."""

    def _setup_model(self, model: Any) -> Any:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, sharding_strategy=self.sharding_strategy, device_id=cpu, **self.kwargs)


class ZeRO3OnCPU(DeepSpeedStrategy):
    """Leaves out the check of the accelerator and the number of a GPU; everything else is Lightning's."""

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import deepspeed

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        no_gpu = argparse.Namespace(device_rank=-1)
        return deepspeed.initialize(no_gpu, model, optimizer, trained, lr_scheduler=lr_scheduler, config=self.config,
                                    dist_init_required=False)[:2]  # fmt: skip


class Shards(Watch):
    """Keeps full weights after each step."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep_weights(trainer, pl_module)
        self.logs.append(dict(pl_module.step_logs))

    def keep_weights(self, trainer: Any, pl_module: Any) -> None:
        with models.whole_weights(trainer.strategy.model), models.zero3_gathered(pl_module.policy):
            named = pl_module.policy.named_parameters()
            full = {name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in named}
            self.weights.append({name.replace(models.FSDP1_PREFIX, ""): value.clone() for name, value in full.items()})


def strategy_of(kind: str, *, on_gpu: bool) -> Any:
    """The strategy; on a CPU without Lightning's refusal."""
    if kind == "one":
        return "auto"
    if kind == "fsdp2":
        return ModelParallelStrategy(**SHARDED)
    if kind == "fsdp2-defaults":  # of Lightning: the nodes share the data, the processes of each node the tensors
        return ModelParallelStrategy(process_group_backend="gloo")
    if kind == "fsdp":
        # torch crashes where FSDP1 gathers a full state dict on a CPU
        layout = "full" if on_gpu else "sharded"
        return (FSDPStrategy if on_gpu else FSDPOnCPU)(auto_wrap_policy={LlamaDecoderLayer}, state_dict_type=layout)
    if kind == "zero3":
        return DeepSpeedStrategy(stage=3) if on_gpu else ZeRO3OnCPU(stage=3, process_group_backend="gloo")
    return kind


def ending_model() -> Any:
    """The tiny model, whose completions end early."""
    model = tiny_model()
    model.generation_config.eos_token_id = ENDS
    return model


def generate_settings(*, lora: bool) -> dict[str, Any]:
    """Arguments of the module of ``sharded_generate_run.py``, there and where one process repeats the run."""
    return {
        "model": ending_model(), "adapter": LORA if lora else None, "correction": "measure",
        "objective": {"kl": {"coef": 0.5}}, "trim_padding": False,
        "share_prefix": False, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5),
    }  # fmt: skip
