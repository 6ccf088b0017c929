"""The two parts of a wide correction: what each decides, measures and refuses."""

from dataclasses import replace

import pytest
import torch
from batches import policy_batch

import trl_offpolicy as op
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.objective.staging import stage

TOKEN_BAND = op.RatioBand(level="token", low=0.5, high=2.0)
OPSM = op.OffPolicySequenceMask(max_divergence=0.0)
BUDGET = op.SecondMomentBudget(budget=0.05)
IDS = torch.tensor([0, 0, 1, 1])
RATIOS = [[1.1, 9.0], [0.9, 1.0], [8.0, 7.0], [1.0, 1.2]]


def batch(**fields):
    return policy_batch(RATIOS, group_ids=IDS, rewards=torch.tensor([1.0, 0.0, 4.0, 2.0]), **fields)


def test_a_row_correction_has_one_stage():
    assert stage(op.Objective(correction=op.Correction(keep=(TOKEN_BAND, OPSM)))) is None
    assert stage(op.Objective()) is None


def test_parts_measure_each_group_once():
    stages = stage(op.Objective(correction=op.Correction(keep=(BUDGET, OPSM))))

    assert stages.early.measure == ("mismatch",)
    assert set(stages.late.correction.measure) == {"staleness", "total", "kept"}
    assert "keep" not in stages.decide(batch()).stats.groups  # the loss steps count all that is dropped
    alone = stage(op.Objective(correction=op.Correction(keep=(BUDGET,))))
    assert alone.early.measure == ("mismatch", "kept")
    assert "keep" in alone.decide(batch()).stats.groups


def test_kept_counts_are_those_of_the_mask():
    decided = stage(op.Objective(correction=op.Correction(keep=(BUDGET,)))).decide(batch())

    assert decided.kept_tokens.item() == decided.rows["decided_keep"].sum().item() == 5
    assert decided.kept_sequences.item() == 3


def test_token_rejection_never_erases_the_reward():
    """The token that carries 9.0 goes; its response stays in the baseline and keeps its advantage."""
    correction = op.Correction(keep=(TOKEN_BAND,), baseline="kept")
    decided = stage(op.Objective(correction=correction), op.advantages.DrGRPO()).decide(batch())

    assert decided.rows["decided_keep"].tolist() == [[True, False], [True, True], [False, False], [True, True]]
    assert decided.rows["advantages"].tolist() == [0.5, -0.5, 0.0, 0.0]  # row 2 is gone: its group is down to one


def test_the_kl_in_the_reward_is_in_the_advantages_and_not_in_the_loss():
    kl = op.KLPenalty(coef=0.5, estimator="k1", place="reward")
    ref = torch.log(torch.tensor(RATIOS)) * 0.3 - 1.0
    mine = batch(ref_per_token_logps=ref)
    stages = stage(op.Objective(kl=kl))

    decided = stages.decide(mine)

    assert stages.needs_old and isinstance(stages.advantages, op.advantages.GRPO)
    log_ratios = torch.where(mine.mask, mine.logps("old") - ref, 0.0)
    totals = mine.rewards - 0.5 * log_ratios.sum(-1)
    spread = [totals[i : i + 2] for i in (0, 2)]
    expected = torch.cat([(pair - pair.mean()) / (pair.std() + 1e-4) for pair in spread])
    torch.testing.assert_close(decided.rows["advantages"], expected, rtol=1e-5, atol=1e-5)

    with_kl, without = (objective(mine) for objective in (op.Objective(kl=kl), op.Objective()))
    assert torch.equal(with_kl.per_token_loss, without.per_token_loss)
    assert float(with_kl.stats["loss/kl"]) != 0.0  # measured, though it is no term of the loss
    in_loss = op.Objective(kl=op.KLPenalty(coef=0.5, estimator="k1"))(mine)
    assert not torch.equal(in_loss.per_token_loss, without.per_token_loss)

    with pytest.raises(ValueError, match="ref_per_token_logps must be given for a KL penalty in the reward"):
        stages.decide(batch())


