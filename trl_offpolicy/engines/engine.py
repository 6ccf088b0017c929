"""The contract of a rollout engine, and the records that it takes and returns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from trl_offpolicy.checks import check_number, check_positive, check_whole
from trl_offpolicy.engines.weights.source import WeightSource
from trl_offpolicy.functional.truncated_sampling import KeptIds


class EngineError(RuntimeError):
    """The engine cannot go on; the message says what happened and what to do."""


class EngineUnreachable(EngineError):
    """The engine gave no usable answer after all retries."""


class SyncError(EngineError):
    """The engine does not answer with the weights that it was given."""


class Call(NamedTuple):
    """One answer of an engine: the ids that it received and those that it returned."""

    prompt: Sequence[int]
    completion: Sequence[int]


_NO_PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Sent in every request, because a server reads options that are left out from ``generation_config.json``."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are sampled.

    Args:
        max_tokens: length of the longest completion.
        temperature: the trainer divides its logits by the same number.
        top_p: 1 = off.
        top_k: 0 = off.
        min_p: 0 = off.
        extra: further options of vLLM's ``SamplingParams``.

    Raises:
        ValueError: a wrong value; the message names the field.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, least=1)
        check_positive(temperature=self.temperature, top_p=self.top_p)
        for name in ("top_k", "min_p"):
            check_number(name, getattr(self, name))
        taken = {item.name for item in fields(self)} | {"n", "logprobs"}
        if clash := sorted(taken & set(self.extra)):
            raise ValueError(f"extra must not hold {', '.join(clash)}: that is set by the engine layer.")

    @property
    def truncated(self) -> bool:
        """True if the engine samples only from a part of the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def vllm_options(self) -> dict[str, Any]:
        """The options as keyword arguments of ``SamplingParams``, which are also the fields of a request."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "extra"}
        return {**_NO_PENALTIES, **own, **self.extra, "logprobs": 0}


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Completions, one entry each; all completions of a prompt come one after the other.

    Args:
        prompt_ids: tokens of the prompt.
        completion_ids: tokens that the engine sampled. The trainer trains on these; text is never tokenized again.
        sampling_per_token_logps: log-prob of each sampled token under the distribution it was drawn from, nats; NaN
            where the engine could not tell. None from an engine that is the trainer itself (sampling = old).
        policy_versions: version of the weights that produced each token, in optimizer steps; -1 = not known.
        finish_reasons: "stop", "length" or another name that the engine uses.
        routed_experts: (tokens, layers with experts, k) expert ids of each prompt and completion without its last
            token, which the engine was never fed; None if the engine does not report them.
        sampling_mask: what truncated sampling kept at each token: the ids in a
            :class:`~trl_offpolicy.functional.truncated_sampling.KeptIds`, or a list of ids for each token, which
            becomes one; None for a completion of which it is not known, and if the engine does not report it.
        tool_mask: 1 = sampled by the engine, 0 = tool output between two turns (its log-probs are placeholders, 0.0);
            None = the engine sampled every token.
        token_rewards: reward of each token besides those of the reward functions, from an engine of one's own; None =
            it gives none.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    sampling_per_token_logps: list[list[float]] | None
    policy_versions: list[list[int]]
    finish_reasons: list[str]
    routed_experts: list[Any] | None = None
    sampling_mask: list[Any] | None = None
    tool_mask: list[list[int]] | None = None
    token_rewards: list[list[float]] | None = None

    def __len__(self) -> int:
        return len(self.completion_ids)

    def __post_init__(self) -> None:
        lengths = [len(ids) for ids in self.completion_ids]
        per_token: dict[str, Sequence[Sequence[Any]] | None] = {
            "sampling_per_token_logps": self.sampling_per_token_logps,
            "policy_versions": self.policy_versions,
            "tool_mask": self.tool_mask,
            "token_rewards": self.token_rewards,
        }
        for name, rows in per_token.items():
            if rows is not None and (found := [len(row) for row in rows]) != lengths:
                raise ValueError(
                    f"{name} must have one entry for each token of completion_ids, but {_apart(found, lengths)}."
                )
        if self.sampling_mask is not None:
            masks = [one if one is None or isinstance(one, KeptIds) else KeptIds.of(one) for one in self.sampling_mask]
            if [length if one is None else len(one) for one, length in zip(masks, lengths, strict=True)] != lengths:
                raise ValueError("sampling_mask must have one entry for each token of completion_ids.")
            object.__setattr__(self, "sampling_mask", masks)


def _apart(found: Sequence[int], lengths: Sequence[int]) -> str:
    """Where the lengths of rows are not those of the completions, in words."""
    if len(found) != len(lengths):
        return f"got {len(found)} rows for {len(lengths)} completions"
    row = next(i for i, pair in enumerate(zip(found, lengths, strict=True)) if pair[0] != pair[1])
    return f"row {row} has {found[row]} for {lengths[row]} tokens"


class Engine(Protocol):
    """Samples completions with weights of a known version. An engine derives from it or just has its methods.

    It may also have ``interview()``, which returns an :class:`~trl_offpolicy.engines.interview.Interview`: then a probe
    compares its weights and settings with the trainer's, and ``run.json`` says what it really runs with. One that sends
    only what changed has ``confirm(proven: bool) -> bool``
    (:meth:`~trl_offpolicy.engines.weights.changed.ChangedWeights.confirm`).
    """

    version: int | None = None
    """Version of the weights it answers with; None before the first sync."""

    @abstractmethod
    def bind(self, source: WeightSource) -> None:
        """Set the source whose weights :meth:`sync_weights` takes."""

    @abstractmethod
    def generate(self, prompt_ids: Sequence[Sequence[int]], sampling: Sampling, *, n: int = 1) -> Rollouts:
        """``n`` completions of each prompt, one after the other."""

    @abstractmethod
    def score(self, ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of tokens 1, 2, ... of each sequence, given those before them."""

    @abstractmethod
    def sync_weights(self, version: int) -> SyncReport:
        """Transfer the weights of the bound source. Collective: every rank of the trainer calls it."""

    def close(self) -> None:
        """Free what the engine holds; a second call does nothing. The default frees nothing."""


