"""An adaptive KL coefficient and the centres of the clip through the real trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import score_last_word
from trainer_runs import Engine, records, rollouts, scoring_calls

import trl_offpolicy as op
from trl_offpolicy.functional.kl import adaptive_kl_coef
from trl_offpolicy.objective.coefficients import STATE_FILE, StepWindow, check_horizon, load_state, next_kl
from trl_offpolicy.objective.proximal import AveragedProximal, InterpolatedProximal, RecomputedProximal
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

Build = Callable[..., OffPolicyGRPOTrainer]

ADAPTIVE = {"type": "adaptive", "coef": 0.5, "target": 0.02, "horizon": 40}
KL = {"preset": "measure", "objective": {"kl": {"coef": ADAPTIVE, "estimator": "k3"}}}
ROWS = 8

# --------------------------------------------------------------------------------------------------------- adaptive KL


def test_the_coefficient_follows_what_was_measured(build: Build) -> None:
    """Step by step the formula on the logged KL of the whole step: two micro-batches, not the last one."""
    trainer = build(Engine(), offpolicy=KL, max_steps=6, learning_rate=2e-2)
    trainer.train()
    rows = records(trainer)
    coefs = [row["offpolicy/loss/kl_coef"] for row in rows]
    assert coefs[0] == 0.5
    for row, after in zip(rows, [*coefs[1:], trainer._kl.beta], strict=True):
        expected = adaptive_kl_coef(
            row["offpolicy/loss/kl_coef"], row["offpolicy/loss/kl"], target=0.02, samples=ROWS, horizon=40
        )
        assert after == pytest.approx(expected, rel=1e-5)
        assert row["kl"] == row["offpolicy/loss/kl"]
        whole = row["offpolicy/loss/policy"] + row["offpolicy/loss/kl_coef"] * row["offpolicy/loss/kl"]
        assert row["loss"] == pytest.approx(whole, abs=1e-5)
    assert min(coefs) < 0.5 < trainer._kl.beta  # down while nothing has moved, up once it has


def test_a_fixed_coefficient_stays_and_leaves_no_state(build: Build) -> None:
    offpolicy = {"objective": {"kl": {"coef": 0.1}}}
    trainer = build(Engine(), offpolicy=offpolicy, save_strategy="steps", save_steps=2, control="off")
    trainer.train()
    assert [row["offpolicy/loss/kl_coef"] for row in records(trainer)] == [pytest.approx(0.1)] * 2
    (state,) = Path(trainer.args.output_dir).glob(f"**/{STATE_FILE}")
    assert json.loads(state.read_text()) == {"groups": {"train": 4, "eval": 0}}  # no coefficient


def test_resuming_goes_on_with_the_coefficient(build: Build) -> None:
    options = {"offpolicy": KL, "max_steps": 4, "learning_rate": 2e-2}
    first = build(Engine(), **options, save_strategy="steps", save_steps=2)
    first.train()
    before = [row["offpolicy/loss/kl_coef"] for row in records(first)]
    folder = Path(first.args.output_dir) / "checkpoint-2"
    assert json.loads((folder / STATE_FILE).read_text())["kl"] == {"coef": pytest.approx(before[2], rel=1e-12)}
    again = build(Engine(), **options)
    again.train(resume_from_checkpoint=str(folder))
    after = [row["offpolicy/loss/kl_coef"] for row in records(again)]
    assert after[:3] == before[:3] and len(set(before)) == 4
    assert after[2] != 0.5 and len(after) == 4


def test_the_noise_of_the_forward_learns_and_goes_on_from_a_checkpoint(build: Build) -> None:
    options = {"perturbation": {"std": 0.05, "learning_rate": 0.1}, "max_steps": 4, "learning_rate": 2e-2}
    first = build(Engine(), **options, save_strategy="steps", save_steps=2)
    first.train()
    scales = [row["offpolicy/perturbation/std"] for row in records(first)]
    assert scales[0] == pytest.approx(0.05) and len(set(scales)) == 4
    assert not any("noise_floor" in key for row in records(first) for key in row)
    again = build(Engine(), **options)
    again.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    assert [row["offpolicy/perturbation/std"] for row in records(again)][2] == pytest.approx(scales[2])
    ids = torch.arange(3, 9)[None]
    assert torch.equal(again.model(input_ids=ids).logits, again.model(input_ids=ids).logits), "it ends with the run"


def test_a_preset_perturbs_the_forward_that_learns(build: Build) -> None:
    """ALP by name: the engine's log-probs are the unperturbed policy's, so the ratio above them holds the noise."""
    found = []
    for method in ("paper/ppo-is", {"preset": "paper/alp", "options": {"std": 0.05}}):
        trainer = build(Engine(), offpolicy=method, max_steps=3, learning_rate=1e-3)
        trainer.train()
        found.append(records(trainer)[0])  # the next run has the same folder
    plain, noisy = found
    assert noisy["offpolicy/perturbation/std"] == pytest.approx(0.05) and "offpolicy/perturbation/std" not in plain
    assert noisy["offpolicy/total/kl_k3"] > 1e-5 > 1e-9 > plain["offpolicy/total/kl_k3"]


def test_a_checkpoint_without_state_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kl = op.KLPenalty(coef=op.AdaptiveKL(**{key: value for key, value in ADAPTIVE.items() if key != "type"}))
    assert load_state(tmp_path, kl) is kl
    assert f"has no {STATE_FILE}: the KL coefficient starts again at 0.5" in caplog.text
    (tmp_path / STATE_FILE).write_text(json.dumps({"kl": {"coef": 0.25}}))
    restored = load_state(tmp_path, kl)
    assert restored is not None and restored.beta == 0.25


def test_a_horizon_of_one_step_is_refused(make_args: Callable[..., Any]) -> None:
    short = {"objective": {"kl": {"coef": {**ADAPTIVE, "horizon": 1.6}}}}
    with pytest.raises(ValueError, match=r"kl\.coef\.horizon must be above 1\.6 with 8 responses .* but got 1\.6"):
        OffPolicyGRPOTrainer("no such model", score_last_word, make_args(offpolicy=short))
    check_horizon(op.KLPenalty(coef=op.AdaptiveKL(coef=1.0, target=1.0, horizon=1.7)), 8)


def test_sums_wait_until_the_step_ends() -> None:
    """Two micro-batches of unlike length: one mean over all tokens, of all ranks."""
    window, kl = StepWindow(), op.KLPenalty(coef=op.AdaptiveKL(coef=1.0, target=0.5, horizon=100))
    for length in (1, 3):
        batch = op.PolicyBatch(
            per_token_logps=torch.full((2, length), -1.0),
            ref_per_token_logps=torch.full((2, length), -1.0 - length / 10),
            completion_mask=torch.ones(2, length),
            advantages=torch.ones(2),
            entropies=torch.full((2, length), float(length)),
        )
        window.add(batch, op.Objective(kl=op.KLPenalty(coef=1.0, estimator="k1"))(batch).stats)
    step = window.close(lambda sums: 2 * sums)  # another rank with the same
    assert step.tokens == 16 and step.kl == pytest.approx(4 * 0.1 + 12 * 0.3) and step.responses == 4
    assert step.mean_entropy == pytest.approx((4 * 1 + 12 * 3) / 16)
    expected = adaptive_kl_coef(1.0, 4.0 / 16, target=0.5, samples=8, horizon=100)
    assert next_kl(kl, step, world_size=2).beta == pytest.approx(expected) and expected < 1
    assert next_kl(kl, step._replace(tokens=0.0), world_size=2) is kl


# ------------------------------------------------------------------------------------------------ centres of the clip


def seen_by_the_objective(monkeypatch: pytest.MonkeyPatch) -> list[tuple[op.PolicyBatch, op.ObjectiveOutput]]:
    """The batches of all loss steps and what came out."""
    calls: list[tuple[op.PolicyBatch, op.ObjectiveOutput]] = []
    original = op.Objective.__call__

    def watched(self: Any, batch: op.PolicyBatch, reduction: Any = None) -> op.ObjectiveOutput:
        calls.append((batch, original(self, batch, reduction)))
        return calls[-1][1]

    monkeypatch.setattr(op.Objective, "__call__", watched)
    return calls


def clipped(batch: op.PolicyBatch, log_ratio: torch.Tensor) -> torch.Tensor:
    """PPO's loss by token, detached."""
    ratio, advantage = log_ratio.exp(), batch.advantages[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[batch.mask]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("recomputed", RecomputedProximal()),
        ("interpolated", InterpolatedProximal()),
        ({"type": "interpolated", "lag": 2}, InterpolatedProximal(lag=2)),
        ({"type": "averaged", "decay": 0.9}, AveragedProximal(decay=0.9)),
    ],
)
def test_every_centre_learns(build: Build, spec: Any, expected: Any) -> None:
    offpolicy = {"preset": "paper/tis", "objective": {"proximal": spec}}
    trainer = build(Engine(noise=0.3), offpolicy=offpolicy, num_iterations=2, max_steps=4)
    assert trainer.objective.proximal == expected
    trainer.train()
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in records(trainer))


