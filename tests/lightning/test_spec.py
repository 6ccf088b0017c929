"""What users write becomes an objective, and comes back from a checkpoint as the same one."""

from __future__ import annotations

import pytest
import yaml

import trl_offpolicy as op
from lightning_module.spec import fields_of_method, hyperparameters, resolve
from lightning_module.spec import plain_correction as plain

CORRECTION = op.Correction(
    weight=op.TruncateWeight(level="token", max_weight=3.0),
    keep=(op.RatioBand(level="sequence_mean", low=0.9, high=1.1),),
)


@pytest.mark.parametrize(
    "said",
    [
        CORRECTION,
        {"weight": {"type": "truncate", "level": "token", "max_weight": 3.0},
         "keep": [{"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": 1.1}]},
        {"preset": "paper/tis", "options": {"max_weight": 3.0},
         "correction": {"keep": [{"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": 1.1}]}},
    ],
)  # fmt: skip
def test_object_mapping_and_preset_say_the_same(said):
    preset = resolve(said)
    assert preset.correction == CORRECTION
    assert resolve(plain(said)).correction == CORRECTION
    assert resolve(yaml.safe_load(yaml.safe_dump(plain(said)))).correction == CORRECTION


@pytest.mark.parametrize("name", ["paper/tis", "paper/icepop", "paper/geometric-mask", "measure"])
def test_presets_survive_a_checkpoint(name):
    preset = op.presets.get(name)
    again = resolve(plain(preset))
    assert (again.correction or op.Correction()) == (preset.correction or op.Correction())
    assert again.objective.policy_loss == preset.objective.policy_loss


def test_a_configuration_of_verl_with_kl_entropy_and_advantages():
    actor = {"use_kl_loss": True, "kl_loss_type": "kl+", "entropy_coeff": 0.01, "clip_ratio_high": 0.28}
    options = {"actor": actor, "algorithm": {"adv_estimator": "opo"}}

    preset = resolve({"framework": "verl", "options": options})

    assert preset.objective.kl == op.KLPenalty(coef=0.001, estimator="k1+")
    assert (preset.objective.entropy_coef, preset.objective.entropy_aggregation) == (0.01, "loss")
    assert preset.objective.policy_loss == op.losses.PPOClip(low=0.2, high=0.28, dual_clip=3.0)
    assert preset.advantages == op.advantages.OPO(alone="return")
    again = resolve(plain(preset))
    assert (again.objective, again.advantages) == (preset.objective, preset.advantages)


def test_objective_as_mapping_or_object():
    by_mapping = resolve("paper/tis", {"policy_loss": {"type": "cispo", "high": 5.0}, "entropy_coef": 0.1}).objective
    by_object = resolve("paper/tis", op.Objective(policy_loss=op.losses.CISPO(high=5.0), entropy_coef=0.1)).objective
    assert by_mapping == by_object
    assert by_mapping.correction == op.presets.get("paper/tis").correction


def test_advantages_and_defaults():
    assert type(resolve(None).advantages).__name__ == "GRPO"
    assert type(resolve("paper/tis", None, "rloo").advantages).__name__ == "RLOO"
    assert resolve(None, default="paper/tis").name == "paper/tis"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("paper/tos", "Did you mean 'paper/tis'"),
        ({"weight": {"type": "truncat"}}, r"correction.weight.type must be one of"),
        ({"preset": "paper/tis", "optons": {}}, r"correction.optons must be one of"),
        (3, "correction must be a preset's name"),
    ],
)
def test_mistakes_are_named(said, message):
    with pytest.raises(ValueError, match=message):
        resolve(said)


def test_a_quantity_set_twice_is_an_error():
    with pytest.raises(ValueError, match=r"advantages and correction\.advantages"):
        resolve({"preset": "measure", "advantages": "rloo"}, None, "grpo")
    with pytest.raises(ValueError, match="correction must be None with an Objective that has one"):
        resolve("paper/tis", op.Objective(correction=CORRECTION))


def test_hyperparameters_are_plain_and_leave_out_what_is_not():
    given = {"model": "folder", "reward_funcs": [len, lambda **_: []], "correction": CORRECTION, "engine": object()}
    kept = hyperparameters(given)
    assert kept == {"model": "folder", "correction": plain(CORRECTION)}
    assert hyperparameters({**given, "reward_funcs": yaml.safe_load})["reward_funcs"] == ["yaml:safe_load"]


def test_a_preset_brings_what_of_its_method_is_no_part_of_the_loss():
    def taker(correction=None, control="warn", routing_replay="none"):
        raise AssertionError

    given = {"correction": "deepseek-v3.2/whole", "control": "warn", "routing_replay": "none"}
    assert fields_of_method(given, taker) == {"routing_replay": "r3"}
    assert fields_of_method({**given, "correction": {"preset": "paper/vcpo"}}, taker)["control"]["policy"] == "act"
    assert fields_of_method({**given, "correction": "paper/vcpo", "control": "stop"}, taker) == {}
    assert fields_of_method({**given, "correction": None}, taker) == {}
