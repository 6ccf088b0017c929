"""Compares weights tensor by tensor through the engine's own worker, by checksums and small samples."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_offpolicy.diagnosis.attribution.evidence import Floats
from trl_offpolicy.diagnosis.probe.asked import Asked, not_compared, row
from trl_offpolicy.engines.interview import Interview
from trl_offpolicy.engines.rounding import parse_rounding, round_weights
from trl_offpolicy.engines.weights.shapes import stack_of
from trl_offpolicy.engines.weights.source import ModelWeights, plain_name
from trl_offpolicy.engines.weights.summary import SAMPLE, checksum, joined, sample_of

Stream = Callable[[], Iterator[tuple[str, Tensor]]]
ROUNDINGS: dict[str, Any] = {
    "bf16": "bf16", "fp16": "fp16", "int8": "int8", "int4": "int4", "fp8": "fp8",
    "fp8, one scale": {"type": "fp8", "scale": "tensor"},
}  # fmt: skip
"""Roundings that are tried on weights that differ."""
SAMPLED = 64  # of the tensors that differ, so many are read more closely
FITTED = 0.98  # share of a difference that a scale must explain before it is named
_TINY = 1e-7  # below it, 16-bit floats have no relative precision left
CLEAR = 6.0  # standard errors by which a difference must lie along the adapter
OTHER_MODEL = 0.3  # relative size of a difference from which on it is not a training step


@dataclass(frozen=True)
class Difference:
    """Samples of a tensor whose checksums differ, at the same places.

    Args:
        name: the trainer's name of the tensor.
        engine: (N,) values of the engine.
        trainer: (N,) values of the trainer, rounded to the engine's dtype.
        exact: (N,) values of the trainer before that rounding.
        base: (N,) values of the trainer without its adapter, not rounded; None = nothing is adapted here.
        ulps: units in the last place of both data types, relative to a value: the largest difference by rounding.
    """

    name: str
    engine: Floats
    trainer: Floats
    exact: Floats
    base: Floats | None = None
    ulps: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """True if both can be roundings of the same numbers, to the engine's dtype and the trainer's."""
        size = np.maximum(np.abs(self.engine), np.abs(self.exact))
        return bool(self.ulps) and bool((np.abs(self.engine - self.exact) <= self.ulps * size + _TINY).all())

    @property
    def gap(self) -> Floats:
        """(N,) engine minus trainer."""
        gap: Floats = self.engine - self.trainer
        return gap

    @property
    def relative(self) -> float:
        """Root mean square of the difference, in units of that of the weights."""
        size = float(np.sqrt(np.mean(self.trainer**2)))
        return float(np.sqrt(np.mean(self.gap**2))) / size if size else float("inf")


@dataclass
class Comparison:
    """What the comparison of all tensors found.

    Args:
        equal: number of tensors that are equal, bit for bit.
        differing: names of those that are not.
        unread: names that could not be read or have no counterpart, with the reason.
        dtype: data type of the engine's weights.
        kept: data type of the trainer's weights.
        samples: samples of some of the differing ones.
        rounding: a rounding that makes the trainer's weights equal to the engine's; None = none does.
        adapter: names of the trainer's adapter matrices and whether they are equal; empty = not compared by themselves.
    """

    equal: int = 0
    differing: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    dtype: str = ""
    kept: str = ""
    samples: list[Difference] = field(default_factory=list)
    rounding: str | None = None
    adapter: dict[str, bool] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------- comparison


def weight_rows(
    interview: Interview, model: Any, *, adapter_id: int | None = None, answers: list[dict[str, Any]] | None = None
) -> list[Asked]:
    """Rows on weights and adapter.

    Args:
        interview: the engine.
        model: the trainer's model.
        adapter_id: vLLM's number of the adapter that the requests named; None = they named none.
        answers: the engine's weights, if it was asked for them already.
    """
    rows = []
    if interview.weight_rounding is not None:
        kind = parse_rounding(interview.weight_rounding).type
        rows.append(row("precision", "rounding of the linear weights", kind, "none", "precision", equal=False))
    answers = interview.weights() if answers is None else answers
    if answers is None:
        missing = [not_compared("weights", "weights", interview.why), not_compared("adapter", "adapter", interview.why)]
        return [*rows, *missing]
    found = compare(interview, answers, model, adapter_id=adapter_id)
    return [*rows, *judge(found, adapted=hasattr(model, "peft_config"), hot=adapter_id is not None)]


def compare(interview: Interview, answers: list[dict[str, Any]], model: Any, *, adapter_id: int | None) -> Comparison:
    """Compare checksums, then look closer where they differ."""
    hot = adapter_id is not None
    kept = str(next(model.parameters()).dtype).removeprefix("torch.")
    found = Comparison(dtype=str(answers[0]["dtype"]), kept=kept)
    stream = _trainer_stream(model, answers, merged=not hot, rounding=interview.weight_rounding)
    _checksums(found, answers, stream)
    if hot:
        _adapter(found, answers, model, int(adapter_id or 0))
    if not found.differing:
        return found
    # Evenly spread over the model, so that each kind of layer and both ends are among them.
    places = np.unique(np.linspace(0, len(found.differing) - 1, SAMPLED).astype(int))
    names = [found.differing[place] for place in places]
    closer = interview.weights(names, sample=SAMPLE)
    if closer is not None:
        _sample(found, closer, stream, {} if hot else unadapted(model), set(names))
        found.rounding = _rounding(closer, stream, set(names))
    return found


def _trainer_stream(model: Any, answers: list[dict[str, Any]], *, merged: bool, rounding: Any) -> Stream:
    """The trainer's weights as the engine should hold them, with the names that the engine has.

    A tied head is one tensor under two names. Whether engine and trainer tie it is compared by its values.
    """
    held = set().union(*(answer["pieces"] for answer in answers))
    tied = {name: other for answer in answers for name, other in answer["tied"].items()}
    embedding = "model.embed_tokens.weight"

    def stream() -> Iterator[tuple[str, Tensor]]:
        plain = ModelWeights(model).merged() if merged else iter(unadapted(model, everything=True).items())
        named = plain if rounding is None else round_weights(plain, rounding)
        head = False
        embedded: Tensor | None = None
        for name, weight in named:
            head = head or name == "lm_head.weight"
            embedded = weight if name == embedding else embedded
            yield name, weight
        if not head and embedded is not None and "lm_head.weight" in held and "lm_head.weight" not in tied:
            yield "lm_head.weight", embedded

    return stream


def unadapted(model: Any, *, everything: bool = False) -> dict[str, Tensor]:
    """The trainer's weights without its adapter: those of adapted layers, or all."""
    found = {}
    for name, weight in model.named_parameters():
        if "lora_" in name:
            continue
        if everything or ".base_layer." in name:
            found[plain_name(name).replace(".base_layer.", ".")] = weight.data
    return found


