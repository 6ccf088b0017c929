"""The TRL trainer and the Lightning module on the same rollouts: same loss, gradients, metrics and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from both_trainers import GRADIENT_LIMIT, STEPS, assert_same_numbers, distance, run_lightning, run_trl

from trl_offpolicy.rollouts import perturbed_forward

pytestmark = pytest.mark.integration  # trains

IN_REWARD = {
    "preset": "paper/tis",
    "objective": {"kl": {"coef": 1.0, "estimator": "k1", "place": "reward"}},
    "advantages": "dr_grpo",
}
PRICE = {"type": "discrepancy", "statistic": "abs", "coef": 0.3, "target": 0.1, "rate": 2.0, "max_coef": 9.0}
SHAPED = {"preset": "paper/qurl", "objective": {"shaping": [PRICE]}}  # each optimizer step has another price
BAND = {"type": "ratio_band", "level": "sequence_mean", "low": 0.7, "high": 1.4}
SPARSE = {"keep_first": 1, "keep_last": 2, "rounding": "fp8", "scale": 0.02}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # TRL's options, the module's, the data's
    "aligned": ({"gradient_accumulation_steps": 1}, {}, {}),
    "accumulated": ({"gradient_accumulation_steps": 2}, {}, {"steps_per_generation": 2}),
    "several_iterations": ({"gradient_accumulation_steps": 1, "num_iterations": 2}, {}, {"num_iterations": 2}),
    "kl": (
        {"gradient_accumulation_steps": 1, "beta": 0.1},
        {"objective": {"kl": {"coef": 0.1, "ratio_weighted": True}}},
        {},
    ),
    "sequences": (
        {"gradient_accumulation_steps": 2, "loss_type": "grpo"},
        {"objective": {"aggregation": "seq_mean_token_mean"}},
        {},
    ),
    "wide_scope": (
        {
            "gradient_accumulation_steps": 1,
            "offpolicy": {
                "preset": "paper/tis",
                "correction": {"keep": [BAND, {"type": "group_rejection"}], "normalize": "kept"},
            },
        },
        {},
        {},
    ),
    "other_advantages": (
        {"gradient_accumulation_steps": 1, "offpolicy": {"preset": "paper/tis", "advantages": "rloo"}}, {}, {},
    ),
    "advantages_that_read_old": (  # no part of the correction is decided early, but old is scored
        {
            "gradient_accumulation_steps": 1,
            "offpolicy": {"preset": "paper/tis", "advantages": "optimal_token_baseline"},
        }, {}, {},
    ),
    "shaped_advantages": (
        {"gradient_accumulation_steps": 2, "offpolicy": SHAPED}, {}, {"steps_per_generation": 2},
    ),
    "ctpo": (
        {"gradient_accumulation_steps": 1, "num_iterations": 2, "offpolicy": "paper/ctpo-clip"}, {},
        {"num_iterations": 2},
    ),
    "rounded_forward": (  # of the policy and of its reference
        {"gradient_accumulation_steps": 1, "beta": 0.1, "learner_rounding": "int4"},
        {"objective": {"kl": {"coef": 0.1, "ratio_weighted": True}}, "learner_rounding": "int4"},
        {},
    ),
    "compressed_forward": (  # distilled from the policy's own dense context
        {
            "gradient_accumulation_steps": 1, "learner_kv_cache": SPARSE, "kl_reference": "dense_context",
            "offpolicy": {"preset": "paper/tis", "objective": {"kl": {"coef": 0.3}}},
        },
        {"learner_kv_cache": SPARSE, "kl_reference": "dense_context"},
        {},
    ),
    "kl_in_the_reward": ({"gradient_accumulation_steps": 1, "offpolicy": IN_REWARD}, {}, {}),
    "kl_in_the_reward_in_bypass": (  # the sampler is the old policy
        {"gradient_accumulation_steps": 1, "offpolicy": {**IN_REWARD, "preset": "paper/ppo-is"}}, {}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_metrics_and_weights_are_those_of_trl(case: str, build_trl: Any, tmp_path: Path) -> None:
    options, ours, sizes = CASES[case]
    theirs, rows, calls = run_trl(build_trl, **options)
    settings = {"correction": options.get("offpolicy", "paper/tis"), **ours}
    watch, engine = run_lightning(tmp_path, calls, options["gradient_accumulation_steps"], settings, sizes)

    assert engine.prompts == [call["prompt_ids"] for call in calls]
    assert len(watch.logs) == len(rows) == STEPS
    assert max(float(g.abs().max()) for g in theirs.gradients[0].values()) > 1e-2  # something is compared
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert distance(watch.weights[step], theirs.weights[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])


def test_prompts_without_a_spread_leave_the_step_as_with_trl(build_trl: Any, tmp_path: Path) -> None:
    term = {"type": "equal_rewards", "tolerance": 0.5}  # the rewards of this task are never quite equal
    spec = {"preset": "paper/tis", "objective": {"denominator": "kept"}, "correction": {"keep": [term]}}
    theirs, rows, calls = run_trl(build_trl, gradient_accumulation_steps=2, offpolicy=spec)
    watch, _ = run_lightning(tmp_path, calls, 2, {"correction": spec}, {})
    dropped = [row["offpolicy/keep/equal_rewards/dropped_fraction"] for row in rows]
    assert any(0 < share < 1 for share in dropped)
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])


def test_noise_on_hidden_states_and_its_scale_are_those_of_trl(
    build_trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generators of random numbers differ, so the noise of this test is a function of the hidden state."""
    monkeypatch.setattr(perturbed_forward, "_normal", lambda hidden: (37.0 * hidden.detach()).cos() * 2**0.5)
    noise = {"std": 0.05, "learning_rate": 0.1}
    plain, _, _ = run_trl(build_trl, gradient_accumulation_steps=2)
    theirs, rows, calls = run_trl(build_trl, gradient_accumulation_steps=2, perturbation=noise)
    watch, _ = run_lightning(tmp_path, calls, 2, {"perturbation": noise}, {"steps_per_generation": 2})
    assert distance(theirs.gradients[0], plain.gradients[0]) > 1e-3
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT
        assert_same_numbers(watch.logs[step], rows[step])
    scales = [row["offpolicy/perturbation/std"] for row in rows]
    assert len({round(scale, 6) for scale in scales}) == STEPS  # it learns


