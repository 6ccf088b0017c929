"""Faults of a toy policy that no rule was made for: each must be named right, or not at all.

``FAULTS`` gives for each the causes that would be right, and whether log-probs and declarations suffice to name it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from toy_policy import GROUP, LENGTH, ROWS, SAME, VOCABULARY, Toy, log_softmax

from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence

Change = Callable[[Any, int, int], Any]
"""(logits (V,), row, position) -> log-probs (V,)."""
WEIGHTS = ("other_weights", "stale_weights", "policy_staleness", "wrong_adapter")
IDS = np.arange(VOCABULARY)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        right: causes that are right, or whose fix is the same; "none" where nothing is wrong.
        engine: what the engine does; None = what it should.
        trainer: what the trainer does.
        report: changes the engine's log-probs (B, T) on their way.
        named: the doctor knows the cause from log-probs and declarations.
        says: what the engine declares beside what both do.
    """

    right: tuple[str, ...]
    engine: Callable[[Any], Change] | None = None
    trainer: Callable[[Any], Change] | None = None
    report: Callable[[Any, Any], Any] | None = None
    named: bool = False
    says: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, seed: int) -> TokenEvidence:
        """A batch with it, and what both sides declare."""
        rng = np.random.default_rng(1000 + seed)
        engine, trainer = (None if one is None else one(rng) for one in (self.engine, self.trainer))
        made = Toy(seed).batch(engine, trainer)
        mu = made.sampling_per_token_logps
        if self.report is not None:
            mu = self.report(mu.copy(), rng)
        return replace(made, sampling_per_token_logps=mu, engine=replace(SAME, **self.says), trainer=SAME)


# ------------------------------------------------------------------------------------------------------------ engines


def drawn(change: Callable[[Any], Any]) -> Callable[[Any], Change]:
    """Log-probs that depend on the logits alone."""
    return lambda _rng: lambda z, _row, _place: change(z)


def cut(keep: Callable[[Any], Any]) -> Callable[[Any], Change]:
    """Only the kept tokens are drawn."""
    return drawn(lambda z: log_softmax(np.where(keep(z), z, -np.inf)))


def nucleus(share: float) -> Callable[[Any], Any]:
    def keep(z: Any) -> Any:
        p = np.exp(log_softmax(z))
        order = np.argsort(-p)
        kept = np.zeros(VOCABULARY, bool)
        kept[order[: int(np.searchsorted(p[order].cumsum(), share)) + 1]] = True
        return kept

    return keep


def noise(size: float, where: Callable[[int, int], float] = lambda _row, _place: 1.0) -> Callable[[Any], Change]:
    """Noise on the logits of every context."""

    def make(rng: Any) -> Change:
        drift = rng.normal(0, size, (ROWS, LENGTH, VOCABULARY))
        return lambda z, row, place: log_softmax(z + where(row, place) * drift[row, place])

    return make


def by_token(size: float) -> Callable[[Any], Change]:
    """Other weights: each token is likelier or less likely everywhere."""

    def make(rng: Any) -> Change:
        drift = rng.normal(0, size, VOCABULARY)
        return lambda z, _row, _place: log_softmax(z + drift)

    return make


