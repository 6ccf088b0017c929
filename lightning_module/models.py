"""The policy: a causal or vision-language LM of ``transformers``, with or without an adapter, whole or sharded."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.tensor import DTensor

from trl_offpolicy.rollouts.model_parts import blocks, is_flattened

T = TypeVar("T")

FSDP1_PREFIX = "_fsdp_wrapped_module."
"""What FSDP1 adds to the names of the parameters that it wraps."""


def load_policy(
    model: str | nn.Module, options: Mapping[str, Any] | None, adapter: Any = None, *, checkpointing: bool = False
) -> nn.Module:
    """Load the model, add the adapter and switch dropout off.

    Under ZeRO-3 every rank loads the whole model, which DeepSpeed partitions when training begins.

    Args:
        model: folder or Hub name, or a causal or vision-language LM.
        options: keyword arguments of ``from_pretrained``; the dtype is float32 unless ``dtype`` is given.
        adapter: fields of ``peft.LoraConfig``, or a PEFT configuration, or None.
        checkpointing: whether to use gradient checkpointing, which saves memory and costs time in the backward.
    """
    with _not_partitioned():
        policy = _loaded(model, options, adapter)
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        if adapter is not None:
            policy.enable_input_require_grads()
    without_dropout(policy)
    policy.train()
    whole: nn.Module = policy
    return whole


def _loaded(model: str | nn.Module, options: Mapping[str, Any] | None, adapter: Any) -> Any:
    policy: Any = model
    if isinstance(model, str):
        policy = _loader(model, options or {}).from_pretrained(model, **{"dtype": "float32", **(options or {})})
    if adapter is None:
        return policy
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"task_type": "CAUSAL_LM", **adapter}) if isinstance(adapter, Mapping) else adapter
    return get_peft_model(policy, config)


def _loader(model: str, options: Mapping[str, Any]) -> Any:
    """The class that loads the model: that of vision-language models if its configuration has a part for images."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    named = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    config = AutoConfig.from_pretrained(model, **named)
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def reads_images(config: Any) -> bool:
    """True if a model's configuration is that of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


@contextmanager
def _not_partitioned() -> Iterator[None]:
    """Leave the ``deepspeed.zero.Init`` that Lightning has opened.

    It takes each module apart as soon as it is made. What is written into the weights then does not arrive: neither
    those of ``from_pretrained`` nor the zeros of a LoRA adapter, which would start as noise.
    """
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if zero is None:
        yield
        return
    zero.shutdown_init_context()
    try:
        yield
    finally:
        zero.restore_init_context()


_RANDOM = re.compile("drop|^(input_)?jitter_noise$")
"""Names of numbers by which a layer draws in training: dropout, layerdrop, and a router's noise. Not
``router_jitter_noise`` of Phi's mixtures, which is a threshold, in evaluation too."""


def without_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: random log-probs would look like mismatch.

    Many models keep the probability as a number and call a function with it, such as ``attention_dropout`` of Llama.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and _RANDOM.search(name):
                setattr(module, name, 0.0)


def reference_of(policy: nn.Module) -> nn.Module | None:
    """A frozen copy of the current weights; None for an adapter, which can be switched off instead."""
    if is_adapted(policy):
        return None
    frozen = copy.deepcopy(policy).eval()
    return frozen.requires_grad_(False)


def is_adapted(policy: nn.Module) -> bool:
    """True if the policy is a PEFT model, that is, has an adapter."""
    return hasattr(policy, "peft_config")


def without_adapter(policy: Any) -> AbstractContextManager[Any]:
    """A context in which a PEFT model computes without its adapter, as its base model."""
    context: AbstractContextManager[Any] = policy.disable_adapter()
    return context


def trained_names(policy: nn.Module) -> set[str]:
    """Names of the parameters that require a gradient."""
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def keeps_whole(strategy: Strategy) -> bool:
    """True if every rank holds the whole policy: one device, or DDP, of which DeepSpeed's is a subclass."""
    return isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)


def shard(policy: nn.Module, mesh: Any, **options: Any) -> None:
    """Shard with FSDP2, over the data-parallel part of the mesh: first every block, then the rest.

    Raises:
        ValueError: the model does not name its blocks in ``_no_split_modules``.
    """
    from torch.distributed.fsdp import fully_shard

    base: Any = policy.get_base_model() if is_adapted(policy) else policy  # type: ignore[operator]
    layers = blocks(base)
    if not layers:
        raise ValueError(
            f"model must name its blocks in _no_split_modules to be sharded, but {type(base).__name__} does not."
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh["data_parallel"], **options)
    fully_shard(base, mesh=mesh["data_parallel"], **options)
    base._is_fsdp_managed_module = True  # transformers' generate then keeps the ranks together


