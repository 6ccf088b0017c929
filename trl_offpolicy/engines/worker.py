"""What vLLM's worker says of itself: its weights by the trainer's names, its modules' settings, the requests it got.

Each function takes the worker first. In this process they are called through ``LLM.collective_rpc``. On a server they
are methods of :class:`WorkerExtension`, which ``trl-offpolicy serve`` adds to the worker.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.engines.cpu_bugs import ReloadsExperts
from trl_offpolicy.engines.effective import INVARIANT_VARIABLES, ROPE_POSITIONS, settings_of
from trl_offpolicy.engines.weights.broadcast import ReceivesWeights
from trl_offpolicy.engines.weights.summary import checksum, sample_of, summarise

MOST_REQUESTS = 64  # of a watched batch
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj", "w1", "w3"), "w2_weight": ("down_proj", "w2")}
"""vLLM's stacked experts, and the matrices of a checkpoint that they are made of."""


class WorkerExtension(ReloadsExperts, ReceivesWeights):
    """An extension of vLLM's worker: weights by a reload or by broadcast, and answers about itself in plain JSON."""

    def offpolicy_weights(self, names: list[str] | None = None, sample: int = 0) -> dict[str, Any]:
        """See :func:`weights_of`."""
        return weights_of(self, names, sample)

    def offpolicy_shapes(self) -> dict[str, Any]:
        """See :func:`shapes_of`."""
        return shapes_of(self)

    def offpolicy_facts(self) -> dict[str, Any]:
        """See :func:`facts_of`."""
        return facts_of(self)

    def offpolicy_watch(self, on: bool = True) -> dict[str, Any]:
        """See :func:`watch_requests`."""
        return watch_requests(self, on)


EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
"""``trl-offpolicy serve`` adds this to vLLM's worker (``--worker-extension-cls``)."""


# --------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Piece:
    """A weight of the engine under the trainer's name.

    Args:
        name: name in the trainer's checkpoint; of stacked experts, that of the stack.
        tensor: its values; None if the engine keeps them in a form that cannot be read.
        ordered: False = in a kernel's layout, so that only its values can be compared, not their places.
        start: first row of an embedding's shard.
    """

    name: str
    tensor: Tensor | None
    ordered: bool = True
    start: int | None = None


def weights_of(worker: Any, names: Collection[str] | None = None, sample: int = 0) -> dict[str, Any]:
    """Summaries of the worker's weights.

    Args:
        worker: vLLM's worker.
        names: only these; None = all.
        sample: number of values to read of each weight, beside its checksum, and a checksum without their order.

    Returns:
        ``pieces`` by name (:func:`~trl_offpolicy.engines.weights.summary.summarise`; None = unreadable), the worker's
        ``tp_rank`` and ``tp_size``, its model's ``dtype``, and ``tied``: names that share another one's tensor.
    """
    model = worker.model_runner.model
    tied = shared_names(model)
    parallel = worker.vllm_config.parallel_config
    pieces: dict[str, Any] = {}
    for piece in [*pieces_of(model, None if names is None else set(names)), *adapter_pieces(worker)]:
        if names is not None and piece.name not in names:
            continue
        found = None if piece.tensor is None else summarise(piece.tensor, ordered=piece.ordered)
        if found is not None and piece.tensor is not None:
            found |= {"ordered": piece.ordered, "start": piece.start}
            if sample and piece.ordered:
                found |= {"sample": sample_of(piece.tensor, sample), "values": checksum(piece.tensor, ordered=False)}
        pieces[piece.name] = found
    size = int(parallel.tensor_parallel_size)
    dtype = str(worker.vllm_config.model_config.dtype).removeprefix("torch.")
    return {"pieces": pieces, "tied": tied, "tp_rank": int(worker.rank) % size, "tp_size": size, "dtype": dtype}


def shared_names(model: torch.nn.Module) -> dict[str, str]:
    """Names of weights that are the same tensor as another one, by that one's name."""
    first: dict[int, str] = {}
    shared = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        plain = _plain(name)
        if id(weight) in first and first[id(weight)] != plain:
            shared[plain] = first[id(weight)]
        first.setdefault(id(weight), plain)
    return shared


def names_of(model: torch.nn.Module) -> tuple[set[str], dict[str, str]]:
    """Names of the weights of vLLM's model, and those that share another one's tensor (:func:`shared_names`)."""
    return {_plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}, shared_names(model)


