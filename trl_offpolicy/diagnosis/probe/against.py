"""Two settings of the engine on the same tokens: does the setting matter, and which one is nearer to the trainer?

The first setting samples. A second engine cannot sample the same tokens again, so it scores those of the first by
``prompt_logprobs``, and so does the first, so that like is compared with like. What decoding token by token changes by
itself is measured as well: the first engine's sampled log-probs against its own ``prompt_logprobs``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from trl_offpolicy.diagnosis.attribution.attribute import Attribution
from trl_offpolicy.diagnosis.attribution.distances import token_k3
from trl_offpolicy.diagnosis.attribution.evidence import Array, Floats, TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_level
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.probe.asked import shown
from trl_offpolicy.diagnosis.probe.proof import config_rows
from trl_offpolicy.diagnosis.probe.setting import parse_setting
from trl_offpolicy.diagnosis.probe.weights import places

SIZES = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
    "decode_context_parallel_size", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enforce_eager",
    "attention_backend", "batch_invariant", "tp_invariant", "OMP_NUM_THREADS", "VLLM_BATCH_INVARIANT",
    "VLLM_TP_INVARIANT",
)  # fmt: skip
"""Settings of parallelism, batch shape and kernels: they change only the order of sums."""
_NOT_SAID = "not said"
ABOVE = 2.0
"""A distance up to this multiple of the noise floor counts as none, as everywhere in the diagnosis."""
REMOVED = 0.75
"""Share of the mismatch that the second setting must remove before the difference is named as the cause."""
Nearer = Literal["first", "second", "neither"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one engine says of given tokens and of itself; plain values, so that it can come from another process.

    Args:
        source: who answers.
        logps: ``prompt_logprobs`` of the tokens of each completion, nats at temperature 1; empty = not scored.
        again: the same in the reverse order of requests, that is, in other batches; empty = not asked.
        settings: what it runs with.
        model_config: configuration of its model; None = it does not say.
        tokenizer: ids of a test text; None = it does not say.
        weights: checksums of its weights, by worker; None = it does not say.
        to_trainer: outcome of the comparison of its weights with the trainer's, and what differs.
    """

    source: str
    logps: list[list[float]]
    again: list[list[float]] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_config: Mapping[str, Any] | None = None
    tokenizer: Mapping[str, Any] | None = None
    weights: list[dict[str, Any]] | None = None
    to_trainer: tuple[str, str] = ("not compared", "")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """How far two sets of log-probs of the same tokens are apart.

    Args:
        name: key for scripts.
        label: what is compared.
        tokens: number of tokens that both have.
        kl_k3: mean of e^d - 1 - d, nats per token, with d = log of the second over the first.
        kl_k3_ci95: half width of its 95 % interval, clustered by prompt.
        largest: largest |d|, nats.
        differ: share of the tokens whose log-probs are not the same float.
    """

    name: str
    label: str
    tokens: int
    kl_k3: float
    kl_k3_ci95: float
    largest: float
    differ: float


@dataclass(frozen=True, kw_only=True)
class Against:
    """What the comparison of two settings found.

    Args:
        second: the second setting, as it was given.
        pairs: distances.
        settings: (name, first, second) of what differs.
        weights: whether both hold the same weights: "equal", or why that is not known.
        matters: whether the setting moves log-probs above the noise floor.
        nearer: which setting is nearer to the trainer; "neither" within the 95 % interval or at the noise floor.
        removed: share of the first setting's mismatch (by ``prompt_logprobs``) that the second one does not have.
        cause: "parallelism" if sizes differ and the second setting removes most of the mismatch, else empty.
        sentences: the answer in words.
    """

    second: str
    pairs: tuple[Pair, ...]
    settings: tuple[tuple[str, str, str], ...]
    weights: str
    matters: bool
    nearer: Nearer
    removed: float
    cause: str
    sentences: tuple[str, ...]

    @property
    def tested(self) -> str:
        """What the second setting removes, in a sentence."""
        return f"With {self.second} {self.removed:.0%} of the mismatch is gone ({self.detail})."

    @property
    def detail(self) -> str:
        """The sizes that differ, for the attribution."""
        return ", ".join(f"{name} {one} against {other}" for name, one, other in self.settings if name in SIZES)


