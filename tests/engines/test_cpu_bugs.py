"""What the kit does about bugs of vLLM's CPU engine, without an engine."""

from __future__ import annotations

import pkgutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trl_offpolicy.engines import cpu_bugs
from trl_offpolicy.engines.cpu_bugs import ReloadsExperts
from trl_offpolicy.engines.server import serve
from trl_offpolicy.engines.server.checks import reload_method


def model() -> nn.Module:
    experts, linear = nn.Identity(), nn.Identity()
    experts.quant_method = SimpleNamespace(moe_kernel="packed once")  # type: ignore[assignment]
    linear.quant_method = SimpleNamespace()  # type: ignore[assignment]
    return nn.Sequential(experts, linear)


@pytest.mark.parametrize(("gpu", "kernel"), [(False, None), (True, "packed once")])
@pytest.mark.parametrize("reloaded", [False, True])
def test_kernels_of_experts_that_are_reloaded_are_built_again_on_a_cpu_only(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, kernel: str | None, reloaded: bool
) -> None:
    """A layer to which a sync brings nothing keeps its kernel."""
    monkeypatch.setattr(cpu_bugs, "machine_has_gpu", lambda: gpu)
    built = model()
    experts: Any = built[0].quant_method
    with cpu_bugs.cpu_reload(built):
        assert experts.moe_kernel == kernel  # where there is none, vLLM builds one when it has loaded the weights
        if reloaded:
            experts.moe_kernel = "packed again"
    assert experts.moe_kernel == ("packed again" if reloaded else "packed once")
    assert not hasattr(built[1].quant_method, "moe_kernel")


def test_a_reload_on_a_servers_worker_forgets_the_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bugs, "machine_has_gpu", lambda: False)
    built = model()
    seen: list[Any] = []

    class Worker(ReloadsExperts):
        model_runner = SimpleNamespace(model=built)

        def reload_weights(self, *, weights_path: str) -> None:
            seen.append((weights_path, built[0].quant_method.moe_kernel))  # type: ignore[index,union-attr]

    Worker().reload_experts("a/folder")
    assert seen == [("a/folder", None)]


@pytest.mark.parametrize("gpu", [False, True])
def test_a_tied_head_is_packed_again_from_the_new_embeddings_on_a_cpu_only(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(cpu_bugs, "machine_has_gpu", lambda: gpu)

    class Packed:
        """Keeps a copy, as the kernel's packed weight is one."""

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.cpu_linear = layer.weight.detach().clone()

    embedding, head, other = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    for layer in (head, other):
        layer.quant_method = Packed()  # type: ignore[assignment]
        layer.quant_method.process_weights_after_loading(layer)  # type: ignore[operator,union-attr]
    before = head.cpu_linear
    with cpu_bugs.cpu_reload(nn.Sequential(embedding, head, other)):
        embedding.weight = nn.Parameter(torch.full((3, 2), 7.0))  # the reload makes a new parameter
    if gpu:
        assert head.cpu_linear is before
    else:
        assert head.weight is embedding.weight and bool((head.cpu_linear == 7.0).all())
    assert not bool((other.cpu_linear == 7.0).any())


def test_the_servers_worker_is_asked_by_the_method_it_has() -> None:
    """Of a server that was started otherwise vLLM's own is called."""
    flags = serve.command(serve.ServeOptions(model="m", dtype="float32"))
    extension = flags[flags.index("--worker-extension-cls") + 1]
    assert reload_method({"parallel_config": {"worker_extension_cls": extension}}) == "reload_experts"
    assert reload_method({}) == "reload_weights"
    assert issubclass(pkgutil.resolve_name(extension), ReloadsExperts)


@pytest.mark.parametrize("x", [torch.tensor([0.7, 0.0, 1.3]), torch.tensor([5, 0, 9], dtype=torch.int32)])
def test_each_draft_token_gets_the_value_of_its_request(x: torch.Tensor) -> None:
    until = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second request has no draft
    found = cpu_bugs.to_tokens(x, until, 5)
    assert found.dtype == x.dtype and found.tolist() == [x[0], x[0], x[2], x[2], x[2]]
    greedy = cpu_bugs.to_tokens(x, torch.tensor([1, 3, 4], dtype=torch.int32), 4, replace_from=0, replace_to=1)
    assert greedy.tolist() == [x[0], 1, 1, x[2]]


@pytest.mark.parametrize(("gpu", "right"), [(False, True), (False, False), (True, False)])
def test_vllm_is_mended_on_a_cpu_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch, gpu: bool, right: bool) -> None:
    def expand(x: torch.Tensor, until: torch.Tensor, count: int) -> torch.Tensor:
        return cpu_bugs.to_tokens(x, until, count) if right else torch.zeros(count)

    sampler = SimpleNamespace(expand_batch_to_tokens=expand)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.rejection_sampler", sampler)
    monkeypatch.setattr(cpu_bugs, "machine_has_gpu", lambda: gpu)
    cpu_bugs.mend_drafts()
    assert (sampler.expand_batch_to_tokens is cpu_bugs.to_tokens) == (not gpu and not right)


def test_weights_are_packed_under_the_threads_of_the_first_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bugs, "machine_has_gpu", lambda: False)
    before, built = torch.get_num_threads(), nn.Sequential()
    try:
        for threads in (1, 3):  # something sets another number after the first sync
            torch.set_num_threads(threads)
            with cpu_bugs.cpu_reload(built):
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
