"""The cosine of consecutive gradients where FSDP has cut them, and where DeepSpeed has used them up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import two_ranks
from torch import nn

from trl_offpolicy.control.gradient_cosine import ConsecutiveCosine
from trl_offpolicy.rollouts.model_parts import is_flattened


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def cosines(net: nn.Module, *, in_parts: bool = False) -> list[float]:
    """Of three steps; the rows are the same on every rank, so that their mean is that of one process."""
    seen, found, random = ConsecutiveCosine(), [], torch.Generator().manual_seed(1)
    for _ in range(3):
        net.zero_grad()
        net(torch.randn(4, 5, generator=random)).square().sum().backward()
        seen.update(net.parameters(), in_parts=in_parts)
        if (value := seen.value()) is not None:
            found.append(value)
    return found


def run(rank: int) -> dict[str, list[float]]:
    return {"fsdp2": with_fsdp2(), "fsdp1": with_fsdp1()}


def with_fsdp1() -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    assert is_flattened(net)
    return cosines(net, in_parts=True)


def with_fsdp2() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    assert all(hasattr(parameter, "full_tensor") for parameter in net.parameters())
    return cosines(net)


@pytest.mark.integration
def test_sharded_gradients_give_the_cosine_of_the_whole(tmp_path: Path) -> None:
    expected = cosines(model())
    assert len(expected) == 2 and all(0.05 < abs(value) < 0.999 for value in expected)
    for found in two_ranks.launch(__file__, run, tmp_path):
        assert found["fsdp2"] == pytest.approx(expected, abs=1e-6)
        assert found["fsdp1"] == pytest.approx(expected, abs=1e-6)


def test_without_gradients_it_says_so_instead_of_reporting_zero() -> None:
    with pytest.raises(NotImplementedError, match="DeepSpeed"):
        ConsecutiveCosine().update(model().parameters())


if __name__ == "__main__":
    two_ranks.join(run)