# ---------------------------------------------------------------------------------------------------- the same policy?


def check_same_policy(first: Answer, second: Answer) -> str:
    """Raise unless both engines hold the same weights of the same model; returns "equal", or why that is not known.

    Raises:
        ValueError: another model, tokenizer, or other weights; the message says what differs.
    """
    if first.model_config is not None and second.model_config is not None:
        rows = [row for row in config_rows(first.model_config, second.model_config) if row.outcome == "different"]
        if rows:
            raise ValueError(
                f"against must be another setting of the same model, but {len(rows)} entries of its configuration "
                f"differ, e.g. {rows[0].what}: {rows[0].engine} in the first engine, {rows[0].trainer} in the second."
            )
    one, other = ((side.tokenizer or {}).get("text") for side in (first, second))
    if one is not None and other is not None and one != other:
        raise ValueError(
            f"against must be another setting of the same model, but the tokenizers differ: a test text has "
            f"{len(one)} and {len(other)} ids."
        )
    if (differing := _differing(first.weights, second.weights)) is not None:
        if not differing:
            return "equal"
        raise ValueError(_other_weights(f"{places(differing)} ({len(differing)} tensors) differ"))
    return _by_the_trainer(first.to_trainer, second.to_trainer)


def _differing(first: list[dict[str, Any]] | None, second: list[dict[str, Any]] | None) -> list[str] | None:
    """Names of the weights with other checksums; None if the two cannot be compared piece by piece.

    Sharded weights, another dtype and a kernel's own layout have other pieces: they are compared through the trainer.
    """
    if first is None or second is None or len(first) != len(second):
        return None
    if any(one["dtype"] != other["dtype"] for one, other in zip(first, second, strict=True)):
        return None
    found, compared = [], 0
    for one, other in zip(first, second, strict=True):
        for name, piece in one["pieces"].items():
            twin = other["pieces"].get(name)
            if piece is None or twin is None or piece.get("ordered") != twin.get("ordered"):
                continue
            compared += 1
            if (piece["shape"], piece["checksum"]) != (twin["shape"], twin["checksum"]):
                found.append(name)
    return found if compared else None


def _by_the_trainer(first: tuple[str, str], second: tuple[str, str]) -> str:
    outcomes = (first[0], second[0])
    if outcomes == ("equal", "equal"):
        return "equal"
    if set(outcomes) == {"equal", "different"}:
        which, what = ("first", first[1]) if first[0] == "different" else ("second", second[1])
        raise ValueError(_other_weights(f"only the {which} engine differs from the trainer: {what}"))
    return "not compared: " + (second[1] or first[1] or "an engine does not show its weights")


def _other_weights(what: str) -> str:
    return f"against must hold the same weights as the first engine, but {what}. Load or sync the same weights first."


# ------------------------------------------------------------------------------------------------------- the distances


