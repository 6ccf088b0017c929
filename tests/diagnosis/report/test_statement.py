from __future__ import annotations

from typing import Any

import pytest

from trl_offpolicy.diagnosis.report.statement import describe_run
from trl_offpolicy.diagnosis.report.summary import summarize_run

K1, K3 = "offpolicy/mismatch/kl_k1", "offpolicy/mismatch/kl_k3"


def _describe(write_run: Any, *rows: dict[str, Any]) -> str:
    return describe_run(summarize_run(write_run([{"step": step, **row} for step, row in enumerate(rows)])))


def test_all_numbers_are_named(write_run: Any) -> None:
    text = _describe(
        write_run,
        {
            K1: -0.0003,
            K3: 0.0002,
            "offpolicy/weight/ess_token": 0.9712,
            "offpolicy/weight_applied/ess_token": 0.99123,
            "offpolicy/keep/dropped_token_fraction": 0.012,
            "offpolicy/keep/dropped_sequence_fraction": 0.0,
            "offpolicy/weight/truncated_fraction": 0.0425,
            "offpolicy/rollout/version_lag_mean": 1.5,
        },
    )
    assert "disagree by KL(sampler||trainer) 0.0002 nats per token (k3; the noisier estimate k1 gives -0.0003)" in text
    assert "difference of 2% in a token's probability" in text  # sqrt(2 * 0.0002)
    assert "97.1% with the raw weights and 99.12% with the weights as applied" in text
    assert "dropped 1.2% of the tokens, dropped no sequence and truncated 4.25% of the weights" in text
    assert "1.5 weight version(s) old" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.001, 0.0015), "stayed level: 0.001 to 0.0015"),
        ((0.001, 0.0016), "rose: 0.001 to 0.0016"),
        ((0.0016, 0.001), "fell: 0.0016 to 0.001"),
    ],
)
def test_trend_follows_the_quarters(write_run: Any, values: tuple[float, float], words: str) -> None:
    assert words in _describe(write_run, *({K3: value} for value in values))


def test_large_kl_names_no_typical_ratio(write_run: Any) -> None:
    assert "root mean square" not in _describe(write_run, {K3: 0.021})
    assert "difference of 20% in" in _describe(write_run, {K3: 0.02})


def test_identical_policies_are_called_the_same(write_run: Any) -> None:
    text = _describe(write_run, {K1: 0.0, K3: 0.0}, {K1: 0.0, K3: 0.0})
    assert "give the sampled tokens the same probabilities" in text
    assert "disagree" not in text and "quarter" not in text


def test_k1_alone_is_not_called_noisier(write_run: Any) -> None:
    assert "0.25".ljust(6, "0") + " nats per token (k1)." in _describe(write_run, {K1: 0.25})


def test_what_was_not_logged_is_said(write_run: Any) -> None:
    text = _describe(write_run, {"reward": 1.0})
    assert "Over 1 logged step, no KL between sampler and trainer was logged" in text
    assert "No effective sample size was logged" in text
    assert "dropped or truncated was not logged" in text
    assert "version" not in text


def test_the_ess_of_products_is_told_apart(write_run: Any) -> None:
    products = {"offpolicy/mismatch/ess_sequence": 0.25}
    assert "Weights of whole responses, uncapped, would leave 25%." in _describe(write_run, products)
    both = _describe(write_run, {**products, "offpolicy/weight/ess_token": 0.5})
    assert "is 50% with the raw weights, of 100% for equal weights. Weights of whole responses" in both


def test_total_ratio_is_named_as_such(write_run: Any) -> None:
    assert "mismatch and staleness together" in _describe(write_run, {"offpolicy/total/kl_k3": 0.1})


def test_nearly_full_sample_size_is_not_rounded_to_full(write_run: Any) -> None:
    assert "over 99.99% with the raw weights" in _describe(write_run, {"offpolicy/weight/ess_token": 0.9999999})
    assert "is 100% with the raw weights" in _describe(write_run, {"offpolicy/weight/ess_token": 1.0})


@pytest.mark.parametrize(
    ("floor", "sentence"),
    [
        (1e-4, "That is 20.00 times what the trainer differs from itself (KL k3 0.0001"),
        (1.9e-3, "That is no more than the trainer differs from itself (KL k3 0.0019"),
        (1e-14, "The trainer agrees with itself (KL k3 1.00e-14"),
    ],
)
def test_the_noise_floor_says_whether_a_number_means_anything(write_run: Any, floor: float, sentence: str) -> None:
    text = _describe(write_run, {K3: 0.002, "offpolicy/noise_floor/kl_k3": floor}, {K3: 0.002}, {K3: 0.002})
    assert sentence in text