def test_interpolation_has_no_forward_of_its_own(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four optimizer steps on a generation. Centre at lag n: (n - 1) / n of the way from the sampler to the policy."""
    forwards = scoring_calls(monkeypatch)
    calls = seen_by_the_objective(monkeypatch)
    trainer = build(
        Engine(noise=0.1),
        offpolicy={"objective": {"proximal": "interpolated"}},
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=4,
        learning_rate=1e-2,
    )
    trainer.train()
    assert forwards == [4] * 4
    for lag, (batch, result) in enumerate(calls):
        assert batch.old_per_token_logps is None and batch.sampling_per_token_logps is not None
        assert batch.version_lags is not None and (batch.version_lags == lag).all()
        whole = batch.per_token_logps.detach() - batch.sampling_per_token_logps
        share = 0.0 if lag == 0 else 1 / lag  # current/centre = (current/mu)^share
        actual = result.per_token_loss.detach()[batch.mask]
        torch.testing.assert_close(actual, clipped(batch, share * whole), rtol=1e-4, atol=1e-5)
        assert lag == 0 or (share * whole)[batch.mask].abs().max() > 0.05
    rows = records(trainer)
    # Of later passes the old policy is not known: a correlation of 0 over nothing would read as a broken engine.
    assert [row.get("offpolicy/mismatch/logp_diff_max", 0) > 0 for row in rows] == [True, False, False, False]
    assert ["offpolicy/mismatch/kl_k3" in row for row in rows] == [True, False, False, False]
    assert all(row["offpolicy/total/logp_diff_max"] > 0.05 for row in rows)
    old_known = (
        rollouts(trainer).groupby("step").old_per_token_logps.apply(lambda rows: np.isfinite(np.concatenate([*rows])))
    )
    assert [values.all() for values in old_known] == [True, False] and not old_known[1].any()  # nobody scored them


def test_without_an_engine_interpolation_starts_from_trls_old(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = seen_by_the_objective(monkeypatch)
    trainer = build(
        offpolicy={"objective": {"proximal": "interpolated"}}, gradient_accumulation_steps=1, steps_per_generation=2
    )
    trainer.train()
    assert all(batch.old_per_token_logps is not None and batch.sampling_per_token_logps is None for batch, _ in calls)


def test_the_average_follows_its_rows(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes over a shuffled generation: old, then old and one policy, then two, each with its weight."""
    calls = seen_by_the_objective(monkeypatch)
    trainer = build(
        Engine(),
        offpolicy={"objective": {"proximal": {"type": "averaged", "decay": 0.5}}},
        num_iterations=3,
        max_steps=6,
        learning_rate=1e-2,
    )
    trainer.train()
    assert len(calls) == 12  # two generations, three passes, two micro-batches
    for generation in (calls[:6], calls[6:]):
        policies: dict[tuple[float, ...], list[torch.Tensor]] = {}
        for index, (batch, result) in enumerate(generation):
            assert (batch.past_average is None) == (index < 2) and result.average is not None
            for row, mask in enumerate(batch.mask):
                assert batch.old_per_token_logps is not None
                old = batch.old_per_token_logps[row][mask]
                seen = policies.setdefault(tuple(old.tolist()), [old])
                if index >= 2:
                    seen.append(batch.per_token_logps[row][mask].detach())
                weights = [0.5 ** (len(seen) - 1 - i) for i in range(len(seen))]
                expected = sum(w * logps for w, logps in zip(weights, seen, strict=True)) / sum(weights)
                torch.testing.assert_close(result.average.logps[row][mask], expected, rtol=0, atol=1e-5)
        assert len(policies) == ROWS and all(len(seen) == 3 for seen in policies.values())
        assert all((seen[2] - seen[0]).abs().max() > 1e-2 for seen in policies.values())


def test_centres_that_a_loss_ignores_are_refused(make_args: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"offpolicy\.objective: proximal must be RecomputedProximal\(\).*GPG"):
        make_args(offpolicy={"objective": {"policy_loss": {"type": "gpg"}, "proximal": "interpolated"}})
    with pytest.raises(ValueError, match=r"proximal\.type must be one of .*'averaged'.* Did you mean 'averaged'"):
        make_args(offpolicy={"objective": {"proximal": "average"}})
    with pytest.raises(ValueError, match=r"proximal\.decay must be given for AveragedProximal"):
        make_args(offpolicy={"objective": {"proximal": "averaged"}})