def test_in_mode_bypass_the_kl_in_the_reward_is_that_of_the_sampler():
    """log mu - log ref by hand: verl's old policy is then the sampler."""
    kl = op.KLPenalty(coef=0.5, estimator="k1", place="reward")
    sampling = torch.tensor([[-1.0, -2.0], [-1.0, torch.nan], [-3.0, -1.0], [-1.0, -1.0]])
    given = batch(ref_per_token_logps=torch.full((4, 2), -1.5), sampling_per_token_logps=sampling)
    stages = stage(op.Objective(kl=kl, mode="bypass"), op.advantages.DrGRPO())
    assert not stages.needs_old
    # sums over tokens of log mu - log ref: 0, 0.5 (one token without log mu), -1, 1; rewards 1, 0, 4, 2
    totals = torch.tensor([1.0, -0.25, 4.5, 1.5])
    expected = totals - torch.tensor([0.375, 0.375, 3.0, 3.0])
    torch.testing.assert_close(stages.decide(given).rows["advantages"], expected)
    with pytest.raises(ValueError, match="sampling_per_token_logps must be given"):
        stages.decide(replace(given, sampling_per_token_logps=None))


def test_a_token_that_the_sampler_could_not_have_drawn_costs_nothing():
    kl = op.KLPenalty(coef=0.5, estimator="k1", place="reward")
    sampling = torch.tensor([[-1.0, -2.0], [-1.0, -torch.inf], [-3.0, -1.0], [-1.0, -1.0]])
    given = batch(ref_per_token_logps=torch.full((4, 2), -1.5), sampling_per_token_logps=sampling)
    decided = stage(op.Objective(kl=kl, mode="bypass"), op.advantages.DrGRPO()).decide(given)
    torch.testing.assert_close(decided.rows["advantages"], torch.tensor([0.625, -0.625, 1.5, -1.5]))


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_the_kl_in_the_reward_is_added_to_rewards_by_token(mode):
    """By hand: the total of a response is its reward, the rewards of its tokens, and minus their KL."""
    kl = op.KLPenalty(coef=0.5, estimator="k1", place="reward")
    given = batch(ref_per_token_logps=torch.full((4, 2), -1.5))
    by_token = torch.tensor([[0.25, -1.0], [2.0, 0.5], [0.0, 3.0], [-0.75, 0.125]])
    rows = AdvantageInputs(rewards=given.rewards, group_ids=given.group_ids, token_rewards=by_token)
    stages = stage(op.Objective(kl=kl, mode=mode), op.advantages.DrGRPO(), token_rewards=True)
    logps = given.logps("sampling" if mode == "bypass" else "old").tolist()
    totals = []
    for row, inside in enumerate(given.mask.tolist()):
        total = float(given.rewards[row])
        for place in range(2):
            if inside[place]:
                total += float(by_token[row, place]) - 0.5 * (logps[row][place] + 1.5)
        totals.append(total)
    expected = []
    for row, total in enumerate(totals):
        own = [totals[i] for i in range(4) if given.group_ids[i] == given.group_ids[row]]
        expected.append(total - sum(own) / len(own))
    found = stages.decide(given, rows).rows["advantages"].tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    without = stages.decide(given, replace(rows, token_rewards=None)).rows["advantages"].tolist()
    assert found != pytest.approx(without, abs=0.1)


def test_rewards_by_token_need_the_whole_batch_and_refuse_what_would_leave_them_out():
    stages = stage(op.Objective(), token_rewards=True)
    assert stages.advantages == op.advantages.GRPO() and not stages.needs_old and stages.early is None
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with the advantages of GDPO"):
        stage(op.Objective(), op.advantages.GDPO(), token_rewards=True)
    for loss in (op.losses.OAPL(beta=1.0), op.losses.OAPL(beta=1.0, scope="micro_batch")):
        with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with OAPL, but got true: it re"):
            stage(op.Objective(policy_loss=loss), token_rewards=True)
        assert stage(op.Objective(policy_loss=loss)) is None
    shaped = op.Objective(shaping=(op.shaping.ZeroVariance(correct_threshold=0.5),))
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with ZeroVariance, .* group_rewards,"):
        stage(shaped, token_rewards=True)
    filtered = op.Objective(correction=op.Correction(keep=(TOKEN_BAND, op.EqualRewards())))
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with EqualRewards, .* group_rewards,"):
        stage(filtered, token_rewards=True)
    corrected = replace(shaped, correction=op.Correction(keep=(TOKEN_BAND,)))  # a term that reads no rewards
    with pytest.raises(NotImplementedError, match=r"^token_rewards must be false with ZeroVariance, .* group_rewards,"):
        stage(corrected, token_rewards=True)


def test_gdpo_has_no_place_for_a_kl_in_the_reward():
    kl = op.KLPenalty(coef=0.5, estimator="k1", place="reward")
    with pytest.raises(NotImplementedError, match=r"^kl\.place must be 'loss' with the advantages of GDPO"):
        stage(op.Objective(kl=kl), op.advantages.GDPO())


