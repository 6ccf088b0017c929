from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from toy_policy import ROWS, SAME, make

from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute, coarse_of
from trl_offpolicy.diagnosis.attribution.distances import kl_k3
from trl_offpolicy.diagnosis.attribution.evidence import Declared, Seen, TokenEvidence, differences, excluded, padded
from trl_offpolicy.diagnosis.attribution.traces.features import extract
from trl_offpolicy.diagnosis.attribution.traces.noise import noise_level
from trl_offpolicy.diagnosis.attribution.traces.signatures import TESTS, read_signatures
from trl_offpolicy.diagnosis.attribution.trials.shares import REFERENCE

CAUSES = (
    "none", "temperature", "truncated_sampling", "precision", "other_weights", "dropout", "routing",
    "prompt_difference", "misalignment", "retokenised", "tool_tokens",
)  # fmt: skip
SHARED = ("precision", "other_weights", "routing", "prompt_difference")
"""Causes that leave a trace which others leave as well: from log-probs alone they are only the closest guess."""


def numbers(evidence: TokenEvidence) -> dict[str, float]:
    return {name: value for name, value in asdict(extract(evidence)).items() if not isinstance(value, str)}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cause", CAUSES)
def test_clear_traces_are_named_from_log_probs_alone_and_shared_ones_are_unknown(cause: str, seed: int) -> None:
    found = attribute(make(cause, seed=seed))
    assert found.level == "logps" and found.reasons and found.basis == "log-probs"
    if cause in SHARED:
        assert (found.cause, found.runner_up, found.confidence) == ("unknown", cause, 0.0), found.reasons
        assert "trl-offpolicy probe" in found.next_test
    else:
        assert found.cause == ("misalignment" if cause == "retokenised" else cause), found.reasons
        assert 0.5 <= found.confidence <= 1


def test_twenty_clean_batches_raise_no_alarm() -> None:
    assert {attribute(make("none", seed=seed)).cause for seed in range(20, 40)} == {"none"}


def test_the_size_of_a_temperature_is_told_and_without_entropies_it_is_the_closest_guess() -> None:
    evidence = make("temperature")
    assert "0.9" in attribute(evidence).detail
    found = attribute(replace(evidence, entropies=None))
    assert (found.cause, found.runner_up) == ("unknown", "temperature")


@pytest.mark.parametrize("cause", ["none", "truncated_sampling", "other_weights", "routing", "misalignment"])
def test_the_order_of_the_rows_does_not_matter(cause: str) -> None:
    evidence = make(cause)
    order = np.random.default_rng(0).permutation(ROWS)
    arrays = {name: value[order] for name, value in vars(evidence).items() if isinstance(value, np.ndarray)}
    mixed = replace(evidence, **arrays)
    assert numbers(mixed) == pytest.approx(numbers(evidence), rel=1e-9, nan_ok=True)
    assert attribute(evidence).cause == attribute(mixed).cause


@pytest.mark.parametrize("cause", ["truncated_sampling", "temperature"])
def test_with_the_sides_swapped_a_one_sided_trace_is_gone(cause: str) -> None:
    evidence = make(cause)
    swapped = replace(
        evidence,
        sampling_per_token_logps=evidence.old_per_token_logps,
        old_per_token_logps=evidence.sampling_per_token_logps,
    )
    found = attribute(swapped)
    assert found.cause != "truncated_sampling"
    assert (
        cause != "temperature" or found.features.temperature_slope > 0 > attribute(evidence).features.temperature_slope
    )


def test_padding_and_masked_tokens_do_not_count() -> None:
    evidence = make("precision")
    wide = {
        name: np.pad(value, ((0, 0), (0, 5)), constant_values=np.nan if value.dtype == float else 0)
        for name, value in vars(evidence).items()
        if isinstance(value, np.ndarray) and value.ndim == 2
    }
    padded_evidence = replace(evidence, **wide)
    assert numbers(padded_evidence) == pytest.approx(numbers(evidence), rel=1e-9, nan_ok=True)