def _plain(name: str) -> str:
    return name.replace(".base_layer.", ".")  # vLLM wraps layers that an adapter may touch


@torch.no_grad()
def pieces_of(model: torch.nn.Module, wanted: set[str] | None = None) -> Iterator[Piece]:
    """The weights of vLLM's model, those that it fuses (qkv_proj, gate_up_proj) taken apart.

    Args:
        model: vLLM's model.
        wanted: names in which the caller is interested; layers without any of them are not read.
    """
    for module, name, whole, parts in _named_parts(model):
        if wanted is None or wanted & {whole, *parts}:
            yield from _taken_apart(module, name, whole, parts)


def _named_parts(model: torch.nn.Module) -> Iterator[tuple[Any, str, str, list[str]]]:
    """(module, name in it, whole name, names of the parts that vLLM has fused) of each parameter, once."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            whole = _plain(f"{path}.{name}")
            owner = whole.removesuffix(f".{name}")
            leaf = owner.rpartition(".")[2]
            yield module, name, whole, [f"{owner.removesuffix(leaf)}{part}.{name}" for part in fused.get(leaf, ())]


def _taken_apart(module: Any, name: str, whole: str, parts: list[str]) -> Iterator[Piece]:
    weight = getattr(module, name)
    tensor = _packed(module) if name == "weight" and not weight.numel() else weight.data
    if name in _EXPERTS and tensor is not None:
        yield Piece(whole, tensor, ordered=False)
        return
    sizes = list(getattr(module, "output_partition_sizes", ()))
    if tensor is None or not tensor.numel():
        yield from (Piece(part, None) for part in parts or [whole])
    elif len(parts) > 1 and len(parts) == len(sizes) and sum(sizes) == len(tensor):
        yield from (Piece(part, rows) for part, rows in zip(parts, tensor.split(sizes), strict=True))
    elif (shard := getattr(module, "shard_indices", None)) is not None and name == "weight":
        yield Piece(whole, tensor[: shard.num_org_elements], start=int(shard.org_vocab_start_index))
    else:
        yield Piece(parts[0] if len(parts) == 1 else whole, tensor)


def _packed(module: Any) -> Tensor | None:
    """The (out, in) matrix that vLLM's CPU engine has packed for its kernel and deleted.

    The kernel itself gives it back: a row of the identity selects a column, and adding zeros rounds nothing.
    """
    multiply = getattr(module, "cpu_linear", None)
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    dtype = getattr(module, "params_dtype", module.weight.dtype)
    if multiply is None or width is None or not dtype.is_floating_point:
        return None
    columns = [multiply(part, module.weight, None) for part in torch.split(torch.eye(width, dtype=dtype), 512)]
    return torch.cat(columns).t().contiguous()


def adapter_pieces(worker: Any) -> Iterator[Piece]:
    """The adapters that the worker holds, as ``adapter:ID:MODULE.lora_A`` and ``lora_B`` (times its scaling)."""
    manager = getattr(getattr(worker.model_runner, "lora_manager", None), "_adapter_manager", None)
    if manager is None:
        return
    fused = getattr(worker.model_runner.model, "packed_modules_mapping", None) or {}
    for number, adapter in manager.list_adapters().items():
        for module, layer in adapter.loras.items():
            leaf = module.rpartition(".")[2]
            several = isinstance(layer.lora_a, list)
            names = [f"{module.removesuffix(leaf)}{part}" for part in fused.get(leaf, [leaf])] if several else [module]
            ups, downs = (layer.lora_b, layer.lora_a) if several else ([layer.lora_b], [layer.lora_a])
            scalings = layer.scaling if several else [layer.scaling]
            for name, a, b, scaling in zip(names, downs, ups, scalings, strict=False):
                if a is not None and b is not None:
                    yield Piece(f"adapter:{number}:{name}.lora_A", a)
                    yield Piece(f"adapter:{number}:{name}.lora_B", b * scaling)


def shapes_of(worker: Any) -> dict[str, Any]:
    """Whole shapes of the worker's weights, which no kernel's layout and no number of workers changes.

    Returns:
        ``shapes`` by the trainer's names (of stacked experts, that of one expert's matrix; None = not known), ``tied``
        as in :func:`weights_of`, ``experts``: their number in a layer (0 = none), ``head``: true if the model's
        configuration has an output head of its own, ``quantized``: true if weights are not kept as they are in the
        trainer, so that the engine has weights under other names, ``lora_modules``: the last names of the modules that
        an adapter may touch (None = all).
    """
    model, config = worker.model_runner.model, worker.vllm_config
    size = int(config.parallel_config.tensor_parallel_size)
    shapes: dict[str, list[int] | None] = {}
    experts = 0
    for module, name, whole, parts in _named_parts(model):
        if name in _EXPERTS:
            experts, shapes[whole] = _of_experts(module, experts)
            continue
        for number, part in enumerate(parts or [whole]):
            shapes[part] = _whole_shape(module, name, number, count=len(parts or [whole]), tp_size=size)
    text_config = config.model_config.hf_text_config
    return {
        "shapes": shapes,
        "tied": shared_names(model),
        "experts": experts,
        "head": getattr(text_config, "tie_word_embeddings", None) is False,
        "quantized": config.model_config.quantization is not None,
        "lora_modules": _lora_modules(model, getattr(config, "lora_config", None)),
    }


def _lora_modules(model: Any, lora: Any) -> list[str] | None:
    """The last names of the modules that vLLM wraps for adapters; of others it drops the adapter, and says nothing."""
    targets = getattr(lora, "target_modules", None)
    if targets is None:
        return None
    wrapped = set(targets)
    for packed, parts in getattr(model, "packed_modules_mapping", {}).items():  # q_proj, k_proj and v_proj are one
        if wrapped & {packed, *parts}:
            wrapped |= {packed, *parts}
    return sorted(wrapped)


def _of_experts(module: Any, known: int) -> tuple[int, list[int] | None]:
    """(number of experts, shape of a matrix of one) of a stack; older versions of vLLM do not tell them here."""
    config = getattr(module, "moe_config", None)
    count = getattr(config, "num_logical_experts", None) or known
    hidden = getattr(config, "hidden_dim_unpadded", None) or getattr(config, "hidden_dim", None)
    width = getattr(config, "intermediate_size", None)
    return int(count), None if hidden is None or width is None else [int(width), int(hidden)]


def _whole_shape(module: Any, name: str, number: int, *, count: int, tp_size: int) -> list[int] | None:
    """Shape of a weight or bias over all workers, from the sizes that vLLM's layer was made with."""
    sizes = list(getattr(module, "output_sizes", ()) or ())
    heads = getattr(module, "total_num_heads", None)
    rows = getattr(module, "org_vocab_size", None) or getattr(module, "output_size", None)
    if heads is not None and count == 3:  # vLLM's own sizes count the copies of heads that workers share
        pairs = (
            (heads, "head_size"),
            (module.total_num_kv_heads, "head_size"),
            (module.total_num_kv_heads, "v_head_size"),
        )
        rows = pairs[number][0] * getattr(module, pairs[number][1], module.head_size)
    elif count > 1:
        rows = sizes[number] if len(sizes) == count else None
    columns = getattr(module, "input_size", None) or getattr(module, "embedding_dim", None)
    if rows is not None and (name == "bias" or columns is not None):
        return [int(rows)] if name == "bias" else [int(rows), int(columns or 0)]
    weight = getattr(module, name)
    plain = tp_size == 1 and count == 1 and weight.numel() and weight.dtype in _PLAIN
    return list(weight.shape) if plain else None


