"""Two processes, FSDP2 or ZeRO-3: replay gives the loss and the router gradients of one process; prints one JSON line.

    torchrun --nproc-per-node=2 tests/engines/routing/sharded_run.py fsdp2|zero3

Each rank has a half of the rows; gradient checkpointing is on, and the backward pass runs after replay has ended.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from moe_models import EXPERTS, batch, moe_model

from trl_offpolicy.engines.routing import record, replay

GATE = "model.layers.1.mlp.gate.weight"


def loss_of(model: Any, routes: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mean log-prob of one token, and the experts that were used."""
    if routes is None:
        with record(model) as recorded:
            logits = model(input_ids=ids).logits
    else:
        with replay(model, routes), record(model) as recorded:
            logits = model(input_ids=ids).logits
    return logits.log_softmax(-1)[..., 3].mean(), recorded.routed_experts


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def fsdp2() -> tuple[Any, Any, Any]:
    """(model, backward, full gradient of the gate)."""
    model = checkpointed(moe_model())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, lambda loss: loss.backward(), lambda: model.get_parameter(GATE).grad.full_tensor()


def zero3() -> tuple[Any, Any, Any]:
    """(engine, backward, full gradient of the gate)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    model = checkpointed(moe_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, engine.backward, lambda: safe_get_full_grad(engine.module.get_parameter(GATE))


def main() -> None:
    """Compare with one process on all rows."""
    strategy = sys.argv[1]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = batch(rows=2 * world)[0]
    whole = checkpointed(moe_model())
    routes = (loss_of(whole, None, ids)[1] + 1) % EXPERTS
    expected, _ = loss_of(whole, routes, ids)
    expected.backward()
    free = torch.autograd.grad(loss_of(whole, None, ids)[0], whole.get_parameter(GATE))[0]
    gradient = whole.get_parameter(GATE).grad
    model, backward, full_gradient = fsdp2() if strategy == "fsdp2" else zero3()
    here = slice(2 * rank, 2 * rank + 2)
    loss, used = loss_of(model, routes[here], ids[here])
    backward(loss)
    found = full_gradient()
    total = loss.detach().clone()
    dist.all_reduce(total)
    result = {
        "followed": torch.equal(used, routes[here]),
        "loss": float((total / world - expected.detach()).abs()),
        "gradient": float((found - gradient).abs().max() / gradient.abs().max()),
        "free_gradient": float((free - gradient).abs().max() / gradient.abs().max()),
    }
    every: list[object] = [None] * world
    dist.all_gather_object(every, result)
    if rank == 0:
        print(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