def test_a_penalty_of_ones_own_is_taken_from_the_reward():
    class Squared(op.KLPenalty):
        def __call__(self, log_ratios, policy_log_ratios):
            assert not policy_log_ratios.any()
            return log_ratios**2

    logps, ref, mask = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -1.0]]), torch.tensor([[True, True]])
    costs = Squared(coef=0.5, place="reward").token_rewards(logps, ref, mask)
    assert costs.tolist() == [[-0.5, -2.0]]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"place": "head"}, ValueError, "place must be one of"),
        ({"place": "reward", "ratio_weighted": True}, ValueError, "ratio_weighted must be False with place 'reward'"),
        ({"place": "reward", "estimator": "k3+"}, ValueError, "estimator must be one of .* with place 'reward'"),
        (
            {"place": "reward", "coef": op.AdaptiveKL(coef=0.1, target=0.1, horizon=1000)},
            NotImplementedError,
            "coef must be a number with place 'reward'",
        ),
    ],
)
def test_what_a_kl_in_the_reward_cannot_be(fields, error, message):
    with pytest.raises(error, match=message):
        op.KLPenalty(**{"coef": 0.1, **fields})


def test_a_kept_baseline_needs_rewards_and_groups():
    stages = stage(op.Objective(correction=op.Correction(keep=(TOKEN_BAND,), baseline="kept")))

    with pytest.raises(ValueError, match="rewards and group_ids must be given for advantages and baseline='kept'"):
        stages.decide(policy_batch(RATIOS))


def test_a_kept_denominator_needs_the_whole_batch():
    stages = stage(op.Objective(correction=op.Correction(keep=(TOKEN_BAND,)), denominator="kept"))

    assert stages.decide(batch()).kept_tokens.item() == 5
    with pytest.raises(ValueError, match="denominator must be 'all' with off_policy_sequence_mask"):
        stage(op.Objective(correction=op.Correction(keep=(OPSM,)), denominator="kept"))


@pytest.mark.parametrize(
    "term", [op.OffPolicySequenceMask(max_divergence=0.1, ratio="old/sampling"), op.ProbabilityDifferenceMask()]
)
def test_a_kept_baseline_refuses_terms_that_read_its_sign(term):
    with pytest.raises(ValueError, match=f"baseline must be 'all' with {term.name}, which decides by the sign"):
        op.Correction(keep=(term,), baseline="kept")


def test_a_kept_denominator_costs_nothing_where_nothing_can_be_dropped():
    assert stage(op.Objective(correction=op.Correction(weight=op.RawWeight()), denominator="kept")) is None
    assert stage(op.Objective(correction=op.Correction(nonfinite="drop"), denominator="kept")) is not None


# ---------------------------------------------------------------------------------------------------------- advantages

TIS = op.Correction(weight=op.TruncateWeight(max_weight=2.0))
BY_SIGN = op.ProbabilityDifferenceMask()
OTB = op.advantages.OptimalTokenBaseline()
AWARE = op.advantages.OptimalTokenBaseline(is_aware=True)
SUMS = {"sum_sq_probs": torch.tensor([[0.5, 0.6], [0.7, 0.4], [0.3, 0.9], [0.2, 0.8]])}


def test_rewards_alone_ask_for_nothing_else():
    """The correction stays whole in the loss step, and no old log-probs are needed."""
    stages = stage(op.Objective(correction=TIS), op.advantages.RLOO())

    assert stages.early is None and stages.late.correction is TIS
    assert not (stages.needs_old or stages.needs_sum_sq_probs)
    inputs = op.advantages.AdvantageInputs(rewards=batch().rewards, group_ids=IDS)
    assert stages.estimate(inputs).rows["advantages"].tolist() == [1.0, -1.0, 2.0, -2.0]
    assert stages.decide(batch()).rows.keys() == {"advantages"}


def test_what_an_estimator_reads_decides_what_is_staged():
    plain, aware = (stage(op.Objective(correction=TIS), estimator) for estimator in (OTB, AWARE))

    assert plain.needs_old and plain.needs_sum_sq_probs and plain.early is None
    assert aware.needs_old and aware.needs_sum_sq_probs and aware.early.weights == TIS.weights
    assert aware.late.correction.weight == ()
    assert stage(op.Objective(correction=op.Correction(keep=(BUDGET,)))).advantages is None