def by_prompt(size: float, fading: float = 1.0) -> Callable[[Any], Change]:
    """Another prompt; its effect fades with the position."""

    def make(rng: Any) -> Change:
        drift = rng.normal(0, size, (ROWS // GROUP, VOCABULARY))
        return lambda z, row, place: log_softmax(z + drift[row // GROUP] * fading**place)

    return make


def another(alike: float) -> Callable[[Any], Change]:
    """A policy that is sure of other tokens."""

    def make(rng: Any) -> Change:
        other = 4.0 * rng.normal(size=(ROWS, LENGTH, VOCABULARY))
        return lambda z, row, place: log_softmax(alike * 3 * z + (1 - alike) * other[row, place])

    return make


def sharper(factor: float, size: float) -> Callable[[Any], Change]:
    """A policy that has learned: surer, and with other tastes."""

    def make(rng: Any) -> Change:
        drift = rng.normal(0, size, VOCABULARY)
        return lambda z, _row, _place: log_softmax(factor * z + drift)

    return make


def forced(rng: Any) -> Change:
    """A grammar allows one token at each of five places."""
    words = rng.integers(0, VOCABULARY, 5)

    def change(z: Any, _row: int, place: int) -> Any:
        return np.where(np.equal(IDS, words[place - 5]), 0.0, -np.inf) if 5 <= place < 10 else log_softmax(z)

    return change


def forced_one_by_one(rng: Any) -> Change:
    """A grammar allows one token at every fourth place."""
    words = rng.integers(0, VOCABULARY, LENGTH)

    def change(z: Any, _row: int, place: int) -> Any:
        return np.where(np.equal(IDS, words[place]), 0.0, -np.inf) if place % 4 == 3 else log_softmax(z)

    return change


def greedy_at(where: Callable[[int, int], bool], *, rarest: bool = False) -> Callable[[Any], Change]:
    """The most likely token at some places, or the least likely one."""

    def change(z: Any, row: int, place: int) -> Any:
        taken = np.argmin(z) if rarest else np.argmax(z)
        return np.where(np.equal(IDS, taken), 0.0, -np.inf) if where(row, place) else log_softmax(z)

    return lambda _rng: change


def same_opening(_rng: Any) -> Change:
    """The policy nearly always begins with the same three tokens."""
    return lambda z, _row, t: log_softmax(z + 9 * (t < 3) * np.equal(IDS, 5 + t))


def later_ones(rng: Any) -> Change:
    """Some tokens are less likely once a response has begun, as under a penalty."""
    kept = rng.random((ROWS, VOCABULARY)) < 0.3
    return lambda z, row, place: log_softmax(z - 0.15 * kept[row] * (place > 0))


def to_bf16(mu: Any) -> Any:
    import torch

    return torch.tensor(mu).bfloat16().double().numpy()


def by_entropy(z: Any) -> Any:
    logps = log_softmax(z)
    entropy = -(np.exp(logps) * logps).sum()
    return log_softmax(z / (0.6 + 0.5 * entropy / np.log(VOCABULARY)))


def without_top_choices(rng: Any) -> Change:
    """XTC: all but the least of the likely tokens are left out, every other time."""

    def change(z: Any, _row: int, _place: int) -> Any:
        p = np.exp(log_softmax(z))
        likely = np.flatnonzero(p > 0.1)
        if len(likely) < 2 or rng.random() < 0.5:
            return log_softmax(z)
        gone = likely[likely != likely[np.argmin(p[likely])]]
        return log_softmax(np.where(np.isin(IDS, gone), -np.inf, z))

    return change


def more_mass(z: Any) -> Any:
    return z - np.log(np.exp(z).sum() + 20.0)


# ------------------------------------------------------------------------------------------------------------ reports


def zeroed(mu: Any, _rng: Any) -> Any:
    """A token without a choice has a log-prob of exactly 0."""
    return np.where(np.abs(mu) < 1e-5, 0.0, mu)


def at_places(mu: Any, rng: Any, share: float, value: Any) -> Any:
    return np.where(rng.random(mu.shape) < share, value, mu)


def filled_up(mu: Any, rng: Any) -> Any:
    lost = rng.integers(2, 9, ROWS)
    return np.where(np.arange(LENGTH) >= LENGTH - lost[:, None], 0.0, mu)


BF16, INT8, LAG = {"dtype": "bfloat16"}, {"quantization": "int8"}, {"weight_version": 2}
FP8 = {"quantization": "fp8"}
TEMPERATURE, CUT, MISALIGNED = ("temperature",), ("truncated_sampling",), ("misalignment",)
PROCESSED, PROMPT, CONFIG, FORMAT = ("logit_processors",), ("prompt_difference",), ("model_config",), ("precision",)

FAULTS: dict[str, Fault] = {
    "nothing": Fault(("none",)),
    # sampling
    "temperature 1.5": Fault(TEMPERATURE, drawn(lambda z: log_softmax(z / 1.5)), named=True),
    "temperature 0.3": Fault(TEMPERATURE, drawn(lambda z: log_softmax(z / 0.3))),
    "trainer at 1.3": Fault(TEMPERATURE, trainer=drawn(lambda z: log_softmax(z / 1.3)), named=True),
    "temperature by entropy": Fault(TEMPERATURE, drawn(by_entropy)),
    "hot first tokens": Fault(TEMPERATURE, lambda _r: lambda z, _row, t: log_softmax(z / (1.5 if t < 8 else 1.0))),
    "half of the rows at 0.8": Fault(
        TEMPERATURE, lambda _r: lambda z, row, _t: log_softmax(z / (0.8 + row % 2 / 5)), named=True),
    "half of the rows under top-p": Fault(CUT, lambda _r: lambda z, row, _t: log_softmax(
        np.where(nucleus(0.8)(z) | (row % 2 > 0), z, -np.inf)), named=True),
    "top-k 2": Fault(CUT, cut(lambda z: z >= np.sort(z)[-2])),
    "top-k 3": Fault(CUT, cut(lambda z: z >= np.sort(z)[-3])),
    "top-p 0.7": Fault(CUT, cut(nucleus(0.7)), named=True),
    "top-p 0.95": Fault(CUT, cut(nucleus(0.95)), named=True),
    "min-p 0.1": Fault(CUT, cut(lambda z: z >= z.max() + np.log(0.1)), named=True),
    "trainer under top-p": Fault(CUT, trainer=cut(nucleus(0.9))),
    "top-p 0.3": Fault(CUT, cut(nucleus(0.3)), report=zeroed),
    "min-p 0.5": Fault(CUT, cut(lambda z: z >= z.max() + np.log(0.5)), report=zeroed),
    "top choices left out": Fault((*CUT, *PROCESSED), without_top_choices),
    "a twentieth at random": Fault(PROCESSED, drawn(lambda z: np.log(0.95 * np.exp(log_softmax(z)) + 0.05 / len(z)))),
    "a token banned": Fault((*PROCESSED, *CUT), cut(lambda z: np.arange(len(z)) != 7)),
    "a token banned at first": Fault((*PROCESSED, *CUT), lambda _r: lambda z, _row, t: log_softmax(
        np.where((IDS == 7) & (t < 10), -np.inf, z))),
    "many tokens banned": Fault((*PROCESSED, *CUT), cut(lambda _z: IDS % 5 != 3)),
    "a bias": Fault(PROCESSED, drawn(lambda z: log_softmax(z + 1.5 * (IDS == 9)))),
    "a bias of each prompt": Fault(PROCESSED, lambda _r: lambda z, row, _t: log_softmax(
        z + 2.0 * np.equal(IDS, row // GROUP * 3))),
    "a grammar": Fault(PROCESSED, forced, report=zeroed),
    "a grammar, token by token": Fault(PROCESSED, forced_one_by_one, report=zeroed),
    "a header that the mask lets in": Fault(("tool_tokens",), lambda _r: lambda z, _row, t: log_softmax(
        np.where((t >= 3) | np.equal(IDS, 5 + t), z, -np.inf)), report=zeroed, named=True),
    "an opening that all drew": Fault(
        ("unknown", "none", "truncated_sampling"), same_opening, same_opening,
        report=lambda mu, _r: np.where(np.arange(LENGTH) < 3, 0.0, mu)),
    "greedy first tokens": Fault(("temperature", *PROCESSED), greedy_at(lambda _row, t: t == 0), report=zeroed),
    "half of the rows greedy": Fault(TEMPERATURE, greedy_at(lambda row, _t: row % 2 > 0), report=zeroed),
    "a penalty beside bf16": Fault(PROCESSED, later_ones, says=BF16),
    "a penalty beside a lag": Fault(PROCESSED, later_ones, says=LAG),
    "a fifth of the rows at 0.7": Fault(
        TEMPERATURE, lambda _r: lambda z, row, _t: log_softmax(z / (0.7 if row % 5 == 0 else 1.0)), named=True),
    # what a model computes
    "soft-cap": Fault((*CONFIG, *TEMPERATURE), drawn(lambda z: log_softmax(3 * np.tanh(z / 3)))),
    "padding of the trainer's vocabulary": Fault(CONFIG, trainer=drawn(more_mass)),
    "logits clipped": Fault((*FORMAT, *CONFIG), drawn(lambda z: log_softmax(np.minimum(z, 2.5)))),
    "late tokens": Fault(CONFIG, noise(0.3, lambda _row, t: float(t >= 12))),
    "more with each token": Fault(CONFIG, noise(0.3, lambda _row, t: t / LENGTH)),
    "half of the rows": Fault(CONFIG, noise(0.3, lambda row, _t: float(row % 2))),
    "label smoothing": Fault(("unknown",), trainer=drawn(
        lambda z: 0.95 * log_softmax(z) + 0.05 * log_softmax(z).mean())),
    # weights, prompts and formats, each beside declarations that are no fault
    "other weights": Fault(WEIGHTS, by_token(0.1)),
    "a surer learner": Fault(WEIGHTS, trainer=sharper(1.08, 0.1)),
    "a far surer learner": Fault(WEIGHTS, trainer=sharper(1.25, 0.3)),
    "a less sure learner": Fault(WEIGHTS, trainer=sharper(0.9, 0.12)),
    "other weights beside bf16": Fault(WEIGHTS, by_token(0.1), says=BF16),
    "far other weights beside bf16": Fault(WEIGHTS, by_token(0.4), says=BF16),
    "far other weights beside int8": Fault(WEIGHTS, by_token(0.4), says=INT8),
    "another prompt beside bf16": Fault(PROMPT, by_prompt(0.8, 0.85), says=BF16),
    "a prompt that does not fade beside bf16": Fault(PROMPT, by_prompt(0.4), says=BF16),
    "another prompt beside int8": Fault(PROMPT, by_prompt(0.8, 0.85), says=INT8),
    "another prompt beside a lag": Fault(PROMPT, by_prompt(0.8, 0.85), says=LAG),
    "large noise beside bf16": Fault(("unknown",), noise(0.6), says=BF16),
    "large noise beside a lag": Fault(WEIGHTS, noise(0.9), says=LAG),
    # two policies with little in common: the mismatch is nearly the trainer's log-probs themselves
    "another peaked policy": Fault(WEIGHTS, another(0.0)),
    "a peaked policy that is half another": Fault(WEIGHTS, another(0.5)),
    "another peaked policy beside a lag": Fault(WEIGHTS, another(0.0), says=LAG),
    # in few tokens, as rounding never is
    "a token's logit beside fp8": Fault((*PROCESSED, *CONFIG), drawn(lambda z: log_softmax(z - 3.0 * (IDS == 9))),
                                        says=FP8),
    "one in two hundred at random beside fp8": Fault(PROCESSED, drawn(lambda z: np.log(
        0.995 * np.exp(log_softmax(4 * z)) + 0.005 / len(z))), drawn(lambda z: log_softmax(4 * z)), says=FP8),
    "bf16": Fault(FORMAT, noise(0.015), named=True, says=BF16),
    "keys and values in fp8": Fault(  # the first token of a response reads none from the cache
        FORMAT, noise(0.05, lambda _row, t: float(t > 0)), named=True, says={"kv_cache": "fp8"}),
    "from the second token on beside bf16": Fault(("unknown",), noise(0.05, lambda _row, t: float(t > 0)), says=BF16),
    "far less than bf16 leaves": Fault(("unknown", "none"), noise(0.001), says=BF16),
    "temperature 0.9 beside bf16": Fault(TEMPERATURE, drawn(lambda z: log_softmax(z / 0.9)), says=BF16),
    "half of the rows at 0.8 beside bf16": Fault(
        TEMPERATURE, lambda _r: lambda z, row, _t: log_softmax(z / (0.8 + row % 2 / 5)), says=BF16),
    # log-probs that were written down wrongly
    "a floor": Fault(MISALIGNED, report=lambda mu, _r: np.log(np.exp(mu) + 1e-3)),
    "filled up with 0": Fault(MISALIGNED, report=filled_up, named=True),
    "an end that was appended": Fault(MISALIGNED, greedy_at(lambda _row, t: t == LENGTH - 1, rarest=True),
                                      report=zeroed, named=True),
    "nothing but 0": Fault(MISALIGNED, report=lambda mu, _r: np.zeros_like(mu)),
    "a constant": Fault(MISALIGNED, report=lambda mu, _r: mu + 0.1, named=True),
    "a small constant": Fault(MISALIGNED, report=lambda mu, _r: mu + 0.01, named=True),
    "-9999 here and there": Fault((*MISALIGNED, "nonfinite"), report=lambda mu, r: at_places(mu, r, 0.02, -9999.0)),
    "far too low here and there": Fault((*FORMAT, "nonfinite"), report=lambda mu, r: at_places(mu, r, 0.01, mu - 5)),
    "ranks interleaved": Fault(MISALIGNED, named=True, report=lambda mu, _r: mu.reshape(
        4, 8, LENGTH).swapaxes(0, 1).reshape(mu.shape)),
    "neighbours exchanged": Fault(MISALIGNED, report=lambda mu, _r: mu[np.arange(ROWS) ^ 1], named=True),
    "reversed": Fault(MISALIGNED, report=lambda mu, _r: mu[:, ::-1], named=True),
    "base 2 in half of the rows": Fault(MISALIGNED, report=lambda mu, _r: np.where(
        np.arange(ROWS)[:, None] % 2, mu / np.log(2), mu)),
    "divided by the length": Fault(MISALIGNED, report=lambda mu, _r: mu / LENGTH, named=True),
    "with the mean of the row": Fault(MISALIGNED, report=lambda mu, _r: mu + mu.mean(1, keepdims=True)),
    "with the token before": Fault(MISALIGNED, report=lambda mu, _r: (mu + np.roll(mu, 1, 1)) / 2),
    "the mean of the group": Fault(MISALIGNED, report=lambda mu, _r: np.repeat(
        mu.reshape(-1, GROUP, LENGTH).mean(1), GROUP, 0)),
    "to a decimal": Fault(MISALIGNED, report=lambda mu, _r: np.round(mu, 1), named=True),
    "to two decimals beside a lag": Fault(MISALIGNED, report=lambda mu, _r: np.round(mu, 2), named=True, says=LAG),
    "in bfloat16": Fault(FORMAT, report=lambda mu, _r: to_bf16(mu), named=True),
    "in bfloat16 beside a lag": Fault(FORMAT, report=lambda mu, _r: to_bf16(mu), named=True, says=LAG),
    "in float16": Fault((*FORMAT, *MISALIGNED), report=lambda mu, _r: mu.astype(np.float16).astype(np.float64)),
}  # fmt: skip


@cache
def batch_of(name: str) -> TokenEvidence:
    """The batch of a fault."""
    return FAULTS[name].batch(0)