@torch.no_grad()
def _checksums(found: Comparison, answers: list[dict[str, Any]], stream: Stream) -> None:
    """Compare what each worker holds. Weights that no worker has under the trainer's name are unread."""
    tied = {name: other for answer in answers for name, other in answer["tied"].items()}
    stacks: dict[tuple[int, str], list[str]] = defaultdict(list)
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for name, weight in stream():
        known = False
        for number, answer in enumerate(answers):
            pieces = answer["pieces"]
            stack = stack_of(name, pieces)
            held = name if name in pieces else tied.get(name, stack)
            if held is None:
                continue
            known = True
            piece = pieces[held]
            if piece is None:
                found.unread[name] = "the engine keeps it in a form that cannot be read"
            elif piece["dtype"] not in _FLOATS:
                found.unread[name] = f"the engine keeps it as {piece['dtype']}"
            elif stack is not None:
                if answer["tp_size"] > 1:
                    found.unread[name] = "experts that are split over several workers"
                else:
                    stacks[number, stack].append(checksum(_cast(weight, piece, answer), ordered=False))
            elif (part := shard(weight, piece, answer)) is None:
                found.unread[name] = f"shape {piece['shape']} in the engine, {list(weight.shape)} in the trainer"
            else:
                outcomes[name].append(_same(part, piece, answer["dtype"]))
        if not known:
            found.unread[name] = "the engine has no weight of this name"
    for (number, stack), parts in stacks.items():
        outcomes[stack].append(joined(parts) == answers[number]["pieces"][stack]["checksum"])
    for name, same in outcomes.items():
        if all(same):
            found.equal += 1
        else:
            found.differing.append(name)