def test_log_probs_in_another_unit_and_clipped_ones_are_misaligned() -> None:
    clean = make("none")
    mu = clean.sampling_per_token_logps
    for wrong in (mu / np.log(2), np.maximum(mu, -3.0)):
        found = attribute(replace(clean, sampling_per_token_logps=wrong))
        assert found.cause == "misalignment"


def test_swapped_rows_are_misaligned() -> None:
    clean = make("none")
    order = np.arange(ROWS)
    order[[3, 17]] = order[[17, 3]]
    found = attribute(replace(clean, sampling_per_token_logps=clean.sampling_per_token_logps[order]))
    assert found.cause == "misalignment" and "fit another row" in found.reasons[0]


def test_tokens_that_were_not_drawn_from_what_is_reported() -> None:
    """Engine and trainer agree on log-probs at temperature 1, and the tokens were drawn at 0.7."""
    drawn = make("temperature", size=3.0)  # the engine divides by 1 - 0.1 * 3
    raw = replace(drawn, sampling_per_token_logps=drawn.old_per_token_logps + 1e-6)
    found = attribute(raw)
    assert found.cause == "unreported_sampling" and found.features.surprise_z < -6
    assert attribute(replace(raw, entropies=None)).cause == "none"  # not to be seen without entropies


def test_a_noise_floor_beyond_arithmetic_does_not_silence_the_doctor() -> None:
    """Two scorings of the trainer that differ as much as engine and trainer: no mismatch is within such noise."""
    noisy = make("precision", size=10.0)
    d = noisy.old_per_token_logps - noisy.sampling_per_token_logps
    again = replace(noisy, rescored_per_token_logps=noisy.old_per_token_logps + np.roll(d, 1, axis=0))
    for trainer in (SAME, Declared()):
        assert attribute(replace(again, engine=trainer, trainer=trainer)).cause != "none"


def test_everything_at_random_is_unknown_or_of_low_confidence() -> None:
    clean = make("none")
    rng = np.random.default_rng(0)
    mu = clean.sampling_per_token_logps + rng.standard_t(2, clean.completion_mask.shape) * 0.3 + 0.5
    found = attribute(replace(clean, sampling_per_token_logps=mu))
    assert found.cause not in ("none", "temperature", "truncated_sampling", "misalignment", "tool_tokens")


# ---------------------------------------------------------------------------------------------------- declarations


def _declared(cause: str, engine: Declared, trainer: Declared = SAME) -> Attribution:
    return attribute(replace(make(cause), engine=engine, trainer=trainer))


def test_declarations_name_which_weights() -> None:
    assert _declared("other_weights", SAME).cause == "unknown"  # nothing is declared to differ: no cause by default
    assert _declared("other_weights", replace(SAME, weight_version=1)).cause == "policy_staleness"
    assert _declared("other_weights", replace(SAME, adapter="none")).cause == "wrong_adapter"
    assert {coarse_of(name) for name in ("stale_weights", "policy_staleness", "wrong_adapter")} == {"other_weights"}


def test_declarations_do_not_overrule_a_clear_trace_or_a_clean_batch() -> None:
    engine = replace(SAME, dtype="bfloat16", tools=True)
    trainer = replace(SAME, dropout=0.1, tools=True)
    assert _declared("temperature", engine, trainer).cause == "temperature"
    assert _declared("tool_tokens", engine, trainer).cause == "tool_tokens"
    assert _declared("none", engine, trainer).cause == "none"


def test_rounding_errors_are_precision_where_it_is_declared_and_noise_where_both_sides_have_it() -> None:
    assert _declared("precision", replace(SAME, dtype="bfloat16")).cause == "precision"
    assert _declared("precision", SAME).cause == "unknown"
    both = replace(SAME, dtype="bfloat16")
    assert _declared("precision", both, both).cause == "none"
    assert _declared("other_weights", both, both).cause != "none"  # 16 bits do not explain a direction


