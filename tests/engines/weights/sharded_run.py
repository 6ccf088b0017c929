"""Two processes, FSDP2: the weights for the engine are whole, merged and the same on both; prints one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tiny_models import tiny_model

from trl_offpolicy.engines.weights.source import ModelWeights


def build(lora: bool):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = tiny_model()
    if not lora:
        return model
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return model


def compare(lora: bool) -> dict[str, float]:
    whole, sharded = build(lora), build(lora)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    base = sharded.base_model.model if lora else sharded
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    expected = dict(ModelWeights(whole).merged())
    got = {name: value.clone() for name, value in ModelWeights(sharded).merged()}
    assert set(got) == set(expected), sorted(set(got) ^ set(expected))
    adapters = [ModelWeights(model).adapter() for model in (whole, sharded)]
    adapter = (
        max(float((adapters[0].tensors[k] - adapters[1].tensors[k]).abs().max()) for k in adapters[0].tensors)
        if lora
        else 0.0
    )
    parameters = list(sharded.parameters())
    return {
        "difference": max(float((got[name] - value).abs().max()) for name, value in expected.items()),
        "adapter": adapter,
        "sharded": float(sum(isinstance(p, DTensor) for p in parameters) / len(parameters)),
        "local_share": float(
            sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)  # type: ignore[attr-defined]
        ),
    }


def main() -> None:
    dist.init_process_group("gloo")
    result = {name: compare(lora) for name, lora in (("full", False), ("lora", True))}
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, result)
    if dist.get_rank() == 0:
        print(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
