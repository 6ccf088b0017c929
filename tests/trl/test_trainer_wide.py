"""Corrections of wide scope in the trainer: decided before TRL's shuffle, equal to one call on the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import score_last_word
from trainer_runs import GENERATIONS, Engine, generation_batches, records, rollouts, scoring_calls

import trl_offpolicy as op
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer
from trl_offpolicy.types import WIDE_SCOPES

pytestmark = pytest.mark.integration  # trains

Build = Callable[..., OffPolicyGRPOTrainer]

BUDGET = {"type": "second_moment_budget", "budget": 0.05}
WIDE = {
    "budget": {"correction": {"keep": [BUDGET]}},
    "normalised": {"preset": "paper/tis", "correction": {"normalize": "original"}},
    "normalised over kept": {"preset": "paper/tis", "correction": {"normalize": "kept", "keep": [BUDGET]}},
    "ess": {"correction": {"weight": {"type": "ess", "target": 0.97}}},
    "group": {"correction": {"keep": [{"type": "ratio_band", "level": "group", "low": 0.95, "high": 1.05}]}},
    "group rejection": {
        "correction": {
            "keep": [
                {"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": 1.1},
                {"type": "group_rejection", "max_dropped_fraction": 0.3},
            ]
        }
    },
    "turns": {"correction": {"weight": {"type": "truncate", "level": "turn", "max_weight": 1.5}, "keep": [BUDGET]}},
}


@pytest.mark.parametrize("name", WIDE)
def test_micro_batches_get_what_the_whole_batch_decides(build: Build, name: str) -> None:
    trainer = build(Engine(noise=0.3), offpolicy=WIDE[name])
    seen = generation_batches(trainer)
    trainer.train()
    correction = trainer.objective.correction
    assert correction is not None and correction.scope in WIDE_SCOPES
    assert len(seen) == 2
    frame = rollouts(trainer)
    for step, output in enumerate(seen):
        whole = correction(
            op.PolicyBatch(
                per_token_logps=output["old_per_token_logps"],
                sampling_per_token_logps=output["sampling_per_token_logps"],
                completion_mask=output["completion_mask"],
                advantages=output["advantages"],
                group_ids=output["group_ids"],
            )
        )
        by_text = {tuple(row.completion_ids): row for row in frame[frame.step == step].itertuples()}
        for i, mask in enumerate(output["completion_mask"].bool()):
            row = by_text[tuple(output["completion_ids"][i][mask].tolist())]
            assert list(row.keep_mask) == whole.keep_mask[i][mask].tolist()
            assert list(row.weights) == pytest.approx(whole.weights[i][mask].tolist(), abs=1e-5)
    for row in records(trainer):
        assert all(math.isfinite(value) for key, value in row.items() if key.startswith("offpolicy/"))


def test_what_wide_scope_costs_is_one_forward_a_generation_and_said(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = scoring_calls(monkeypatch)
    trainer = build(Engine(noise=0.3), offpolicy=WIDE["budget"])
    assert "one more forward" in caplog.text and "generation_batch" in caplog.text
    trainer.train()
    assert calls == [4, 4, 4, 4] * 2  # the old policy in two micro-batches, then their losses


def test_terms_on_the_current_policy_join_in_the_loss_step(build: Build) -> None:
    """Two optimizer steps on one generation: staleness appears in the second, drops count once."""
    keep = [BUDGET, {"type": "off_policy_sequence_mask", "max_divergence": 0.0}]
    trainer = build(Engine(noise=0.3), offpolicy={"correction": {"keep": keep}}, steps_per_generation=4)
    trainer.train()
    rows = records(trainer)
    assert "offpolicy/keep/second_moment_budget/dropped_fraction" in rows[0]
    assert "offpolicy/keep/second_moment_budget/dropped_fraction" not in rows[1]  # decided once a generation
    assert rows[0]["offpolicy/keep/off_policy_sequence_mask/dropped_fraction"] > 0
    assert all(row["offpolicy/keep/dropped_token_fraction"] > 0 for row in rows)
    assert [row["offpolicy/staleness/kl_k3"] > 1e-3 for row in rows] == [False, True]


def test_rejected_responses_leave_the_baseline(build: Build) -> None:
    keep = [{"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": 1.1}]
    trainer = build(Engine(noise=0.3), offpolicy={"correction": {"keep": keep, "baseline": "kept"}})
    trainer.train()
    frame = rollouts(trainer)
    frame["kept"] = frame.keep_mask.map(any)
    assert 0 < frame.kept.sum() < len(frame)
    for _, group in frame.groupby("group_id"):
        assert len(group) == GENERATIONS
        kept = group[group.kept]
        spread = kept.reward.std() if len(kept) > 1 else 0.0
        expected = (kept.reward - kept.reward.mean()) / (spread + 1e-4)
        assert list(kept.advantage) == pytest.approx(list(expected), abs=1e-4)
        assert (group[~group.kept].advantage == 0).all()


def test_with_nothing_rejected_the_kept_baseline_is_trls(build: Build) -> None:
    """A band that never fires: loss and advantages are those of a plain run."""
    wide = {"correction": {"keep": [{"type": "ratio_band", "low": 1e-6, "high": None}], "baseline": "kept"}}
    plain, kept = (build(Engine(noise=0.3), offpolicy=spec) for spec in ("measure", wide))
    losses = []
    for trainer in (plain, kept):
        trainer.train()
        losses.append([row["loss"] for row in records(trainer)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert any(abs(loss) > 1e-3 for loss in losses[0])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_kept_denominator_over_accumulation_is_that_of_one_batch(build: Build, loss_type: str) -> None:
    """Two micro-batches of 4 or one of 8: the same loss, because the denominator is the whole step's."""
    spec = {
        "correction": {
            "keep": [
                {"type": "ratio_band", "level": "token", "low": 0.6, "high": 1.6},
                {"type": "ratio_band", "level": "sequence_mean", "low": 0.85, "high": 1.15},
            ]
        },
        "objective": {"denominator": "kept"},
    }
    losses = []
    for rows, accumulation in ((4, 2), (8, 1)):
        trainer = build(
            Engine(noise=0.3),
            offpolicy=spec,
            loss_type=loss_type,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
        )
        trainer.train()
        losses.append(records(trainer)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert abs(losses[0]) > 1e-3


REFUSED = {
    "opsm and kept baseline": (
        {"correction": {"keep": [{"type": "off_policy_sequence_mask", "max_divergence": 0.1}], "baseline": "kept"}},
        {},
        "baseline must be 'all' with off_policy_sequence_mask",
    ),
    "opsm and kept denominator": (
        {
            "correction": {"keep": [{"type": "off_policy_sequence_mask", "max_divergence": 0.1}]},
            "objective": {"denominator": "kept"},
        },
        {},
        "denominator must be 'all' with off_policy_sequence_mask",
    ),
    "several objectives": (
        {"correction": {"keep": [{"type": "ratio_band", "low": 0.5, "high": 2.0}], "baseline": "kept"}},
        {"multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation must be 'sum_then_normalize'",
    ),
    "order": (
        {
            "correction": {
                "measure_on": "remaining",
                "keep": [{"type": "off_policy_sequence_mask", "max_divergence": 0.1}, BUDGET],
            }
        },
        {},
        "measure_on must be 'original'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(make_args: Callable[..., Any], name: str) -> None:
    spec, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        OffPolicyGRPOTrainer("no such model", score_last_word, make_args(use_vllm=True, offpolicy=spec, **options))


# --------------------------------------------------------------------------------------------------------- noise floor


@pytest.mark.parametrize("rows", [4, 1], ids=["halves", "one row"])
def test_noise_floor_is_the_trainer_against_itself(build: Build, rows: int) -> None:
    trainer = build(
        Engine(shift=0.1),
        offpolicy="paper/tis",
        noise_floor_steps=2,
        max_steps=3,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=8 // rows,
    )
    trainer.train()
    measured = [row.get("offpolicy/noise_floor/logp_diff_max") for row in records(trainer)]
    assert measured[1] is None
    assert measured[0] is not None and measured[2] is not None
    assert max(measured[0], measured[2]) < 1e-5  # float32 on one machine; the mismatch is 0.1


def test_intervals_are_logged_and_evaluation_groups_do_not_collide(build: Build) -> None:
    trainer = build(Engine(noise=0.3), offpolicy="paper/tis")
    trainer.train()
    for row in records(trainer):
        assert row["offpolicy/mismatch/kl_k3_ci95"] > 0
        assert 0 < row["offpolicy/weight_applied/ess_token_ci95"] < 1
    assert trainer._row_counter.seen == {"train": 4, "eval": 0}
    trainer.evaluate()
    assert trainer._row_counter.seen["eval"] > 0 and trainer._row_counter.seen["train"] == 4


@pytest.mark.parametrize("name", ["quatro", "oapl"])
def test_losses_that_read_the_whole_group_get_its_rewards(build: Build, name: str) -> None:
    """TRL shuffles groups apart; each row carries the rewards of its group along."""
    options = {"quatro": {"type": "quatro"}, "oapl": {"type": "oapl", "beta": 1.0}}[name]
    trainer = build(Engine(noise=0.3), offpolicy={"preset": "measure", "objective": {"policy_loss": options}})
    seen = generation_batches(trainer)
    trainer.train()
    for output in seen:
        groups = output["rewards"].view(-1, GENERATIONS)
        assert torch.equal(output["group_rewards"], groups.repeat_interleave(GENERATIONS, dim=0))
    assert all(math.isfinite(row["loss"]) and row["loss"] != 0 for row in records(trainer))
