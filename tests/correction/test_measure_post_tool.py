"""Mismatch after the first tool output, apart from that before it."""

import pytest
import torch

import trl_offpolicy as op
from trl_offpolicy.functional.kl import k3

NAN = float("nan")
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]]).bool()
LATER = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 1]]).bool()


def batch(**changes):
    generator = torch.Generator().manual_seed(0)
    sampling = -torch.rand(3, 5, generator=generator) - 0.5
    old = sampling + 0.3 * torch.randn(3, 5, generator=generator)
    fields = {
        "per_token_logps": old,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "completion_mask": MASK,
        "advantages": torch.ones(3),
        "turn_ids": torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 2]]),
    }
    return op.PolicyBatch(**{**fields, **changes})


def stats(data):
    values = op.Objective(correction=op.Correction())(data).stats.compute()
    return {key.removeprefix("offpolicy/post_tool/"): v for key, v in values.items() if "/post_tool/" in key}


def test_formulas():
    data = batch()
    ratio = (data.old_per_token_logps - data.sampling_per_token_logps).double()
    after, before = ratio[LATER & MASK], ratio[MASK & ~LATER]
    mean_k3 = [k3(part).mean().item() for part in (after, before)]

    assert stats(data) == pytest.approx(
        {
            "kl_k1": -after.mean().item(),
            "kl_k3": mean_k3[0],
            "chi2_token": ((2 * after).exp().mean() - 1).item(),
            "logp_diff_mean": after.abs().mean().item(),
            "kl_k3_ratio": mean_k3[0] / mean_k3[1],
            "token_fraction": 0.4,
        },
        rel=1e-5,
    )
    assert stats(data)["kl_k1"] != pytest.approx(-before.mean().item(), rel=0.1)


def test_only_where_turns_are_known():
    assert stats(batch(turn_ids=None)) == {}
    none = op.Objective(correction=op.Correction(measure=("total",)))(batch()).stats.compute()
    assert not [key for key in none if "post_tool" in key]


def test_tool_and_unobserved_tokens_do_not_count():
    data = batch()
    garbage = torch.where(MASK, data.sampling_per_token_logps, torch.tensor(NAN))
    assert stats(batch(sampling_per_token_logps=garbage)) == stats(data)
    lost = data.sampling_per_token_logps.clone()
    lost[0, 3] = NAN
    assert stats(batch(sampling_per_token_logps=lost))["token_fraction"] == pytest.approx(3 / 9)


def test_rows_without_a_tool_call_come_before():
    single = batch(turn_ids=torch.zeros(3, 5, dtype=torch.long))
    assert set(stats(single).values()) == {0.0}


def test_stale_rows_without_old_log_probs_are_left_out():
    versions = {"old_per_token_logps": None, "policy_versions": torch.tensor([1, 1, 0]), "current_version": 1}
    kept = stats(batch(**versions))
    assert kept["token_fraction"] == pytest.approx(2 / 7)


def test_it_adds_up_over_micro_batches():
    data = batch()
    objective = op.Objective(correction=op.Correction())

    def part(rows):
        fields = ("per_token_logps", "old_per_token_logps", "sampling_per_token_logps", "completion_mask", "turn_ids")
        return objective(
            op.PolicyBatch(advantages=torch.ones(len(rows)), **{name: getattr(data, name)[rows] for name in fields})
        ).stats

    merged = part([0]).merge(part([1, 2])).compute()
    found = {key.removeprefix("offpolicy/post_tool/"): v for key, v in merged.items() if "/post_tool/" in key}
    assert found == pytest.approx(stats(data), rel=1e-5)


def test_an_id_of_its_own_on_padding_before_the_first_turn_numbers_no_turn():
    """Left padding with turn id -1 is not the turn before the first tool output."""
    left = {
        "completion_mask": MASK.clone(),
        "turn_ids": torch.tensor([[-1, 0, 0, 1, 1], [-1, -1, 0, 0, 0], [-1] + [1] * 4]),
    }
    left["completion_mask"][:, 0] = False
    left["completion_mask"][1, 1] = False
    plain = left["turn_ids"].clone()
    plain[plain == -1] = 0
    plain[2] = 1

    assert stats(batch(**left)) == stats(batch(**{**left, "turn_ids": plain}))
    assert stats(batch(**left))["token_fraction"] == pytest.approx(2 / 6)