def test_importance_weights_come_from_the_correction():
    whole = batch(**SUMS)
    decided = stage(op.Objective(correction=TIS), AWARE).decide(whole)

    weights = TIS(whole).weights
    inputs = op.advantages.AdvantageInputs(
        rewards=whole.rewards,
        group_ids=IDS,
        mask=whole.mask,
        per_token_logps=whole.old_per_token_logps,
        weights=weights,
        **SUMS,
    )
    assert torch.equal(decided.rows["advantages"], AWARE(inputs))
    assert torch.equal(decided.rows["decided_weights"], weights)
    assert not torch.allclose(decided.rows["advantages"], OTB(inputs), atol=1e-3)


def test_rejected_responses_count_unless_the_baseline_is_that_of_kept_ones():
    """Row 2 is rejected, and its reward of 4 stays in the mean."""
    whole = batch(**SUMS)
    fields = {"weight": TIS.weight, "keep": (TOKEN_BAND,)}
    every, kept = (
        stage(op.Objective(correction=op.Correction(**fields, baseline=baseline)), AWARE).decide(whole)
        for baseline in ("all", "kept")
    )
    inputs = AdvantageInputs(
        rewards=whole.rewards, group_ids=IDS, mask=whole.mask, per_token_logps=whole.logps("old"),
        weights=op.Correction(**fields)(whole).weights, **SUMS,
    )  # fmt: skip
    assert torch.equal(every.rows["advantages"], AWARE(inputs))
    assert not torch.allclose(kept.rows["advantages"][2:], every.rows["advantages"][2:], atol=1e-3)


def test_the_correction_is_computed_once_for_its_advantages_and_its_decisions(monkeypatch):
    calls, original = [], op.Correction.__call__
    monkeypatch.setattr(op.Correction, "__call__", lambda self, given: calls.append(1) or original(self, given))
    stages = stage(op.Objective(correction=TIS), AWARE)
    stages.decide(batch(**SUMS))
    assert len(calls) == 1


def test_a_weight_of_a_whole_response_travels_as_one_number():
    weight = op.TruncateWeight(level="sequence", max_weight=2.0)
    correction = op.Correction(weight=weight, keep=(BUDGET,), nonfinite="neutral")
    decided = stage(op.Objective(correction=correction)).decide(batch())
    assert decided.rows["decided_weights"].shape == (4, 1) and decided.rows["decided_keep"].shape == (4, 2)


def test_a_row_correction_can_be_replaced_in_training():
    stages = stage(op.Objective(correction=TIS), op.advantages.RLOO())
    other = op.Correction(keep=(TOKEN_BAND,))
    changed = stages.with_correction(other)
    assert changed.late.correction is other and changed.early is None and changed.advantages is stages.advantages
    assert stages.late.correction is TIS
    wide = stage(op.Objective(correction=op.Correction(keep=(BUDGET,))))
    with pytest.raises(ValueError, match=r"^correction must be of row scope to be replaced in training, but got Corr"):
        wide.with_correction(other)


def test_terms_by_sign_see_the_new_advantages():
    """The batch's own advantages push every token down, RLOO's push half of them up."""
    by_sign = op.ProbabilityDifferenceMask(low=-0.01, high=0.01)
    wide = op.Objective(correction=op.Correction(keep=(by_sign, op.SecondMomentBudget(budget=100.0))))
    same = batch(advantages=-torch.ones(4))

    by_old, by_new = stage(wide).decide(same), stage(wide, op.advantages.RLOO()).decide(same)

    expected = wide.correction(batch(advantages=by_new.rows["advantages"])).keep_mask
    assert torch.equal(by_new.rows["decided_keep"], expected)
    assert not torch.equal(by_old.rows["decided_keep"], expected)


def test_rejected_responses_are_not_counted_by_any_estimator():
    correction = op.Correction(keep=(TOKEN_BAND,), baseline="kept")
    one_group = replace(batch(), group_ids=torch.zeros(4, dtype=torch.long))
    decided = stage(op.Objective(correction=correction), op.advantages.RLOO()).decide(one_group)

    assert decided.rows["advantages"].tolist() == [0.0, -1.5, 0.0, 1.5]  # 1, 0 and 2 are left; row 2 is out


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        (None, "correction.weight must be a weight on 'old/sampling' with the advantages of OPOB"),
        (op.Correction(keep=(BUDGET,)), "correction.weight must be a weight on 'old/sampling'"),
        (op.Correction(weight=TIS.weight, keep=(BY_SIGN,)), "correction.keep must not name probability_difference"),
    ],
)
def test_weights_that_are_not_there_in_time(correction, message):
    with pytest.raises(ValueError, match=message):
        stage(op.Objective(correction=correction), op.advantages.OPOB())