def compare_answers(evidence: TokenEvidence, first: Answer, second: Answer, *, text: str) -> Against:
    """Compare two settings with each other and with the trainer.

    Args:
        evidence: the tokens, the first setting's sampled log-probs and the trainer's.
        first: what the setting that sampled says.
        second: what the other one says.
        text: the second setting, as it was given.

    Raises:
        ValueError: the two hold other weights or another model.
    """
    weights = check_same_policy(first, second)
    width = evidence.old_per_token_logps.shape[1]
    one, other, again = (padded(rows, width=width) for rows in (first.logps, second.logps, first.again))
    trainer, decoded = evidence.old_per_token_logps, evidence.sampling_per_token_logps
    sides: list[tuple[str, str, Floats, Floats | None]] = [
        ("decode_prefill", "first: decoding / its prompt_logprobs", decoded, one),
        ("first_again", "first: prompt_logprobs / again, in other batches", one, again if first.again else None),
        ("first_second", "first / second, prompt_logprobs", one, other),
        ("first_trainer", "first / trainer", one, trainer),
        ("second_trainer", "second / trainer", other, trainer),
        ("decode_trainer", "first, decoding / trainer", decoded, trainer),
        ("trainer_again", "trainer / itself (noise floor)", trainer, evidence.rescored_per_token_logps),
    ]
    pairs = tuple(_pair(name, label, a, b, evidence) for name, label, a, b in sides if b is not None)
    by_name = {pair.name: pair for pair in pairs}
    settings = (*_settings(first.settings, second.settings), *_variables(text))
    repeated = by_name["first_again"].kl_k3 if "first_again" in by_name else 0.0
    floor = ABOVE * max(noise_level(evidence), repeated)
    found = Against(
        second=text,
        pairs=pairs,
        settings=settings,
        weights=weights,
        matters=by_name["first_second"].kl_k3 > floor,
        nearer=_nearer(evidence, one, other, floor),
        removed=_removed(by_name["first_trainer"].kl_k3, by_name["second_trainer"].kl_k3),
        cause="",
        sentences=(),
    )
    found = replace(found, cause=_cause(found, by_name, floor))
    return replace(found, sentences=tuple(_sentences(found, by_name, floor)))


def _pair(name: str, label: str, one: Floats, other: Floats, evidence: TokenEvidence) -> Pair:
    d = np.where(evidence.observed, other - one, np.nan)
    both = np.isfinite(d)
    mean, half = clustered_mean(np.where(both, token_k3(np.where(both, d, 0.0)), np.nan), evidence.group_ids)
    seen = d[both]
    return Pair(
        name=name, label=label, tokens=int(both.sum()), kl_k3=mean, kl_k3_ci95=half,
        largest=float(np.abs(seen).max()) if seen.size else math.nan,
        differ=float((seen != 0).mean()) if seen.size else math.nan,
    )  # fmt: skip


def clustered_mean(values: Floats, groups: Array | None) -> tuple[float, float]:
    """Mean over finite entries of (B, T), and the half width of its 95 % interval, clustered by group of rows.

    The tokens of a prompt are not independent, so the variance is that of the groups' sums around their share.

    Args:
        values: (B, T); NaN = not counted.
        groups: (B,) number of the group; None = each row is one.
    """
    numbers = np.arange(len(values)) if groups is None else np.asarray(groups, np.int64)
    counts = np.bincount(numbers, np.isfinite(values).sum(1))
    sums = np.bincount(numbers, np.nansum(values, 1))
    if not counts.sum():
        return math.nan, math.nan
    mean = float(sums.sum() / counts.sum())
    used = int((counts > 0).sum())
    if used < 2:
        return mean, math.nan
    spread = used / (used - 1) * float(np.sum((sums - mean * counts) ** 2))
    return mean, 1.96 * math.sqrt(spread) / float(counts.sum())


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """What differs, of the settings that both sides name, and of the sizes that one does."""
    names = [*first, *(name for name in second if name not in first)]
    shared = first.keys() & second.keys()
    pairs = [(name, first.get(name), second.get(name)) for name in names]
    return tuple(
        (name, shown(one) if name in first else _NOT_SAID, shown(other) if name in second else _NOT_SAID)
        for name, one, other in pairs
        if one != other and (name in shared or name in SIZES)
    )


def _variables(text: str) -> Iterator[tuple[str, str, str]]:
    """The variables of the second engine's process that differ from this one's."""
    for name, value in parse_setting(text).environment.items():
        if (own := os.environ.get(name, "not set")) != value:
            yield name, own, value


