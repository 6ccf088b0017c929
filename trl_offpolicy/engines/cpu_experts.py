"""Works around two bugs of vLLM's CPU engine at a sync: experts that come out scrambled, a tied head that stays old."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl_offpolicy.engines.environment import machine_has_gpu


@contextmanager
def cpu_reload(model: Any) -> Iterator[None]:
    """A context for loading weights into vLLM's model. Does nothing on a GPU, where no kernel packs weights.

    vLLM 0.31 packs copies of weights for its CPU kernels. The packed experts are made when their kernel is built: later
    weights stay unpacked (``UnquantizedFusedMoEMethod._setup_kernel``), and the kernel reads them in the wrong order,
    without an error. So the kernels are built again. An output head that is tied to the embeddings has a packed copy of
    its own, which a reload of the embeddings leaves as it was at the start. So it is packed again.

    Args:
        model: the model of vLLM's model runner.
    """
    if machine_has_gpu():
        yield
        return
    _forget_expert_kernels(model)
    heads = _tied_heads(model)
    yield
    for head, embedding in heads:
        head.weight = embedding.weight  # the reload may have made a new parameter
        head.quant_method.process_weights_after_loading(head)


def _forget_expert_kernels(model: Any) -> None:
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tied_heads(model: Any) -> list[tuple[Any, Any]]:
    """(head, embedding) of all modules with a packed copy whose weight is another module's."""
    owners: dict[int, Any] = {}
    found = []
    for module in model.modules():
        weight = module._parameters.get("weight")  # not a property, which may make a new tensor every time
        if weight is None:
            continue
        owner = owners.setdefault(id(weight), module)
        if owner is not module and hasattr(module, "cpu_linear"):
            found.append((module, owner))
    return found


def forget_failed_load(model: Any) -> None:
    """Give the layers that a failed load left without weights those that they had before.

    vLLM keeps what it has read of a layer until all of it is there. The rest of a failed load would be mixed into the
    next one.

    Args:
        model: the model of vLLM's model runner.
    """
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:  # an older vLLM, which loads in place
        return
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()


@contextmanager
def whole_load(model: Any) -> Iterator[None]:
    """:func:`cpu_reload` that leaves nothing of a load that fails.

    Args:
        model: the model of vLLM's model runner.

    Raises:
        RuntimeError: the load failed; the message names the kind of error.
    """
    try:
        with cpu_reload(model):
            yield
    except Exception as error:
        forget_failed_load(model)
        # vLLM passes on only the text, and an assertion has none
        raise RuntimeError(f"{type(error).__name__}{f': {error}' if str(error) else ''}") from error


class ReloadsExperts:
    """A reload that leaves nothing of a failed one, and works on vLLM's CPU engine.

    A part of :class:`~trl_offpolicy.engines.worker.WorkerExtension`.
    """

    model_runner: Any
    reload_weights: Any

    def reload_experts(self, weights_path: str) -> None:
        """``reload_weights`` inside :func:`whole_load`."""
        with whole_load(self.model_runner.model):
            self.reload_weights(weights_path=weights_path)
