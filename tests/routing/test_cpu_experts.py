"""What the kit does about vLLM's CPU engine, and what it refuses, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from trl_offpolicy.engines import cpu_experts
from trl_offpolicy.engines.settings import EngineSettings


def model() -> nn.Module:
    experts, linear = nn.Identity(), nn.Identity()
    experts.quant_method = SimpleNamespace(moe_kernel="packed once")  # type: ignore[assignment]
    linear.quant_method = SimpleNamespace()  # type: ignore[assignment]
    return nn.Sequential(experts, linear)


@pytest.mark.parametrize(("gpu", "kernel"), [(False, None), (True, "packed once")])
def test_kernels_of_experts_are_built_again_on_a_cpu_only(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, kernel: str | None
) -> None:
    monkeypatch.setattr(cpu_experts, "machine_has_gpu", lambda: gpu)
    built = model()
    cpu_experts.forget_expert_kernels(built)
    assert built[0].quant_method.moe_kernel == kernel  # type: ignore[index,union-attr]
    assert not hasattr(built[1].quant_method, "moe_kernel")  # type: ignore[index]


def test_a_server_cannot_report_its_routing() -> None:
    settings = EngineSettings.parse({"return_routing": True})
    settings.check_colocate()
    with pytest.raises(ValueError, match=r"engine\.return_routing must be False with a server"):
        settings.check_server()