def test_what_was_seen_on_both_sides_comes_first() -> None:
    seen = (Seen("model_config", "RoPE base", "1000000", "10000"),)
    found = attribute(replace(make("prompt_difference"), seen=seen, compared=frozenset({"model_config"})))
    assert (found.cause, found.basis, found.next_test) == ("model_config", "seen", "")
    assert found.reasons[0] == "RoPE base: 1000000 in the engine, 10000 in the trainer"
    assert attribute(replace(make("none"), seen=seen)).cause == "none"  # without a mismatch there is nothing to explain


def test_what_was_compared_and_is_equal_is_not_the_cause() -> None:
    equal = replace(make("other_weights"), compared=frozenset({"weights"}))
    assert attribute(make("other_weights")).runner_up == "other_weights"
    assert attribute(equal).runner_up != "other_weights"


def test_what_is_not_declared_rules_nothing_out() -> None:
    assert differences(Declared(), Declared()) == {} and excluded(Declared(), Declared()) == frozenset()
    assert excluded(SAME, SAME) >= {"temperature", "truncated_sampling", "precision", "dropout", "routing"}
    assert set(differences(replace(SAME, temperature=0.7), SAME)) == {"temperature"}


# ----------------------------------------------------------------------------------------------------------- tested


def test_a_hypothesis_that_removes_the_mismatch_is_the_cause() -> None:
    evidence = make("precision")
    right, wrong = evidence.sampling_per_token_logps + 1e-5, evidence.old_per_token_logps + 1e-3
    tested = {
        "reference": evidence.old_per_token_logps,
        "engine:precision:int8 weights": wrong,
        "engine:wrong_adapter:no adapter": right,
    }
    found = attribute(replace(evidence, tested=tested))
    assert (found.cause, found.detail, found.level) == ("wrong_adapter", "no adapter", "logps+model")
    del tested["engine:wrong_adapter:no adapter"]
    assert (
        attribute(replace(evidence, tested=tested)).cause == "unknown"
    )  # the test leaves the mismatch, the trace is shared


def test_a_part_of_an_update_is_recognised_and_its_opposite_is_not() -> None:
    evidence = make("other_weights")
    d = evidence.old_per_token_logps - evidence.sampling_per_token_logps
    for factor, cause in ((10.0, "other_weights"), (-10.0, "unknown")):
        tested = {"reference": evidence.old_per_token_logps,
                  "engine:stale_weights:version 2": evidence.old_per_token_logps - factor * d}  # fmt: skip
        assert attribute(replace(evidence, tested=tested)).cause == cause


def test_where_plain_scoring_agrees_with_the_engine_the_trainer_is_at_fault() -> None:
    evidence = make("other_weights")
    tested = {
        "reference": evidence.sampling_per_token_logps,
        "engine:precision:bf16": evidence.sampling_per_token_logps,
    }
    found = attribute(replace(evidence, tested=tested))
    assert found.cause == "unknown" and any("disagree with the trainer" in text for text in found.reasons)
    tested["trainer:prompt_difference:no chat template"] = evidence.old_per_token_logps
    found = attribute(replace(evidence, tested=tested))
    assert (found.cause, found.detail) == ("prompt_difference", "no chat template")


# -------------------------------------------------------------------------------------------------------- evidence


def test_levels_take_away_what_lies_beyond() -> None:
    full = replace(make("none"), engine=SAME, trainer=SAME, tested={"reference": make("none").old_per_token_logps})
    assert [full.at_level(level).level for level in ("logps", "logps+config", "logps+model")] == [
        "logps", "logps+config", "logps+model",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="level must be one of"):
        full.at_level("all")  # type: ignore[arg-type]