def test_a_shaping_moves_the_gradient_and_its_price_moves_by_the_step(build_trl: Any) -> None:
    without = {"preset": "paper/qurl"}
    (shaped, rows, _), (plain, _, _) = (
        run_trl(build_trl, gradient_accumulation_steps=2, offpolicy=spec) for spec in (SHAPED, without)
    )
    assert distance(shaped.gradients[0], plain.gradients[0]) > 1e-3
    prices = [row["offpolicy/loss/discrepancy_coef"] for row in rows]
    assert prices[0] == pytest.approx(0.3)
    for row, after in zip(rows, prices[1:], strict=False):
        wanted = row["offpolicy/loss/discrepancy_coef"] + 2.0 * (row["offpolicy/loss/discrepancy"] - 0.1)
        assert after == pytest.approx(min(max(wanted, 0.0), 9.0), rel=1e-4) and after > 0.31


def one_for_all(completions: list[str], **_: object) -> list[float]:
    """A reward that is the same for all responses."""
    return [1.0] * len(completions)


def test_prompts_with_one_reward_learn_by_entropy_as_in_trl(build_trl: Any, tmp_path: Path) -> None:
    spec = {"preset": "paper/rl-zvp", "options": {"alpha": 0.5}}

    def same_rewards(ours: Any) -> None:
        ours.reward_funcs = [one_for_all]

    theirs, _, calls = run_trl(build_trl, prepare=same_rewards, gradient_accumulation_steps=1, offpolicy=spec)
    watch, _ = run_lightning(tmp_path, calls, 1, {"correction": spec, "reward_funcs": one_for_all}, {})
    assert max(float(g.abs().max()) for g in theirs.gradients[0].values()) > 1e-2  # without the shaping it is 0
    for step in range(STEPS):
        assert distance(watch.gradients[step], theirs.gradients[step]) < GRADIENT_LIMIT


def test_a_kl_in_the_reward_moves_the_gradient_once_the_policy_has_moved(build_trl: Any) -> None:
    without = {"preset": "paper/tis", "advantages": "dr_grpo"}
    runs = [run_trl(build_trl, gradient_accumulation_steps=1, offpolicy=spec)[0] for spec in (IN_REWARD, without)]
    assert distance(runs[0].gradients[0], runs[1].gradients[0]) < GRADIENT_LIMIT  # the policy is still the reference
    assert distance(runs[0].gradients[1], runs[1].gradients[1]) > 1e-3


def test_a_flipped_sign_of_the_advantage_is_seen(build_trl: Any, tmp_path: Path) -> None:
    """The comparison above is not satisfied by gradients of the right size alone."""
    theirs, _, calls = run_trl(build_trl, gradient_accumulation_steps=1)
    flipped = {"reward_weights": [-1.0]}
    watch, _ = run_lightning(tmp_path, calls, 1, flipped, {})
    assert distance(watch.gradients[0], theirs.gradients[0]) > 1e-2
