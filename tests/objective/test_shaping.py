"""Shaped advantages: against loops in float64, what they do to a gradient, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy import presets, shaping
from trl_offpolicy.functional.shaping import dual_ascent
from trl_offpolicy.integrations._common import read_method
from trl_offpolicy.objective.coefficients import STATE_FILE, ShapingControl, StepWindow, load_state, save_state
from trl_offpolicy.presets.parsing import parse_objective

NAN = float("nan")
OLD = [[0.5, 0.2, 0.9], [0.4, 0.1, 0.3]]
ENGINE = [[0.4, 0.25, 0.9], [0.1, 0.1, 0.6]]
MASK = [[True, True, False], [True, True, True]]
ADVANTAGES = [1.0, -0.5]
STATISTICS = {
    "binary_tv": lambda p, q: abs(p - q),
    "abs": lambda p, q: abs(math.log(p / q)),
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "k3": lambda p, q: p / q - 1 - math.log(p / q),
    "binary_kl": lambda p, q: q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)),
}


def batch(**changes: Any) -> op.PolicyBatch:
    logps = torch.tensor(OLD, dtype=torch.float64).log().float()
    fields: dict[str, Any] = {
        "per_token_logps": logps.clone().requires_grad_(),
        "old_per_token_logps": logps,
        "sampling_per_token_logps": torch.tensor(ENGINE, dtype=torch.float64).log().float(),
        "completion_mask": torch.tensor(MASK),
        "advantages": torch.tensor(ADVANTAGES),
        "rewards": torch.tensor([1.0, 0.0]),
        "group_rewards": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        "entropies": torch.tensor([[1.0, 3.0, 9.0], [0.5, 2.0, 1.0]]),
    }
    return op.PolicyBatch(**{**fields, **changes})


def one_price(p: float, q: float, statistic: str) -> float:
    return 0.0 if math.isnan(q) else STATISTICS[statistic](p, q)


# -------------------------------------------------------------------------------------------------------- discrepancy


@pytest.mark.parametrize("statistic", STATISTICS)
def test_each_token_pays_for_its_own_discrepancy(statistic: str) -> None:
    penalty = shaping.DiscrepancyPenalty(coef=0.3, target=None, statistic=statistic)  # type: ignore[arg-type]
    advantages, measured = penalty(batch())
    assert measured is not None and not advantages.requires_grad
    for row, (ours, engines, mask) in enumerate(zip(OLD, ENGINE, MASK, strict=True)):
        for at, (p, q, trained) in enumerate(zip(ours, engines, mask, strict=True)):
            price = one_price(p, q, statistic) if trained else 0.0
            assert measured[row, at].item() == pytest.approx(price, rel=1e-4, abs=1e-6)
            assert advantages[row, at].item() == pytest.approx(ADVANTAGES[row] - 0.3 * price, rel=1e-4)


def test_the_gradient_is_that_of_the_shaped_advantages_and_the_weight_stays() -> None:
    """PPO at ratio 1 with TIS: -w_t (A - lambda |p - q|) d log pi, token by token, over 5 tokens."""
    given = batch()
    correction = op.Correction(weight=op.TruncateWeight(max_weight=2.0))
    out = op.Objective(correction=correction, shaping=(shaping.DiscrepancyPenalty(coef=0.5, target=None),))(given)
    (gradient,) = torch.autograd.grad(out.loss, given.per_token_logps)
    for row in range(2):
        for at in range(3):
            p, q = OLD[row][at], ENGINE[row][at]
            expected = -min(p / q, 2.0) * (ADVANTAGES[row] - 0.5 * abs(p - q)) / 5 if MASK[row][at] else 0.0
            assert gradient[row, at].item() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    found = out.stats.compute()
    total = sum(abs(OLD[r][t] - ENGINE[r][t]) for r in range(2) for t in range(3) if MASK[r][t])
    assert found["offpolicy/loss/discrepancy"] == pytest.approx(total / 5, rel=1e-5)
    assert found["offpolicy/loss/discrepancy_coef"] == 0.5


def test_a_token_that_the_engine_did_not_score_costs_nothing() -> None:
    engine = torch.tensor(ENGINE).log()
    engine[1, 0], engine[0, 2] = NAN, NAN
    advantages, measured = shaping.DiscrepancyPenalty(coef=1.0)(batch(sampling_per_token_logps=engine))
    assert advantages[1, 0] == -0.5 and measured is not None and measured[1, 0] == 0


def test_staleness_has_no_price_where_no_old_policy_is_known() -> None:
    """The rows' versions are 3 and 4: of the first one |current - engine| is what training changed as well."""
    given = batch(old_per_token_logps=None, policy_versions=torch.tensor([3, 4]), current_version=4)
    _, measured = shaping.DiscrepancyPenalty(coef=1.0)(given)
    assert measured is not None and not measured[0].any() and measured[1].any()


