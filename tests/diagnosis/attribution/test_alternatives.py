"""Faults that leave the evidence of another one: the doctor says what it cannot exclude, and names no cause for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_policy import GROUP, LENGTH, ROWS, SAME, VOCABULARY, Toy, log_softmax, make

from trl_offpolicy.diagnosis.attribution.alternatives import LOOK_ALIKES
from trl_offpolicy.diagnosis.attribution.attribute import NAMED, attribute
from trl_offpolicy.diagnosis.attribution.evidence import Seen, TokenEvidence
from trl_offpolicy.diagnosis.attribution.trials.shares import REFERENCE
from trl_offpolicy.diagnosis.causes import CAUSES

Report = Callable[[Any], Any]


def reported(change: Report, seed: int = 0) -> TokenEvidence:
    """A clean batch whose engine log-probs are changed on their way."""
    clean = make("none", seed=seed)
    return replace(clean, sampling_per_token_logps=change(clean.sampling_per_token_logps.copy()))


def without(evidence: TokenEvidence, **fields: Any) -> TokenEvidence:
    return replace(evidence, **fields)


def zeros_at_the_end(mu: Any) -> Any:
    mu[:, -6:] = 0.0
    return mu


def test_log_probs_that_were_filled_up_are_no_tools_output() -> None:
    found = attribute(reported(zeros_at_the_end))
    assert found.cause == "misalignment" and "to the end of their row" in found.reasons[0]


def test_zeros_alone_say_nothing() -> None:
    """A greedy engine gives 0 for each token, and so does one whose log-probs were lost: entropies tell them apart."""
    lost = reported(np.zeros_like)
    assert attribute(replace(lost, entropies=None)).cause == "unknown"
    assert attribute(lost).cause == "misalignment"  # its tokens are as rare as draws


def test_text_that_a_grammar_forces_is_no_tools_output_where_no_tools_are_in_use() -> None:
    forced = make("tool_tokens")
    named = attribute(replace(forced, engine=replace(SAME, tools=True), trainer=replace(SAME, tools=True)))
    found = attribute(replace(forced, engine=SAME, trainer=SAME))
    assert named.cause == "tool_tokens" and set(named.alternatives) == {"logit_processors", "misalignment"}
    assert (found.cause, found.runner_up) == ("unknown", "tool_tokens") and "grammar" in found.reasons[1]


@pytest.mark.parametrize("number", [0.1, -0.1, 0.01])
def test_a_constant_is_no_truncation(number: float) -> None:
    """Each ratio is below 1, as under top-p; but a kept mass changes from token to token."""
    found = attribute(reported(lambda mu: mu + number))
    assert found.cause == "misalignment" and "same number" in found.reasons[0]


def test_a_softmax_over_more_tokens_is_no_truncation() -> None:
    """The trainer counts the padding of its vocabulary: ratios never exceed 1, but rare tokens are there."""
    extra = Toy(0).batch(trainer=lambda z, row, place: z - np.log(np.exp(z).sum() + 20.0))
    found = attribute(extra)
    assert (found.cause, found.runner_up) == ("unknown", "truncated_sampling")
    assert "as rare as without truncation" in found.reasons[1]
    cut = make("truncated_sampling")
    assert attribute(cut).cause == "truncated_sampling"
    assert attribute(without(cut, entropies=None)).runner_up == "truncated_sampling"  # then they look alike


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_narrow_truncation_is_not_the_log_prob_of_the_most_likely_token(kept: int) -> None:
    def narrow(z: Any, row: int, place: int) -> Any:
        return log_softmax(np.where(z >= np.sort(z)[-kept], z, -np.inf))

    assert attribute(Toy(1).batch(narrow)).cause != "misalignment"


def test_the_log_prob_of_the_most_likely_token_is_recognised() -> None:
    tops = []
    toy = Toy(2)

    def plain(z: Any, row: int, place: int) -> Any:
        logps = log_softmax(z)
        tops.append(logps.max())
        return logps

    clean = toy.batch(plain)
    found = attribute(replace(clean, sampling_per_token_logps=np.reshape(tops, (ROWS, LENGTH))))
    assert found.cause == "misalignment" and "most likely token" in found.reasons[0]


def test_short_answers_are_not_clipped_log_probs() -> None:
    """Answers of one token: a rare one is given by several rows, all with the same log-prob."""
    rng = np.random.default_rng(3)
    answer = rng.random(ROWS) < 0.2
    old = np.where(answer, -1.6, -0.22)[:, None]
    gap = np.where(answer, -0.1, 0.02)[:, None]
    short = TokenEvidence(
        sampling_per_token_logps=old - gap, old_per_token_logps=old, completion_mask=np.ones((ROWS, 1), bool)
    )
    assert attribute(short).cause != "misalignment"
    clipped = reported(lambda mu: np.maximum(mu, -3.0))
    assert attribute(clipped).cause == "misalignment"


def test_copies_of_completions_are_no_other_sampling() -> None:
    """A group of copies counts once: the mean of -log p of a few rows is often far from the entropy."""
    for seed in range(8):
        clean = make("none", seed=seed)
        first = np.arange(ROWS) // 16 * 16
        arrays = {name: value[first] for name, value in vars(clean).items() if isinstance(value, np.ndarray)}
        assert attribute(replace(clean, **arrays)).cause == "repeated_draws"


def test_entropies_that_cannot_be_are_not_believed() -> None:
    clean = make("none")
    assert clean.entropies is not None
    assert attribute(replace(clean, entropies=0.3 * clean.entropies)).cause == "none"


def test_without_entropies_what_flattens_is_not_called_a_temperature() -> None:
    flat = Toy(0).batch(lambda z, row, place: np.log(0.95 * np.exp(log_softmax(z)) + 0.05 / VOCABULARY))
    for evidence in (flat, make("temperature")):
        found = attribute(without(evidence, entropies=None, rescored_per_token_logps=None))
        assert (found.cause, found.runner_up) == ("unknown", "temperature") and "entropies" in found.reasons[1]


BF16 = replace(SAME, dtype="bfloat16")


@pytest.mark.parametrize(
    ("cause", "size", "why"),
    [("precision", 20.0, "explain 0.02 at most"), ("other_weights", 1.0, "equal tokens differ alike"),
     ("prompt_difference", 1.0, "explain 0.02 at most")],
)  # fmt: skip
def test_a_format_that_differs_in_many_healthy_runs_is_not_blamed_for_what_it_does_not_do(
    cause: str, size: float, why: str
) -> None:
    evidence = make(cause, size=size)
    seen = (Seen("precision", "data type", "bfloat16", "float32"),)
    declared = attribute(replace(evidence, engine=BF16, trainer=SAME))
    asked = attribute(replace(evidence, engine=BF16, trainer=SAME, seen=seen))
    for found in (declared, asked):
        assert found.cause == "unknown", found.reasons
    assert any(why in reason for reason in asked.reasons), asked.reasons
    assert asked.next_test
    right = attribute(replace(make("precision"), engine=BF16, trainer=SAME, seen=seen))
    assert (right.cause, right.basis) == ("precision", "seen")


def test_a_declared_lag_is_not_blamed_for_other_prompts() -> None:
    late = replace(SAME, weight_version=2)
    found = attribute(replace(make("prompt_difference"), engine=late, trainer=SAME))
    assert found.cause == "unknown"
    assert attribute(replace(make("other_weights"), engine=late, trainer=SAME)).cause == "policy_staleness"


def test_what_a_name_leaves_open_is_told_with_the_test_that_decides() -> None:
    found = attribute(make("temperature"))
    assert found.alternatives and "Not ruled out" in found.next_test
    equal = attribute(replace(make("temperature"), compared=frozenset({"model_config"})))
    assert "model_config" not in equal.alternatives
    assert all(one in CAUSES or one == "other_weights" for alike in LOOK_ALIKES.values() for one in alike.causes)
    assert NAMED == 0.5 and ROWS % GROUP == 0


def leaving(evidence: TokenEvidence, **left: float) -> TokenEvidence:
    """With tests of the engine's side that leave these shares of the mismatch, in a direction of their own each."""
    old, mu = evidence.old_per_token_logps, evidence.sampling_per_token_logps
    found = {REFERENCE: old}
    for number, (cause, share) in enumerate(left.items()):
        around = np.where((np.arange(LENGTH) + number) % 2, 1.0, -1.0)
        found[f"engine:{cause}:something"] = mu + np.sqrt(share) * around * (old - mu)
    return replace(evidence, tested=found)


@pytest.mark.parametrize(("rival", "cause"), [(0.011, "unknown"), (0.2, "model_config")])
def test_of_two_causes_that_fit_as_well_neither_is_named(rival: float, cause: str) -> None:
    found = attribute(leaving(make("prompt_difference"), model_config=0.01, prompt_difference=rival))
    assert found.cause == cause
    if cause == "unknown":
        assert any("model config" in one and "prompt difference something leaves" in one for one in found.reasons)


@pytest.mark.parametrize(("left", "cause"), [(1.0, "unknown"), (0.5, "precision")])
def test_a_declared_format_is_not_named_if_no_simulated_rounding_is_like_the_tokens(left: float, cause: str) -> None:
    evidence = replace(make("precision"), engine=BF16, trainer=SAME)
    old, mu = evidence.old_per_token_logps, evidence.sampling_per_token_logps
    random = np.random.default_rng(0).normal(0, 0.02, old.shape)
    simulated = mu + np.sqrt(left) * (old - mu) if left < 1 else old + random
    found = attribute(replace(evidence, tested={REFERENCE: old, "engine:precision:bf16": simulated}))
    assert found.cause == cause, found.reasons
    if cause == "unknown":
        assert any("none is like it" in one for one in found.reasons)