def test_bad_evidence_names_the_field() -> None:
    clean = make("none")
    with pytest.raises(ValueError, match=r"entropies must have shape \(32, 24\), but got \(32, 1\)"):
        replace(clean, entropies=np.zeros((ROWS, 1)))
    with pytest.raises(ValueError, match="completion_mask must leave a token"):
        replace(clean, completion_mask=np.zeros_like(clean.completion_mask))
    with pytest.raises(ValueError, match=r"sampling_per_token_logps must have shape \(B, T\)"):
        TokenEvidence(
            sampling_per_token_logps=np.zeros(3), old_per_token_logps=np.zeros(3), completion_mask=np.ones(3, bool)
        )


def test_small_numbers() -> None:
    assert kl_k3(np.array([1e-6, -1e-6])) == pytest.approx(5e-13, rel=1e-5)
    assert kl_k3(np.array([0.5, np.nan])) == pytest.approx(np.exp(0.5) - 1.5)
    assert noise_level(make("none")) == 1e-10 and noise_level(make("dropout")) > 1e-4
    assert padded([[1.0], [2.0, 3.0]]).shape == (2, 2)


def test_every_test_scores_between_0_and_1_on_every_cause() -> None:
    for cause in CAUSES:
        signatures = read_signatures(extract(make(cause)))
        assert len(signatures) == len(TESTS) and all(0 <= s.score <= 1 and s.reason for s in signatures)


def evidence_of(sampling: Any, old: Any) -> TokenEvidence:
    mask = np.ones_like(old, dtype=bool)
    return TokenEvidence(sampling_per_token_logps=sampling, old_per_token_logps=old, completion_mask=mask)


def test_zeros_at_single_tokens_are_no_tools_output() -> None:
    """A tool's output is a run of tokens; a lost log-prob at each row's end is a fault of book-keeping."""
    random = np.random.default_rng(0)
    old = -random.exponential(1.0, (8, 20)) - 0.05
    runs, ends = old.copy(), old.copy()
    runs[::2, 5:12] = 0.0
    ends[:, -1] = 0.0
    found = [attribute(evidence_of(mu, old)).cause for mu in (runs, ends)]
    assert found == ["tool_tokens", "misalignment"]


def test_numbers_above_zero_are_no_log_probs() -> None:
    random = np.random.default_rng(0)
    logits = 3 * random.standard_normal((160, 50))
    old = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    chosen = np.array([random.choice(50, p=np.exp(row)) for row in old])[:, None]
    raw, whole = (np.take_along_axis(one, chosen, 1).reshape(8, 20) for one in (logits, old))
    found = attribute(evidence_of(raw, whole))
    assert found.cause == "misalignment" and "above 0: logits" in found.reasons[0]
    # a softmax in 16 bits puts a likely token a little above it
    rounded = attribute(evidence_of(np.where(whole > -0.01, 0.004, whole), whole))
    assert "above 0" not in " ".join(rounded.reasons)


@pytest.mark.parametrize(
    ("left", "dtype", "cause"),
    [(0.04, "float32", "model_config"), (0.08, "float32", "model_config"), (0.2, "float32", "unknown"),
     (0.2, "bfloat16", "model_config"), (0.3, "bfloat16", "unknown")],
)  # fmt: skip
def test_between_float32_sides_a_cause_must_leave_next_to_nothing(left: float, dtype: str, cause: str) -> None:
    random = np.random.default_rng(0)
    old = -random.exponential(1.0, (8, 40)) - 0.05
    gap = 0.3 * random.standard_normal(old.shape)
    side = Declared(dtype=dtype, quantization="none")
    evidence = replace(
        evidence_of(old - gap, old), engine=side, trainer=side,
        tested={REFERENCE: old, "engine:model_config:something else": old - (1 - left**0.5) * gap},
    )  # fmt: skip
    found = attribute(evidence)
    assert found.cause == cause
    assert found.explained == pytest.approx(1 - left, abs=0.05)