def test_a_policy_learns_to_leave_the_token_on_which_the_two_disagree() -> None:
    """Two tokens of equal reward; the engine scores one of them off. The price moves the policy to the other one.

    The gradient is summed over both tokens of the engine in float64, so no sampling is involved."""
    engine, logits = torch.tensor([0.5, 0.5]), torch.zeros(2, requires_grad=True)
    objective = op.Objective(
        policy_loss=op.losses.GPG(), mode="bypass", shaping=(shaping.DiscrepancyPenalty(coef=1.0, target=None),)
    )
    off = torch.tensor([0.0, 0.3])  # what the engine reports for token 1 is 0.3 higher than what the trainer has
    for _ in range(40):
        logps = logits.log_softmax(-1)
        given = op.PolicyBatch(
            per_token_logps=logps.unsqueeze(1),
            sampling_per_token_logps=(logps.detach().exp() + off).clamp(max=1.0).log().unsqueeze(1),
            completion_mask=torch.ones(2, 1).bool(),
            advantages=torch.zeros(2),
        )
        loss = (objective(given).per_token_loss.squeeze(1) * engine).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - gradient).detach().requires_grad_()
    assert logits.softmax(-1)[0] > 0.9


def test_the_price_follows_the_violation_and_stays_in_its_bounds() -> None:
    penalty = shaping.DiscrepancyPenalty(coef=0.1, target=0.02, rate=5.0, max_coef=0.3)
    coefs = []
    for measured in (0.05, 0.05, 0.03, 0.0, 0.0, 0.0, 0.0):
        penalty = penalty.updated(measured)
        coefs.append(penalty.coef)
    assert coefs == pytest.approx([0.25, 0.3, 0.3, 0.2, 0.1, 0.0, 0.0])  # 0.1 + 5 (0.05 - 0.02), then the cap, ...
    assert dual_ascent(0.2, 0.02, target=0.02, rate=9.0, largest=1.0) == 0.2
    assert shaping.DiscrepancyPenalty(coef=0.1, target=None).updated(9.0).coef == 0.1


def test_the_dual_variable_holds_a_constraint() -> None:
    """A mean discrepancy that falls with the price, d = 0.1 exp(-3 lambda): the price settles where d is the target."""
    penalty = shaping.DiscrepancyPenalty(coef=0.0, target=0.02, rate=2.0, max_coef=5.0)
    for _ in range(400):
        penalty = penalty.updated(0.1 * math.exp(-3 * penalty.coef))
    assert penalty.coef == pytest.approx(math.log(5) / 3, rel=1e-3)


def test_a_step_moves_it_by_the_mean_of_all_micro_batches_and_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    objective = op.Objective(shaping=(shaping.DiscrepancyPenalty(coef=0.1, target=0.02, rate=2.0),))
    window, control = StepWindow(), ShapingControl(objective.shaping)
    assert control.moves
    other = batch(completion_mask=torch.tensor([[True, False, False]] * 2))
    for given in (batch(), other):
        window.add(given, objective(given).stats)
    prices = [
        abs(p - q) for p, q in ((0.5, 0.4), (0.2, 0.25), (0.4, 0.1), (0.1, 0.1), (0.3, 0.6), (0.5, 0.4), (0.4, 0.1))
    ]
    control.end_step(window.close())
    coef = 0.1 + 2.0 * (sum(prices) / 7 - 0.02)
    assert control.state_dict() == {"coef": pytest.approx(coef, rel=1e-5)}

    save_state(tmp_path, None, shaping=control)
    assert list(json.loads((tmp_path / STATE_FILE).read_text())) == ["shaping"]
    again = ShapingControl(objective.shaping)
    load_state(tmp_path, None, shaping=again)
    assert again.shaping == control.shaping and again.shaping != objective.shaping
    fixed = ShapingControl((shaping.ZeroVariance(correct_threshold=0.5),))
    fixed.load_state_dict({"coef": 0.7})
    assert not fixed.moves and fixed.state_dict() == {} and fixed.shaping[0].alpha == 0.1  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------ zero variance


def test_unanimous_prompts_learn_by_entropy() -> None:
    """Row 0: all correct, +alpha H. Row 1: all wrong, -alpha (2 - H), the largest H of its tokens is 2."""
    advantages, measured = shaping.ZeroVariance(correct_threshold=0.5, alpha=0.2)(batch())
    assert measured is None
    torch.testing.assert_close(advantages[0, :2], torch.tensor([0.2, 0.6]))
    torch.testing.assert_close(advantages[1], torch.tensor([-0.3, 0.0, -0.2]))


