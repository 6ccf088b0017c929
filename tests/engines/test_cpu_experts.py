"""What the kit does about the experts of vLLM's CPU engine, without an engine."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from trl_offpolicy.engines import cpu_experts
from trl_offpolicy.engines.cpu_experts import ReloadsExperts
from trl_offpolicy.engines.server import serve
from trl_offpolicy.engines.server.checks import reload_method


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


def test_a_reload_on_a_servers_worker_forgets_the_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_experts, "machine_has_gpu", lambda: False)
    built = model()
    seen: list[Any] = []

    class Worker(ReloadsExperts):
        model_runner = SimpleNamespace(model=built)

        def reload_weights(self, *, weights_path: str) -> None:
            seen.append((weights_path, built[0].quant_method.moe_kernel))  # type: ignore[index,union-attr]

    Worker().reload_experts("a/folder")
    assert seen == [("a/folder", None)]


def test_the_servers_worker_is_asked_by_the_method_it_has() -> None:
    """Of a server that was started otherwise vLLM's own is called."""
    flags = serve.command(serve.ServeOptions(model="m", dtype="float32"))
    extension = flags[flags.index("--worker-extension-cls") + 1]
    assert reload_method({"parallel_config": {"worker_extension_cls": extension}}) == "reload_experts"
    assert reload_method({}) == "reload_weights"
    assert issubclass(pkgutil.resolve_name(extension), ReloadsExperts)
