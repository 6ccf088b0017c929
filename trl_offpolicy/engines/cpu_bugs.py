"""Works around four bugs of vLLM's CPU engine.

After a sync, experts come out scrambled, a tied head stays old, and so does the order in which matrices are read. With
speculative decoding, tokens are drawn at a random temperature.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.environment import machine_has_gpu
from trl_offpolicy.engines.weights.files import BASE

_LOADERS = ("vllm.model_executor.model_loader.reload.layerwise", "vllm.v1.worker.gpu_model_runner")
_LEFT_AS_IT_IS = ("Failed to load weights", "Following weights were not loaded")


@contextmanager
def cpu_reload(model: Any) -> Iterator[None]:
    """A context for loading weights into vLLM's model. Does nothing on a GPU, where vLLM's reload is right.

    vLLM 0.31 packs copies of weights for its CPU kernels. The packed experts are made when their kernel is built: later
    weights stay unpacked (``UnquantizedFusedMoEMethod._setup_kernel``), and the kernel reads them in the wrong order,
    without an error. So the kernels are built again. An output head that is tied to the embeddings has a packed copy of
    its own, which a reload of the embeddings leaves as it was at the start. So it is packed again. A server's worker
    gets :func:`mend_drafts` here, before its first request with the trainer's weights. The kernels that multiply are
    kept from the start, and read matrices in the order for the threads of then; new matrices are packed for those of
    now. Drafts by n-grams change their number: numba sets its own. So matrices are packed under the first number.

    Args:
        model: the model of vLLM's model runner.
    """
    if machine_has_gpu():
        yield
        return
    mend_drafts()
    heads = _tied_heads(model)
    with _first_threads(model), _new_expert_kernels(model):
        yield
        for head, embedding in heads:
            head.weight = embedding.weight  # the reload may have made a new parameter
            head.quant_method.process_weights_after_loading(head)


@contextmanager
def _first_threads(model: Any) -> Iterator[None]:
    """As many threads as at this model's first sync, which comes before its first generation."""
    now = torch.get_num_threads()
    set_threads = torch._C.set_num_threads  # vLLM replaces torch.set_num_threads by a function that does nothing
    set_threads(vars(model).setdefault("offpolicy_threads", now))
    try:
        yield
    finally:
        set_threads(now)


def mend_drafts() -> None:
    """Let vLLM's CPU engine read the temperature, top-k and top-p of draft tokens. Does nothing where it can.

    vLLM 0.31 writes them into a copy that it throws away, and then divides the logits by whatever lies in memory: the
    log-probs of a two-layer model are up to 13 nats wrong, and with ``raw_logprobs`` the log-probs look right while the
    tokens are drawn from something else (https://github.com/vllm-project/vllm/issues/55005).
    """
    sampler: Any = sys.modules.get("vllm.v1.sample.rejection_sampler")  # None: this process has no engine
    if machine_has_gpu() or not hasattr(sampler, "expand_batch_to_tokens"):
        return
    asked, until = torch.tensor([0.7, 1.3]), torch.tensor([1, 3], dtype=torch.int32)
    if not torch.equal(sampler.expand_batch_to_tokens(asked, until, 3), asked[[0, 1, 1]]):
        sampler.expand_batch_to_tokens = to_tokens


def to_tokens(x: Tensor, until: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """What vLLM's ``expand_batch_to_tokens`` says that it does: each request's value, once for each draft token.

    Args:
        x: (requests,).
        until: (requests,), number of draft tokens up to and including each request.
        num_tokens: number of all draft tokens.
        replace_from: a value of ``x`` to replace.
        replace_to: by this one.

    Returns:
        (num_tokens,), dtype of ``x``.
    """
    counts = until.diff(prepend=until.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts.long(), output_size=num_tokens)


@contextmanager
def _new_expert_kernels(model: Any) -> Iterator[None]:
    """Inside it each stack of experts that is loaded gets a new kernel; the others keep theirs."""
    old = []
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            old.append((method, method.moe_kernel))
            method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in old:
            if method.moe_kernel is None:
                method.moe_kernel = kernel


@contextmanager
def quiet_part() -> Iterator[None]:
    """Inside it vLLM does not warn of each layer that a sync leaves as it is, because only a part was sent."""

    def keep(record: logging.LogRecord) -> bool:
        return not any(text in str(record.msg) for text in _LEFT_AS_IT_IS)

    loggers = [logging.getLogger(name) for name in _LOADERS]
    for one in loggers:
        one.addFilter(keep)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(keep)


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
        part = (Path(weights_path) / BASE).is_file()
        with whole_load(self.model_runner.model), quiet_part() if part else nullcontext():
            self.reload_weights(weights_path=weights_path)