@pytest.mark.parametrize(
    "group",
    [[[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [[1.0, NAN, NAN], [0.0, NAN, NAN]]],
    ids=["a spread", "nothing to compare with"],
)
def test_other_prompts_keep_their_advantages(group: list[list[float]]) -> None:
    advantages, _ = shaping.ZeroVariance(correct_threshold=0.5)(batch(group_rewards=torch.tensor(group)))
    assert advantages.tolist() == [[1.0] * 3, [-0.5] * 3]


def test_a_response_without_a_reward_does_not_count() -> None:
    group = torch.tensor([[1.0, 1.0, NAN], [0.0, 0.0, NAN]])
    advantages, _ = shaping.ZeroVariance(correct_threshold=0.5, alpha=0.2)(batch(group_rewards=group))
    torch.testing.assert_close(advantages[0, :2], torch.tensor([0.2, 0.6]))
    own = batch(group_rewards=group, rewards=torch.tensor([NAN, 0.0]))
    assert shaping.ZeroVariance(correct_threshold=0.5)(own)[0][0].tolist() == [1.0] * 3


# ----------------------------------------------------------------------------------------------- order, YAML, refusals


def test_shapings_are_made_one_after_the_other() -> None:
    both = (shaping.ZeroVariance(correct_threshold=0.5, alpha=0.2), shaping.DiscrepancyPenalty(coef=1.0, target=None))
    given = batch()
    out = op.Objective(policy_loss=op.losses.GPG(), shaping=both)(given)
    (gradient,) = torch.autograd.grad(out.loss, given.per_token_logps)
    # 0.2 H - |p - q|, over 5 tokens
    torch.testing.assert_close(gradient[0, :2] * -5, torch.tensor([0.2 - 0.1, 0.6 - 0.05]), rtol=1e-4, atol=1e-6)


def test_a_mask_by_sign_sees_the_shaped_advantage() -> None:
    """The price turns the advantage of row 0 negative; only then does OPSM look at it."""
    given = batch(advantages=torch.tensor([0.01, -0.5]), sampling_per_token_logps=torch.full((2, 3), -0.01))
    mask = op.Correction(keep=(op.OffPolicySequenceMask(max_divergence=0.1),))
    plain = op.Objective(correction=mask)(given).keep_mask
    assert plain.any(-1).tolist() == [True, False]
    penalty = shaping.DiscrepancyPenalty(coef=1.0, target=None)
    assert not op.Objective(correction=mask, shaping=(penalty,))(given).keep_mask.any()


def test_yaml_names_them() -> None:
    spec = {"shaping": [{"type": "discrepancy", "target": 0.01}, {"type": "zero_variance", "correct_threshold": 1}]}
    objective = parse_objective(spec, where="objective", base=op.Objective())
    assert objective.shaping == (shaping.DiscrepancyPenalty(target=0.01), shaping.ZeroVariance(correct_threshold=1))
    one = parse_objective({"shaping": "discrepancy"}, where="objective", base=op.Objective())
    assert one.shaping == (shaping.DiscrepancyPenalty(),) and one.needs_sampling
    assert parse_objective({"shaping": None}, where="objective", base=one).shaping == ()
    with pytest.raises(ValueError, match=r"^objective\.shaping\[0\]\.type must be one of \['discrepancy', 'zero_vari"):
        parse_objective({"shaping": ["discrepency"]}, where="objective", base=op.Objective())
    assert presets.get("paper/dcmdp", target=0.1).objective.shaping == (shaping.DiscrepancyPenalty(target=0.1),)
    assert "A shaped by discrepancy (coef=0.05" in presets.get("paper/dcmdp").formula


def test_what_cannot_work_is_refused() -> None:
    moving, fixed = shaping.DiscrepancyPenalty(), shaping.DiscrepancyPenalty(target=None)
    with pytest.raises(ValueError, match=r"^shaping must hold at most one that measures and adapts, but got"):
        op.Objective(shaping=(moving, fixed))
    early = op.Correction(
        weight=op.ESSWeight(), keep=(op.OffPolicySequenceMask(max_divergence=0.1, ratio="old/sampling"),)
    )
    with pytest.raises(ValueError, match=r"^shaping must be empty with off_policy_sequence_mask"):
        op.Objective(correction=early, shaping=(fixed,))
    with pytest.raises(ValueError, match=r"^entropies must be given for ZeroVariance, but got None"):
        shaping.ZeroVariance(correct_threshold=0.5)(batch(entropies=None))
    with pytest.raises(ValueError, match=r"^sampling_per_token_logps must be given"):
        op.Objective(shaping=(fixed,))(batch(sampling_per_token_logps=None))
    with pytest.raises(ValueError, match=r"^coef must be at most max_coef \(1.0\), but got 2"):
        shaping.DiscrepancyPenalty(coef=2)
    with pytest.raises(NotImplementedError, match=r"offpolicy\.objective\.shaping must have fixed coefficients"):
        read_method({"preset": "paper/dcmdp"}, where="offpolicy", framework="verl")
    assert replace(moving, target=0.5).moves
