"""Forward hooks of DeepSpeed are left out while a rank generates by itself; all others stay."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_module.models import _without_hooks, keeps_whole, zero3_gathered


class Partitions(DeepSpeedStrategy):
    """Made without DeepSpeed."""

    def __init__(self) -> None:
        DDPStrategy.__init__(self)


def test_a_strategy_of_deepspeed_keeps_no_whole_policy_though_it_is_one_of_ddp() -> None:
    assert keeps_whole(DDPStrategy()) and keeps_whole(SingleDeviceStrategy())
    assert isinstance(Partitions(), DDPStrategy) and not keeps_whole(Partitions()) and not keeps_whole(FSDPStrategy())


def test_hooks_of_one_package_rest_and_come_back_in_their_order() -> None:
    model, called = nn.Sequential(nn.Linear(2, 2)), []

    def theirs(*_: Any) -> None:
        called.append("theirs")

    def ours(*_: Any) -> None:
        called.append("ours")

    def added(*_: Any) -> None:
        called.append("added")

    theirs.__module__ = "deepspeed.runtime.zero.parameter_offload"
    ours.__module__ = "deepspeed_of_somebody_else"
    gone = model[0].register_forward_pre_hook(theirs)
    model[0].register_forward_pre_hook(ours)
    model[0].register_forward_hook(theirs)
    with _without_hooks(model, of="deepspeed"):
        model(torch.ones(1, 2))
        model.register_forward_hook(added)
        assert called == ["ours"]
    called.clear()
    model(torch.ones(1, 2))
    assert called == ["theirs", "ours", "theirs", "added"]
    called.clear()
    gone.remove()
    model(torch.ones(1, 2))
    assert called == ["ours", "theirs", "added"]


def test_a_model_that_is_not_in_parts_is_left_as_it_is() -> None:
    model, called = nn.Linear(2, 2), []

    def theirs(*_: Any) -> None:
        called.append("theirs")

    theirs.__module__ = "deepspeed.runtime"
    model.register_forward_hook(theirs)
    with zero3_gathered(model, wrapped=None):
        model(torch.ones(1, 2))
    assert called == ["theirs"]