def check_has_methods(engine: object, *, where: str) -> None:
    """Raise unless a user's engine has the methods of :class:`Engine`.

    Args:
        engine: an object or a class.
        where: name of the option in the message.

    Raises:
        TypeError: it lacks one.
    """
    names = ("bind", "generate", "score", "sync_weights", "close")
    if missing := [name for name in names if not callable(getattr(engine, name, None))]:
        raise TypeError(
            f"{where} must have the methods of trl_offpolicy.engines.engine.Engine, but got {engine!r}, which lacks "
            f"{', '.join(missing)}."
        )


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One transfer of weights.

    Args:
        version: version of the weights.
        kind: "memory", "folder", "adapter" or "nccl".
        bytes: number of bytes sent.
        seconds: wall clock time of the transfer.
        agreement: exp(-distance) of the engine's and the trainer's log-probs on a probe; None = they were not compared.
        changed: share of the weight elements that the trainer changed since the sync before; None at the first one.
        visible: share of the changed elements whose change the engine's precision can hold; None = every one, or not
            known (:class:`~trl_offpolicy.engines.sync_watch.Passed`).
        checksum: of the weights as the engine holds them; the same one twice means that nothing new was sent.
        trainer_dtype: precision of the trainer's weights, e.g. "float32".
        engine_dtype: precision of the engine's.
        whole: False = only weights were sent that the engine did not have
            (:class:`~trl_offpolicy.engines.weights.changed.ChangedWeights`).
    """

    version: int
    kind: str
    bytes: int
    seconds: float
    agreement: float | None = None
    changed: float | None = None
    visible: float | None = None
    checksum: str | None = None
    trainer_dtype: str | None = None
    engine_dtype: str | None = None
    whole: bool = True

    def metrics(self) -> dict[str, float]:
        """The numbers that a trainer logs, by their names under ``offpolicy/rollout/``; without those not known."""
        measured = {
            "sync_seconds": self.seconds,
            "sync_bytes": float(self.bytes),
            "sync_agreement": self.agreement,
            "sync_changed_fraction": self.changed,
            "sync_visible_fraction": self.visible,
        }
        return {name: value for name, value in measured.items() if value is not None}
