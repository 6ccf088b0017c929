"""Compares names and shapes of the trainer's weights with the engine's before anything is sent.

An engine takes weights of another model without a word where it can: a wider MLP (vLLM's CPU kernels take any width), a
model with fewer layers (the others keep what they had). Where it cannot, it stops in the middle.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from trl_offpolicy.engines.engine import SyncError

Shape = Sequence[int]

_EXPERTS = {
    "w13_weight": (".gate_proj.weight", ".up_proj.weight", ".w1.weight", ".w3.weight"),
    "w2_weight": (".down_proj.weight", ".w2.weight"),
}
_LAYER = re.compile(r"^(.*\.(?:layers|h|blocks)\.)(\d+)\.")
_MIXTURE = re.compile(r"expert|moe")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ADAPTED = re.compile(r"^(?:base_model\.model\.)?(.*)\.lora_([AB])(?:\.default)?\.weight$")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def stack_of(name: str, held: Mapping[str, Any]) -> str | None:
    """The engine's stack of experts that holds a checkpoint's matrix of one expert; None if it is no expert's.

    Args:
        name: name of the matrix in the trainer's checkpoint.
        held: whatever the engine holds, by its names.

    Example:
        >>> stack_of("model.layers.0.mlp.experts.3.up_proj.weight", {"model.layers.0.mlp.experts.w13_weight": None})
        'model.layers.0.mlp.experts.w13_weight'
    """
    prefix, _, rest = name.partition(".experts.")
    for stacked, parts in _EXPERTS.items():
        if rest and name.endswith(parts):
            places = (f"{prefix}.experts.{stacked}", f"{prefix}.experts.routed_experts.{stacked}")
            return next((place for place in places if place in held), None)
    return None


def why_not(sent: Mapping[str, Shape], answers: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the engine's model cannot hold these weights, in words; None = nothing speaks against it.

    A name that only one side knows is no reason by itself, because engines rename and fuse. It is one if it belongs to
    a layer that the other side lacks, or to a module that both have.

    Args:
        sent: shape of each weight that would be sent, by the name in the trainer's checkpoint.
        answers: what each worker of the engine says (:func:`~trl_offpolicy.engines.worker.shapes_of`).

    Example:
        >>> held = {"shapes": {"model.layers.0.mlp.up_proj.weight": [64, 32]}, "tied": {}, "quantized": False}
        >>> why_not({"model.layers.0.mlp.up_proj.weight": (96, 32)}, [held])
        'model.layers.0.mlp.up_proj.weight has shape (96, 32) in the trainer, but (64, 32) in the engine'
    """
    held: dict[str, Any] = {}
    tied: dict[str, str] = {}
    for answer in answers:
        held |= answer["shapes"]
        tied |= answer["tied"]
    for name, shape in sent.items():
        key = name if name in held else tied.get(name, stack_of(name, held))
        if key is not None and held.get(key) is not None and _sizes(shape) != _sizes(held[key]):
            ours, theirs = tuple(shape), tuple(held[key])
            return f"{name} has shape {ours} in the trainer, but {theirs} in the engine"
    reason = _experts(sent, held, answers) or _layers(sent, held)
    reason = reason or next((why for name in sent if (why := why_head_is_lost(name, held, tied))), None)
    if reason is not None or any(answer["quantized"] for answer in answers):
        return reason
    if any(answer.get("head") for answer in answers) and EMBEDDING in sent and HEAD not in {**sent, **tied}:
        return f"the engine has a {HEAD} of its own, which the trainer's model ties to its embeddings"
    return _siblings(sent, {**held, **dict.fromkeys(tied)})


def why_head_is_lost(name: str, held: Collection[str], tied: Mapping[str, str]) -> str | None:
    """Why the engine would drop a weight that is an output head, in words; None = it is none, or has a place.

    A trainer that ties its head sends it with the embeddings, under their name. vLLM skips a head of its own without a
    word if the engine's is tied, and would sample from the head that the embeddings give.

    Args:
        name: of the weight that would be sent.
        held: names of the engine's weights.
        tied: names that share another one's tensor in the engine, by that one's name.

    Example:
        >>> why_head_is_lost("lm_head.weight", ["lm_head.weight", "model.embed_tokens.weight"], {}) is None
        True
        >>> tied = {"lm_head.weight": "model.embed_tokens.weight"}
        >>> str(why_head_is_lost("lm_head.weight", ["model.embed_tokens.weight"], tied)).partition(":")[0]
        "the trainer has a lm_head.weight that differs from its embeddings, but the engine's head is its embeddings"
    """
    if not _is_head(name):
        return None
    pairs = {*tied, *tied.values()}
    # Some of vLLM's models have no head at all and multiply by the embeddings.
    has_none = any(one.endswith("embed_tokens.weight") for one in held) and not any("lm_head" in one for one in held)
    if not has_none and not any(map(_is_head, pairs)):
        return None
    return (
        f"the trainer has a {name} that differs from its embeddings, but the engine's head is its embeddings: it would "
        "drop the other. Leave lm_head and embed_tokens out of the adapter's modules_to_save and target_modules, set "
        "ensure_weight_tying: true in its LoraConfig so that both stay one, or take a model whose head is not "
        "tied (tie_word_embeddings: false)"
    )