def _nearer(evidence: TokenEvidence, one: Floats, other: Floats, floor: float) -> Nearer:
    """Compare the two distances token by token: what both have in common cancels."""
    trainer = evidence.old_per_token_logps
    gaps = [np.where(evidence.observed, trainer - side, np.nan) for side in (one, other)]
    distances = [np.where(np.isfinite(gap), token_k3(np.nan_to_num(gap)), np.nan) for gap in gaps]
    mean, half = clustered_mean(distances[0] - distances[1], evidence.group_ids)
    largest = max(float(np.nanmean(one)) for one in distances)
    if largest <= floor or not abs(mean) > half:
        return "neither"
    return "second" if mean > 0 else "first"


def _removed(first: float, second: float) -> float:
    return 1 - second / first if first > 0 else math.nan


def _cause(found: Against, pairs: Mapping[str, Pair], floor: float) -> str:
    """Parallelism, if sizes differ, the two are as far apart as first and trainer, and the second is not so far."""
    sizes = any(name in SIZES and _NOT_SAID not in said for name, *said in found.settings)
    mismatch, moved = pairs["first_trainer"].kl_k3, pairs["first_second"].kl_k3
    most = mismatch > floor and moved >= REMOVED * mismatch and found.removed >= REMOVED
    return "parallelism" if sizes and most and found.nearer == "second" else ""


# -------------------------------------------------------------------------------------------------------- in words


def _sentences(found: Against, pairs: Mapping[str, Pair], floor: float) -> list[str]:
    apart, decoding = pairs["first_second"], pairs["decode_prefill"]
    size = f"KL {format_number(apart.kl_k3)} nats per token, largest |d| {format_number(apart.largest)}"
    said = []
    if not apart.differ:
        said.append("The setting does not matter: all log-probs are the same, bit for bit.")
    elif found.matters:
        times = format_number(ABOVE * apart.kl_k3 / floor)
        said.append(f"The setting matters: it moves log-probs by {size}, {times} times the noise floor.")
    else:
        said.append(f"The setting does not matter: it moves log-probs by {size}, within twice the noise floor.")
    distances = (
        f"KL to the trainer {format_number(pairs['first_trainer'].kl_k3)} with the first, "
        f"{format_number(pairs['second_trainer'].kl_k3)} with the second"
    )
    if found.nearer == "neither":
        said.append(f"Neither is nearer to the trainer ({distances}).")
    else:
        said.append(f"The {found.nearer} setting is nearer to the trainer ({distances}).")
    if found.cause:
        said.append(found.tested)
    whole = pairs["decode_trainer"].kl_k3
    if decoding.kl_k3 > floor and decoding.kl_k3 > 0.5 * whole:
        said.append(
            f"Decoding token by token differs from prompt_logprobs of the same engine by KL "
            f"{format_number(decoding.kl_k3)}: most of what the trainer sees ({format_number(whole)}) comes from "
            "there, and this comparison cannot show what the setting does to it."
        )
    if not found.settings:
        said.append("No setting that the two engines show differs, so only the processes do.")
    if found.weights != "equal":
        said.append(f"Whether both hold the same weights is not known ({found.weights}).")
    return said


def with_tested_cause(attribution: Attribution, found: Against) -> Attribution:
    """The attribution, with parallelism as its cause where the second setting has removed most of the mismatch."""
    if not found.cause or attribution.cause == "none":
        return attribution
    before = attribution.cause if attribution.cause not in ("unknown", found.cause) else attribution.runner_up
    return replace(
        attribution, cause=found.cause, coarse=found.cause, basis="tested", detail=found.detail, confidence=0.9,
        explained=found.removed, parts=(), next_test="", runner_up=before,
        reasons=(found.tested, *attribution.reasons),
    )  # fmt: skip


def scored_rows(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], longest: int | None
) -> list[list[int]]:
    """Prompt and completion of each row; empty where there is nothing to score, or no room for one more token."""
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    room = math.inf if longest is None else longest - 1
    return [
        row if completion and len(row) <= room else [] for row, completion in zip(rows, completions, strict=True)
    ]  # fmt: skip