_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ----------------------------------------------------------------------------------------------------------- facts


def facts_of(worker: Any) -> dict[str, Any]:
    """Fields of :class:`~trl_offpolicy.engines.effective.EngineFacts`, from the worker's model and configuration."""
    from vllm import envs

    config = worker.vllm_config
    text_config = config.model_config.hf_text_config.to_dict()
    environment = {name: _variable(envs, name) for name in INVARIANT_VARIABLES}
    return {
        "settings": settings_of(config, environment) | _of_runner(worker.model_runner),
        "defaults": dict(config.model_config.get_diff_sampling_param()),
        "model_config": _json(text_config),
        "modules": module_facts(worker.model_runner.model),
    }


def _variable(envs: Any, name: str) -> Any:
    """A variable as vLLM reads it; of one that vLLM does not know (a patch reads it), its value in the environment."""
    value = getattr(envs, name, None)
    if value is not None or (found := os.environ.get(name)) is None:
        return value
    return found.lower() not in ("", "0", "false")


def _of_runner(runner: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    processors = getattr(getattr(runner, "input_batch", None), "logitsprocs", None)
    if processors is not None:
        own = [type(one) for one in processors.all if not type(one).__module__.startswith("vllm.v1.sample")]
        found["logits_processors"] = [f"{one.__module__}.{one.__qualname__}" for one in own]
    attention = next((m for m in runner.model.modules() if hasattr(m, "kv_cache_torch_dtype")), None)
    if attention is not None:
        found["kv_cache_torch_dtype"] = str(attention.kv_cache_torch_dtype).removeprefix("torch.")
        backend = getattr(attention, "backend", None)
        found["attention_backend"] = getattr(backend, "name", None) or str(backend)
    return found


def module_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Numbers of vLLM's modules that decide the log-probs, by the names that the trainer's modules have.

    See :func:`~trl_offpolicy.engines.effective.facts_of_model`, which says the same of a model of transformers.
    """
    norms, scales, windows, caps, ropes = {}, {}, {}, {}, {}
    logits: dict[str, Any] = {}
    for path, module in ((_plain(f"{path}."), module) for path, module in model.named_modules()):
        name, one = path.rstrip("."), _plain_module(module)
        if (epsilon := getattr(one, "variance_epsilon", getattr(one, "eps", None))) is not None:
            norms[name] = float(epsilon)
        if hasattr(one, "impl") and hasattr(one.impl, "scale"):
            owner = name.removesuffix(".attn")
            scales[owner] = float(one.impl.scale)
            windows[owner] = getattr(one, "sliding_window", None)
            caps[owner] = float(getattr(one.impl, "logits_soft_cap", None) or 0.0)
        if isinstance(getattr(one, "cos_sin_cache", None), Tensor):
            ropes[id(one)] = one
        if hasattr(one, "soft_cap") and hasattr(one, "org_vocab_size"):
            logits = {"scale": float(one.scale), "soft_cap": float(one.soft_cap or 0.0), "tokens": one.org_vocab_size}
    (rope,) = ropes.values() if len(ropes) == 1 else (None,)
    return {
        "norm_eps": norms,
        "attention_scale": scales,
        "attention_window": windows,
        "attention_soft_cap": caps,
        "logits": logits,
        "rope": None if rope is None else _rope(rope.cos_sin_cache),
    }


def _plain_module(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def _rope(cache: Tensor) -> dict[str, Any]:
    """Cosines and sines at a few positions, with the dtype that they are kept in."""
    rows = [position for position in ROPE_POSITIONS if position < len(cache)]
    return {"dtype": str(cache.dtype).removeprefix("torch."), "angles": cache[rows].double().tolist()}


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -------------------------------------------------------------------------------------------------------- requests


def watch_requests(worker: Any, on: bool = True) -> dict[str, Any]:
    """Note every new request from now on, or stop it and return ``requests``, at most 64 of them.

    Each is ``prompt_token_ids``, ``sampling`` (the options that are not vLLM's defaults, as the worker got them) and
    ``adapter`` (the name of the LoRA adapter or None).
    """
    runner = worker.model_runner
    noted: list[dict[str, Any]] = vars(runner).pop("_offpolicy_noted", [])
    if "execute_model" in vars(runner):
        del runner.execute_model  # the method of the class shows again
    if on:
        runner._offpolicy_noted = noted = []
        original = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            noted.extend(map(_request, scheduled.scheduled_new_reqs[: MOST_REQUESTS - len(noted)]))
            return original(scheduled, *args, **kwargs)

        runner.execute_model = execute_model
    return {"requests": [] if on else noted}


def _request(new: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(new.prompt_token_ids or ()),
        "sampling": {} if new.sampling_params is None else chosen_options(new.sampling_params),
        "adapter": None if new.lora_request is None else new.lora_request.lora_name,
        "adapter_id": None if new.lora_request is None else new.lora_request.lora_int_id,
    }


def chosen_options(parameters: Any) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams`` that differ from their defaults."""
    default = type(parameters)()
    names = [name for name in parameters.__struct_fields__ if not name.startswith("_")]
    values = {name: getattr(parameters, name) for name in names}
    return {name: _json(value) for name, value in values.items() if value != getattr(default, name)}