def _is_head(name: str) -> bool:
    return f".{name}".endswith(f".{HEAD}")


def with_place(
    weights: Iterable[tuple[str, Tensor]], held: Collection[str], tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """The same names and tensors, for an engine whose weights are not compared before the sync.

    Args:
        weights: names and tensors to send.
        held: names of the engine's weights.
        tied: as for :func:`why_head_is_lost`.

    Raises:
        SyncError: at an output head that the engine would drop.
    """
    for name, tensor in weights:
        if reason := why_head_is_lost(name, held, tied):
            raise SyncError(f"The engine cannot take the trainer's weights: {reason}.")
        yield name, tensor


def why_not_adapter(sent: Mapping[str, Shape], answers: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the engine's model cannot take this LoRA adapter; None = nothing speaks against it.

    Args:
        sent: shape of each matrix, (rank, in) or (out, rank), by PEFT's name of it.
        answers: as for :func:`why_not`.
    """
    held = {name: shape for answer in answers for name, shape in answer["shapes"].items()}
    modules = {match[1]: None for name in sent if (match := _ADAPTED.match(name))}
    if reason := _layers([f"{module}.weight" for module in modules], held, whole=False):
        return reason
    wrapped = [answer["lora_modules"] for answer in answers if answer.get("lora_modules") is not None]
    if wrapped and (others := sorted({name.rpartition(".")[2] for name in modules} - set(wrapped[0]))):
        return (
            f"the adapter is on {', '.join(others)}, and the engine would drop it there: it applies adapters on "
            f"{', '.join(wrapped[0])} (trl-offpolicy serve --lora-modules NAME ...)"
        )
    for name, shape in sent.items():
        match = _ADAPTED.match(name)
        whole = None if match is None else held.get(f"{match[1]}.weight")
        if match is None or whole is None or len(whole) != 2 or len(shape) != 2:
            continue
        ours, theirs = (shape[1], whole[1]) if match[2] == "A" else (shape[0], whole[0])
        if ours != theirs:
            side = "inputs" if match[2] == "A" else "outputs"
            return f"the adapter of {match[1]} has {ours} {side}, but the engine's module has {theirs}"
    return None


def _sizes(shape: Shape) -> list[int]:
    """Sizes without those of 1 and without their order: engines drop them and transpose."""
    return sorted(size for size in shape if size != 1)


def _layers(sent: Iterable[str], held: Iterable[str], *, whole: bool = True) -> str | None:
    """Layers that one side lacks, in a stack of layers that both have; with ``whole`` the engine must lack none."""
    ours, theirs = _numbers(sent), _numbers(held)
    for stack in ours.keys() & theirs.keys():
        if (more := ours[stack] - theirs[stack]) or (whole and theirs[stack] - ours[stack]):
            other = "would have no place" if more else "of the engine would keep its old weights"
            layer = min(more or theirs[stack] - ours[stack])
            return (
                f"the trainer sends {len(ours[stack])} layers ({stack}*) and the engine has {len(theirs[stack])}: "
                f"{stack}{layer} {other}"
            )
    return None


def _numbers(names: Iterable[str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if match := _LAYER.match(name):
            found[match[1]].add(int(match[2]))
    return found


def _experts(sent: Iterable[str], held: Iterable[str], answers: Sequence[Mapping[str, Any]]) -> str | None:
    """Another number of experts than the engine has, or experts on one side alone."""
    for side, here, there in (("trainer", sent, held), ("engine", held, sent)):
        if any(".experts." in name for name in here) and not any(_MIXTURE.search(name) for name in there):
            return f"the {side}'s model is a mixture of experts, the other's is none"
    ours = max((int(match[1]) for name in sent if (match := _EXPERT.search(name))), default=-1) + 1
    theirs = max((int(answer.get("experts") or 0) for answer in answers), default=0)
    if ours and theirs and ours != theirs:
        return f"the trainer's model has {ours} experts a layer, the engine's {theirs}"
    return None


def _siblings(sent: Mapping[str, Any], held: Mapping[str, Any]) -> str | None:
    """A weight or bias that only one side has, of a module that both have."""
    for here, there, text in (
        (sent, held, "is in the trainer's model, but not in the engine's"),
        (held, sent, "is in the engine's model and would keep its values: the trainer's model has none"),
    ):
        for name in here:
            module, _, kind = name.rpartition(".")
            if kind in ("weight", "bias") and name not in there:
                other = f"{module}.{'bias' if kind == 'weight' else 'weight'}"
                if other in here and other in there:
                    return f"{name} {text}"
    return None