_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def shard(weight: Tensor, piece: Mapping[str, Any], answer: Mapping[str, Any]) -> Tensor | None:
    """The part of a whole tensor that one worker holds; None if its shape is no part of it.

    Args:
        weight: the trainer's whole tensor.
        piece: the worker's summary of its part.
        answer: the worker's answer, with ``tp_rank`` and ``tp_size``.
    """
    shape = list(piece["shape"])
    if len(shape) != weight.dim():
        return None
    for dim, (whole, part) in enumerate(zip(weight.shape, shape, strict=True)):
        if whole == part:
            continue
        start = piece.get("start") if dim == 0 else None
        if start is None:
            if not part or whole % part or answer["tp_size"] % (whole // part):
                return None
            # Heads of keys and values are repeated where there are fewer of them than workers.
            start = int(answer["tp_rank"]) // (int(answer["tp_size"]) // (whole // part)) * part
        weight = weight.narrow(dim, start, min(part, whole - start))
    return weight if list(weight.shape) == shape else None


def _cast(weight: Tensor, piece: Mapping[str, Any], answer: Mapping[str, Any]) -> Tensor:
    return weight.to(_FLOATS[answer["dtype"]]).to(_FLOATS[piece["dtype"]])


def _same(weight: Tensor, piece: Mapping[str, Any], dtype: str) -> bool:
    """True if the values are equal, bit for bit, once rounded to the dtype of the engine's model or of this tensor."""
    kept = _FLOATS[piece["dtype"]]
    wanted = str(piece["checksum"])
    if checksum(weight.to(_FLOATS[dtype]).to(kept)) == wanted:
        return True
    return dtype != piece["dtype"] and checksum(weight.to(kept)) == wanted


def _sample(
    found: Comparison, answers: list[dict[str, Any]], stream: Stream, plain_weights: Mapping[str, Tensor],
    names: set[str],
) -> None:  # fmt: skip
    for name, weight in stream():
        for answer in answers if name in names else ():
            piece = answer["pieces"].get(answer["tied"].get(name, name))
            part = None if piece is None or "sample" not in piece else shard(weight, piece, answer)
            if part is None:
                continue
            plain = shard(plain_weights[name], piece, answer) if name in plain_weights else None
            held = _cast(part, piece, answer)
            if checksum(held, ordered=False) == piece["values"]:
                found.differing.remove(name)
                found.unread[name] = "the engine keeps the same values in another order"
                continue
            base = None if plain is None else np.asarray(sample_of(plain))
            # The trainer's weights may themselves be rounded, from a checkpoint that the engine holds unrounded.
            narrow = weight.dtype != torch.float32 and str(weight.dtype) != f"torch.{piece['dtype']}"
            ulps = torch.finfo(weight.dtype).eps + torch.finfo(_FLOATS[piece["dtype"]]).eps if narrow else 0.0
            values = [np.asarray(one) for one in (piece["sample"], sample_of(held), sample_of(part))]
            found.samples.append(Difference(name, values[0], values[1], values[2], base, ulps / 2))


@torch.no_grad()
def _rounding(answers: list[dict[str, Any]], stream: Stream, names: set[str]) -> str | None:
    """A rounding of the trainer's weights that gives the engine's, on the first few matrices that differ."""
    candidates = dict(ROUNDINGS)
    tried = 0
    for name, weight in stream():
        piece = answers[0]["pieces"].get(name) if name in names and weight.dim() == 2 else None
        part = None if piece is None else shard(weight, piece, answers[0])
        if part is None or part.shape != weight.shape or piece is None:
            continue
        for label, rounding in list(candidates.items()):
            (pair,) = round_weights([(name, weight)], rounding)
            if not _same(pair[1], piece, answers[0]["dtype"]):
                del candidates[label]
        tried += 1
        if tried == 3 or not candidates:
            break
    return next(iter(candidates), None) if tried else None


def _adapter(found: Comparison, answers: list[dict[str, Any]], model: Any, number: int) -> None:
    """Compare the matrices of the adapter that the requests name with the trainer's."""
    pieces = {name: piece for answer in answers for name, piece in answer["pieces"].items()}
    for path, module in model.named_modules():
        for name in getattr(module, "active_adapters", ()) if hasattr(module, "lora_A") else ():
            if name not in module.lora_A:
                continue
            place = f"adapter:{number}:{plain_name(path)}"
            matrices = {"lora_A": module.lora_A[name].weight, "lora_B": module.lora_B[name].weight}
            for kind, weight in matrices.items():
                piece = pieces.get(f"{place}.{kind}")
                if piece is None:
                    found.adapter[f"{plain_name(path)}.{kind}"] = False
                    continue
                scale = module.scaling[name] if kind == "lora_B" else 1.0
                kept = weight.data.to(_FLOATS[piece["dtype"]]) * scale
                found.adapter[f"{plain_name(path)}.{kind}"] = checksum(kept) == piece["checksum"]


# -------------------------------------------------------------------------------------------------------- judgement


def judge(found: Comparison, *, adapted: bool = False, hot: bool = False) -> list[Asked]:
    """What the comparison proves: equal, rounded, adapter missing or scaled, all or some weights different.

    Args:
        found: the comparison.
        adapted: True if the trainer has an adapter.
        hot: True if the engine adds the adapter to each request itself, over unchanged weights.
    """
    total = found.equal + len(found.differing)
    rows = []
    if found.unread:
        name, why = next(iter(found.unread.items()))
        rows.append(not_compared("weights", f"{len(found.unread)} weights, e.g. {name}", why))
    count = f"{total} weights as {found.dtype}, bit for bit" if total else "weights"
    if not found.differing:
        rows += [row("weights", count, "equal", "equal", "", equal=True)] if total else []
        return rows + _adapter_rows(found, adapted=adapted, hot=hot, proved=bool(total))
    if found.samples and all(one.is_rounding for one in found.samples):
        what = f"{len(found.differing)} of {total} weights, which differ by no more than rounding"
        kept = row("precision", what, f"as {found.dtype}", f"as {found.kept}", "precision", equal=False)
        return [*rows, row("weights", count, "equal up to rounding", "", "", equal=True), kept]
    if found.rounding is not None:
        what = f"rounding of {len(found.differing)} of {total} weights"
        return [*rows, row("weights", what, found.rounding, "none", "precision", equal=False)]
    fitted = None if hot else adapter_scale(found)
    if fitted is not None:
        what = f"share of the adapter in {len(found.differing)} weights"
        text = "none: the base model" if abs(fitted) < 0.01 else f"{fitted:.2g} times"
        share = row("adapter", what, text, "1 time", "wrong_adapter", equal=False)
        return [*rows, row("weights", count, "equal but for the adapter", "", "", equal=True), share]
    return [*rows, _difference(found, total), *_adapter_rows(found, adapted=adapted, hot=hot, proved=False)]


def _adapter_rows(found: Comparison, *, adapted: bool, hot: bool, proved: bool) -> list[Asked]:
    if hot:
        wrong = [name for name, same in found.adapter.items() if not same]
        what = f"{len(found.adapter)} matrices of the adapter"
        engine = f"{len(wrong)} differ, e.g. {wrong[0]}" if wrong else "equal"
        return [row("adapter", what, engine, "equal", "wrong_adapter", equal=not wrong)] if found.adapter else []
    if not proved:
        return []
    text = "merged" if adapted else "none"
    return [row("adapter", "adapter", text, text, "", equal=True)]


def adapter_scale(found: Comparison) -> float | None:
    """The share of the adapter that the engine's weights hold: 0 = none, 1 = all of it; None = they differ otherwise.

    engine = base + s (trainer - base), fitted by least squares over the samples. It is named only if what is left is no
    more than the rounding of the engine's dtype explains, and the difference clearly lies along the adapter.
    """
    if not found.samples or any(one.base is None for one in found.samples):
        return None
    delta = np.concatenate([one.exact - one.base for one in found.samples if one.base is not None])
    gap = np.concatenate([one.engine - one.exact for one in found.samples])
    rounded = np.concatenate([one.trainer - one.exact for one in found.samples])
    size = float(delta @ delta)
    if not size:
        return None
    along = float(gap @ delta)
    left = float(np.sum((gap - along / size * delta) ** 2))
    noise = 2 * float(np.sum(rounded**2))
    clear = abs(along) > CLEAR * float(np.sqrt(np.sum(gap**2 * delta**2)))
    return 1 + along / size if clear and left <= (1 - FITTED) * float(gap @ gap) + noise else None


def _difference(found: Comparison, total: int) -> Asked:
    """All or some weights differ: where, by how much, and the two values that differ most."""
    where = "all weights" if len(found.differing) == total else places(found.differing)
    what = f"{where} ({len(found.differing)} of {total} differ)"
    if not found.samples:
        return row("weights", what, "other values", "", "stale_weights", equal=False)
    worst = max(found.samples, key=lambda one: float(np.abs(one.gap).max()))
    place = int(np.abs(worst.gap).argmax())
    relative = float(np.median([one.relative for one in found.samples]))
    scale = common_scale(found.samples)
    cause = "other_weights" if relative > OTHER_MODEL or scale is not None else "stale_weights"
    what += f", relative size {relative:.2g}" + ("" if scale is None else f", all of them {scale:.4g} times as large")
    what += f"; most in {worst.name}"
    return row("weights", what, float(worst.engine[place]), float(worst.trainer[place]), cause, equal=False)


def common_scale(samples: Sequence[Difference]) -> float | None:
    """The factor between the engine's and the trainer's weights, if one factor explains the difference."""
    engine = np.concatenate([one.engine for one in samples])
    trainer = np.concatenate([one.trainer for one in samples])
    size, gap = float(trainer @ trainer), float(np.sum((engine - trainer) ** 2))
    if not size or not gap:
        return None
    scale = float(engine @ trainer) / size
    left = float(np.sum((engine - scale * trainer) ** 2)) / gap
    return scale if left <= 1 - FITTED else None


def places(names: Sequence[str]) -> str:
    """The names in short: numbers of layers as ranges, at most three others.

    Example:
        >>> places([f"model.layers.{n}.mlp.up_proj.weight" for n in (3, 5, 6, 7)] + ["model.norm.weight"])
        'layers 3, 5 to 7 and model.norm.weight'
        >>> places(["model.layers.3.mlp.up_proj.weight"])
        'model.layers.3.mlp.up_proj.weight'
    """
    numbers = sorted({int(match[1]) for name in names if (match := _LAYER.search(name))})
    others = [name for name in names if not _LAYER.search(name)]
    if len(names) <= 2:
        return " and ".join(names)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs]
    named = others[:3] + ([f"{len(others) - 3} more"] if len(others) > 3 else [])
    layers = [f"layer{'s' if len(numbers) > 1 else ''} {', '.join(texts)}"] if numbers else []
    return " and ".join([*layers, *named])


_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
