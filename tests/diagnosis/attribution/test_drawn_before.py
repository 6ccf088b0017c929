"""Penalties and entropies of another temperature, on rows of a policy of a table whose tokens were really drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_policy import SAME, Toy, log_softmax

from trl_offpolicy.diagnosis.attribution.attribute import attribute
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence
from trl_offpolicy.diagnosis.attribution.traces.drawn_before import _drawn_before, penalised
from trl_offpolicy.diagnosis.attribution.traces.surprise import surprise_of


class Penalties:
    """An engine whose logits depend on what its row holds: ``change(logits, counts)`` are the new ones."""

    def __init__(self, toy: Toy, change: Any) -> None:
        self._toy, self._change = toy, change
        self._row, self._counts = -1, np.zeros(0)

    def __call__(self, logits: Any, row: int, place: int) -> Any:
        if place == 0:
            self._counts = np.zeros(len(logits))
        mu = log_softmax(self._change(logits, self._counts))
        # draw here as the toy will, from a copy of its generator, to know what the row holds next
        state = self._toy.rng.bit_generator.state
        token = int(self._toy.rng.choice(len(mu), p=np.exp(mu) / np.exp(mu).sum()))
        self._toy.rng.bit_generator.state = state
        self._counts[token] += 1
        return mu


def repetition(logits: Any, counts: Any) -> Any:
    """vLLM's and transformers' form, 1.3."""
    return np.where(counts > 0, np.where(logits > 0, logits / 1.3, logits * 1.3), logits)


PENALTIES = {
    "presence 0.8": lambda z, counts: z - 0.8 * (counts > 0),
    "frequency 0.5": lambda z, counts: z - 0.5 * counts,
    "repetition 1.3": repetition,
}


def of_penalty(name: str) -> TokenEvidence:
    toy = Toy(3)
    return toy.batch(Penalties(toy, PENALTIES[name]))


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("rounding", [0.0, 0.02])
def test_a_penalty_is_named_from_the_numbers(name: str, rounding: float) -> None:
    """Also where the engine rounds to bf16, and where a lag or another format is declared."""
    batch = of_penalty(name)
    noise = rounding * np.random.default_rng(0).standard_normal(batch.old_per_token_logps.shape)
    batch = replace(batch, sampling_per_token_logps=batch.sampling_per_token_logps + noise)
    lagging = replace(SAME, weight_version=2, dtype="bfloat16")
    for engine in (None, SAME, lagging):
        found = attribute(replace(batch, engine=engine, trainer=None if engine is None else SAME))
        assert found.cause == "logit_processors" and found.confidence > 0.5, found.reasons
        # what is said of zeros and grammars is not about this; older weights are
        assert set(found.alternatives) == {"stale_weights", *(() if engine is SAME else ("policy_staleness",))}
    assert attribute(replace(batch, token_ids=None)).cause == "unknown"


@pytest.mark.parametrize("moved", [1, -1, 5])
def test_numbers_that_were_moved_are_no_penalty(moved: int) -> None:
    """A few tokens come again and again among rare ones: moved by a place, each has the log-prob of the other kind."""
    rng = np.random.default_rng(0)
    ids = rng.integers(10, 400, (32, 64))
    ids[:, ::2] = rng.integers(0, 3, (32, 32))
    old = np.where(ids < 3, rng.uniform(-1.2, -0.9, ids.shape), rng.uniform(-7, -5, ids.shape))
    mu = np.roll(old, moved, 1)
    batch = TokenEvidence(
        sampling_per_token_logps=mu, old_per_token_logps=old, completion_mask=np.ones(ids.shape, bool),
        entropies=np.where(ids < 3, 1.05, 5.9), token_ids=ids, group_ids=np.arange(32) // 4,
    )  # fmt: skip
    found = attribute(batch)
    assert found.features.penalised > 0.8 and found.cause == "misalignment", found.reasons


def test_what_leans_the_other_way_is_no_penalty() -> None:
    """The trainer penalises: a token that was drawn before is likelier in the engine."""
    batch = of_penalty("presence 0.8")
    turned = replace(
        batch,
        sampling_per_token_logps=batch.old_per_token_logps,
        old_per_token_logps=batch.sampling_per_token_logps,
        rescored_per_token_logps=None,
    )
    assert attribute(turned).features.penalised < -0.5
    assert attribute(turned).cause != "logit_processors"


def test_by_hand() -> None:
    ids = np.array([[5, 6, 5, 5, 7], [5, 5, 6, 6, 6]])
    observed = np.array([[True, True, True, True, True], [False, True, True, True, False]])
    expected = [[False, False, True, True, False], [False, False, False, True, False]]
    assert _drawn_before(ids, observed).tolist() == expected
    few = TokenEvidence(
        sampling_per_token_logps=np.zeros((2, 5)), old_per_token_logps=np.zeros((2, 5)), completion_mask=observed,
        token_ids=ids,
    )  # fmt: skip
    assert np.isnan(penalised(few, np.zeros((2, 5))))  # too few
    rows = 10
    many = replace(
        few,
        sampling_per_token_logps=np.zeros((rows, 5)),
        old_per_token_logps=np.tile([-1.0, -3.0, -3.0, -1.0, -1.0], (rows, 1)),  # the mean is -1.8
        completion_mask=np.ones((rows, 5), bool),
        token_ids=np.tile(ids[:1], (rows, 1)),
    )
    d = np.tile([-0.1, -0.3, 0.5, 3.0, 0.02], (rows, 1))
    # drawn before: 0.5 (a rare one) and 3.0, cut to 1; new: -0.1, -0.3 and 0.02
    assert penalised(many, d) == pytest.approx(0.38 / 0.42)
    # rare ones that were drawn before lean down, or likely ones that are new (the first and the last) lean up
    assert penalised(many, np.where(d == 0.5, -0.2, d)) == pytest.approx(-1.0)
    assert penalised(many, np.where(d == -0.1, 0.01, d)) == pytest.approx(-1.0)
    entropies = np.tile([0.5, 4.0, 2.0, 0.5, 0.5], (rows, 1))  # with these the second alone is likelier than a draw
    assert penalised(replace(many, entropies=entropies), np.where(d == -0.1, 0.01, d)) == pytest.approx(0.27 / 0.33)


@pytest.mark.parametrize("entropies", [True, False])
@pytest.mark.parametrize("temperature", [0.7, 1.3, 1.6])
def test_a_temperature_is_no_penalty(temperature: float, entropies: bool) -> None:
    """Likely tokens are drawn again and again, and a flatter engine lowers those."""
    toy = Toy(8)
    toy.table = 3.0 * toy.table  # peaked, so that rows repeat themselves
    batch = toy.batch(lambda z, _row, _place: log_softmax(z / temperature))
    found = attribute(batch if entropies else replace(batch, entropies=None))
    assert not found.features.penalised > 0.3
    assert found.cause in ("temperature", "unknown")


def tempered(temperature: float) -> TokenEvidence:
    """Both sides at a temperature, entropies of the plain logits."""
    change = lambda z, _row, _place: log_softmax(3 * z / temperature)  # noqa: E731
    toy = Toy(5)
    batch = toy.batch(change, change)
    plain = Toy(5)
    entropies = np.zeros_like(batch.old_per_token_logps)
    for row in range(len(entropies)):
        last = row // 4
        for place, token in enumerate(batch.token_ids[row].tolist()):
            log_p = log_softmax(3 * plain.logits(row, last))
            entropies[row, place], last = -np.sum(np.exp(log_p) * log_p), token
    return replace(batch, entropies=entropies)


def test_entropies_of_another_temperature_are_not_those_of_the_log_probs() -> None:
    """A token of 0.99 leaves a hundredth for all others. Entropies of what was drawn from are judged as before."""
    other = tempered(0.5)
    assert np.isnan(surprise_of(other, other.old_per_token_logps)).all()
    assert attribute(other).cause == "none"
    same = tempered(1.0)
    assert abs(surprise_of(same, same.old_per_token_logps)[1]) < 4
    # drawn at 0.5, and both sides report the plain distribution: nothing is impossible, and it is told
    plain = plain_logps(other)
    unreported = replace(
        other, sampling_per_token_logps=plain, old_per_token_logps=plain, rescored_per_token_logps=None
    )
    assert attribute(unreported).cause == "unreported_sampling"


def plain_logps(batch: TokenEvidence) -> Any:
    """Log-probs of the tokens of :func:`tempered` at temperature 1."""
    toy, found = Toy(5), np.zeros_like(batch.old_per_token_logps)
    assert batch.token_ids is not None
    for row in range(len(found)):
        last = row // 4
        for place, token in enumerate(batch.token_ids[row].tolist()):
            found[row, place], last = log_softmax(3 * toy.logits(row, last))[token], token
    return found
