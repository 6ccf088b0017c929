"""The policy loss in real verl 0.9.1: equal to verl's rollout correction under its 19 presets, and to this kit alone.

``test_verl_engine.py`` trains with it in verl's actor worker.
"""

import json
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from verl_process import HOW, PYTHON, answer, start

from trl_offpolicy import PolicyBatch, Reduction, presets
from trl_offpolicy.presets.frameworks.verl.losses import AGGREGATIONS
from trl_offpolicy.run_folder.names import translate

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason=HOW)]

NAMED = [name.removeprefix("verl/") for name in presets.names() if name.startswith("verl/")]
SETTINGS = [
    ({"dp_size": 1, "batch_num_tokens": 31, "global_batch_size": 8}, "token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "token-mean"),
    ({"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 16}, "seq-mean-token-sum-norm"),
    ({"dp_size": 4, "batch_num_tokens": 120, "global_batch_size": 32}, "seq-mean-token-sum"),
]
CASES = [(name, i) for name in NAMED for i in range(len(SETTINGS))]


def tensors():
    """Eight responses: padding, tool output, an empty row, ratios out of every band."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([7, 6, 0, 4, 1, 7, 5, 3])
    mask = torch.arange(7) < lengths.unsqueeze(1)
    mask[5, 2:4] = False
    old = -0.1 - 3 * torch.rand(8, 7, generator=generator)
    mismatch = 0.4 * torch.randn(8, 7, generator=generator)
    mismatch[0, 3], mismatch[6, 1] = 2.5, -2.2
    mismatch[1] *= 0.001  # two responses that every band keeps, one of them long
    mismatch[7] *= 0.001
    current = (old + 0.2 * torch.randn(8, 7, generator=generator)).clamp(max=-1e-3)
    current[1], current[7] = old[1] + 1e-4, old[7] - 1e-4
    fields = {"current": current, "old": old, "sampling": (old - mismatch).clamp(max=-1e-3)}
    padded = {name: torch.where(mask, values, 0.0) for name, values in fields.items()}
    advantages = torch.randn(8, 1, generator=generator).expand(8, 7)
    return {**padded, "mask": mask.float(), "advantages": advantages}


@cache
def answers():
    batch = {name: values.tolist() for name, values in tensors().items()}
    request = {"batch": batch, "named": NAMED, "settings": SETTINGS}
    return answer(start("run_verl.py", given=json.dumps(request)))


def answers_of(name, setting):
    totals, aggregation = SETTINGS[setting]
    found = answers()[f"{name} {aggregation} {totals['dp_size']}"]
    return found["verl"], found["kit"]


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_value_and_gradient_are_those_of_verls_own_rollout_correction(name, setting):
    theirs, ours = answers_of(name, setting)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5, abs=1e-6)
    gradient = torch.tensor(ours["gradient"])
    torch.testing.assert_close(gradient, torch.tensor(theirs["gradient"]), rtol=1e-4, atol=1e-6)
    assert gradient.abs().max() > 1e-4  # there is something to compare


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_it_is_the_objective_of_this_kit_on_the_same_tensors(name, setting):
    totals, aggregation = SETTINGS[setting]
    given = tensors()
    current = given["current"].clone().requires_grad_()
    batch = PolicyBatch(
        per_token_logps=current,
        old_per_token_logps=given["old"],
        sampling_per_token_logps=given["sampling"],
        completion_mask=given["mask"],
        advantages=given["advantages"] * given["mask"],
    )
    objective = replace(presets.get(f"verl/{name}").objective, aggregation=AGGREGATIONS[aggregation])
    step = Reduction(
        tokens=totals["batch_num_tokens"], sequences=totals["global_batch_size"], world_size=totals["dp_size"]
    )
    loss = objective(batch, step).loss
    (gradient,) = torch.autograd.grad(loss, current)
    _, ours = answers_of(name, setting)
    assert ours["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.tensor(ours["gradient"]), gradient, rtol=1e-4, atol=1e-6)


OTHER_UNDER_REJECTION = (
    "loss/clip_region_fraction",
    "staleness/kl_k1",
    *(f"weight_applied/{name}" for name in ("mean", "std", "ess_token")),
)
"""Over the kept tokens in verl, over all here; weights the other way round."""


OF_AN_EMPTY_RESPONSE = {
    "chi2_sequence": 0,
    "dropped_sequence_fraction": 0,
    "log_ppl_diff": 0,
    "log_ppl_abs_diff": 0,
    "ppl_ratio": 1,
}
"""Means over responses into which verl counts the empty one of the eight, as this number."""


@pytest.mark.parametrize("name", NAMED)
def test_metrics_under_both_names_agree(name):
    theirs, ours = answers_of(name, 0)
    bypass = name.startswith("bypass")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = translate(theirs["metrics"], "bypass_mode" if bypass else "vanilla")
    shared = {key for key in read.keys() & ours["metrics"].keys() if key.startswith("offpolicy/")}
    if "rs" in name:
        shared -= {f"offpolicy/{key}" for key in OTHER_UNDER_REJECTION}
        if bypass:  # verl's actor/ppo_kl is read as this one too, and is of kept tokens
            shared -= {"offpolicy/total/kl_k1"}
    assert len(shared) >= (3 if bypass else 7), sorted(shared)
    for key in sorted(shared):
        found, quantity = ours["metrics"][key], key.rpartition("/")[2]
        if quantity == "truncated_fraction" and presets.get(f"verl/{name}").correction.weights[0].level == "sequence":
            found = 7 / 8 * found  # one weight a response
        if quantity in OF_AN_EMPTY_RESPONSE:
            found = (7 * found + OF_AN_EMPTY_RESPONSE[quantity]) / 8
        assert found == pytest.approx(read[key], rel=2e-3, abs=1e-5), key
    if not bypass and "rs" not in name:
        for key in ("actor/pg_clipfrac", "actor/ppo_kl"):
            assert ours["metrics"][key] == pytest.approx(theirs["metrics"][key], rel=1e-4, abs=1e-6), key