def check_mesh(mesh: Any) -> None:
    """Raise if a model that is sharded over the data-parallel part of the mesh would be whole on several ranks.

    Tensor parallelism is not applied. Ranks along that part would each train a model of their own, on other prompts,
    and nothing would sum their gradients.

    Args:
        mesh: of ``ModelParallelStrategy``; None = another strategy.

    Raises:
        ValueError: the tensor-parallel part has several ranks.
    """
    if mesh is None:
        return
    data, tensor = mesh["data_parallel"].size(), mesh["tensor_parallel"].size()
    if tensor > 1:
        raise ValueError(
            f"strategy must be ModelParallelStrategy(data_parallel_size={data * tensor}, tensor_parallel_size=1), as "
            "the policy is sharded over data_parallel_size ranks and no tensor parallelism is applied, but got "
            f"data_parallel_size={data} and tensor_parallel_size={tensor}. Lightning's defaults are the number of "
            "nodes and of processes on each."
        )


def check_sharded(policy: nn.Module, mesh: Any) -> None:
    """Raise if a policy that is loaded already is whole where the strategy shards: each rank would train its own.

    Args:
        policy: of an earlier ``fit``, ``validate``, ``test`` or ``predict`` of the same module.
        mesh: of ``ModelParallelStrategy``; None = another strategy.

    Raises:
        ValueError: no parameter is sharded.
    """
    if mesh is not None and not any(isinstance(weight, DTensor) for weight in policy.parameters()):
        raise ValueError(
            "the module must be a new one under ModelParallelStrategy, but its policy was loaded whole by a trainer "
            "with another strategy."
        )


def check_devices(trainer: Trainer) -> None:
    """Raise if the strategy is DeepSpeed and the devices are no GPUs, before Lightning does so in other words.

    A subclass with a ``setup_environment`` of its own decides itself.

    Raises:
        ValueError: the message names the trainer's fields.
    """
    strategy, name = trainer.strategy, type(trainer.accelerator).__name__
    theirs = getattr(type(strategy), "setup_environment", None) is DeepSpeedStrategy.setup_environment
    if theirs and not isinstance(trainer.accelerator, CUDAAccelerator):
        raise ValueError(
            "strategy must be ddp or FSDP2, which is ModelParallelStrategy(data_parallel_size="
            f"{trainer.world_size}, tensor_parallel_size=1), where accelerator is no CUDA GPU, but got "
            f"{type(strategy).__name__} on a {name}, which Lightning does not run."
        )


def whole_weights(wrapped: nn.Module | None) -> AbstractContextManager[Any]:
    """A context in which the policy's weights can be read by name: it gathers those that FSDP1 has flattened.

    FSDP2 and ZeRO-3 parameters are gathered one module at a time when they are read, so they need nothing here.

    Args:
        wrapped: the model as the strategy wraps it.
    """
    if wrapped is None or not is_flattened(wrapped):
        return nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    context: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(wrapped, writeback=False)
    return context


def in_forward(wrapped: nn.Module | None, module: Any, function: Callable[[], T]) -> T:
    """Call ``function`` inside the forward of the model as the strategy wraps it, if FSDP1 does.

    FSDP1 gathers the parts that no wrapped block owns (embedding, LM head) in the forward of the whole alone.

    Args:
        wrapped: the model as the strategy wraps it.
        module: the LightningModule inside it.
        function: called once, on all ranks.
    """
    if wrapped is None or not is_flattened(wrapped):
        return function()
    found: list[T] = []
    module.forward = lambda: found.append(function())
    try:
        wrapped()
    finally:
        del module.forward
    return found[0]


@contextmanager
def zero3_gathered(policy: nn.Module, wrapped: Any = None) -> Iterator[None]:
    """A context in which all ZeRO-3 parameters are whole, and a forward is a rank's own: for generation.

    DeepSpeed's hooks gather and free the parameters of each module that is called, on all ranks together. Ranks
    generate for different numbers of tokens, so their calls would not meet: inside, these hooks are left out.

    Args:
        policy: the model.
        wrapped: the model as the strategy wraps it. Inside its forward some parameters are on their way already, ahead
            of their module; they are waited for and freed first, or they would be neither whole nor in parts.
    """
    parameters = list(policy.parameters())
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        yield
        return
    import deepspeed

    if hasattr(wrapped, "empty_partition_cache"):
        wrapped.empty_partition_cache()
    with deepspeed.zero.GatheredParameters(parameters), _without_hooks(policy, of="deepspeed"):
        yield


@contextmanager
def _without_hooks(model: nn.Module, *, of: str) -> Iterator[None]:
    """A context in which the forward hooks that a package has put on the parts of a model are not called."""
    hooks = [one for part in model.modules() for one in (part._forward_pre_hooks, part._forward_hooks)]
    before: list[tuple[Any, dict[int, Any]]] = [(one, dict(one)) for one in hooks]
    for one, all_of_them in before:
        for key, hook in all_of_them.items():
            if hook.__module__.partition(".")[0] == of:
                del one[key]
    try:
        yield
    finally:
        for one, all_of_them in before:
            added = {key: hook for key, hook in one.items() if key not in all_of_them}
            one.clear()  # in its place: the handles of the hooks know this dict
            one.update({**all_of_them, **added})
