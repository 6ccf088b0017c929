"""Runs verl's own loss path, once with verl's rollout correction and once with this kit's policy loss in it.

``test_verl.py`` starts it with the Python of an environment with verl, and compares. Reads ``{"batches": {name: {...}},
"named": [...], "settings": [...]}`` from standard input and writes one JSON object. The configuration is verl's own
``ppo_trainer.yaml`` with the lines that a user adds; the batch is a ``DataProto`` that goes the way of verl's trainer:
correction on the driver, conversion to packed rows, ``ppo_loss`` in the worker. With WORLD_SIZE 2 the packed log-probs
lie in parts on two processes, and go the way of verl's engine with Ulysses' sequence parallelism.
"""

import json
import os
import sys
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path

import torch

RANKS = int(os.environ.get("WORLD_SIZE", 1))


@cache
def composed(*lines):
    import verl
    from hydra import compose, initialize_config_dir

    folder = Path(verl.__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", *lines])


def actor_config(lines, **changes):
    """verl's ``ActorConfig``, made from its YAML and a user's lines as its workers do; ``changes`` by dotted name."""
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    config = deepcopy(composed(*lines).actor_rollout_ref.actor)
    for name, value in changes.items():
        OmegaConf.update(config, name, value, force_add=True)
    return omega_conf_to_dataclass(config)


OURS = (
    "actor_rollout_ref.actor.policy_loss._target_=trl_offpolicy.integrations.verl.PolicyLossConfig",
    "actor_rollout_ref.actor.policy_loss.loss_mode=offpolicy",
    "+actor_rollout_ref.actor.policy_loss.offpolicy.preset=paper/tis",  # each case names another
)


def data_proto(batch):
    """The batch as verl's trainer holds it: left-padded prompts of two tokens, right-padded responses."""
    from verl import DataProto

    rows, length = batch["mask"].shape
    last = (batch["mask"] * torch.arange(1, length + 1)).amax(1)
    ends = last.clamp(min=1)  # tokens of each response, tool output included
    attention = torch.cat([torch.ones(rows, 2), (torch.arange(length) < ends.unsqueeze(1)).float()], dim=1).long()
    tensors = {
        "prompts": torch.ones(rows, 2, dtype=torch.long),
        "responses": torch.ones(rows, length, dtype=torch.long),
        "input_ids": torch.ones(rows, 2 + length, dtype=torch.long),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "response_mask": batch["mask"],
        "old_log_probs": batch["old"],
        "rollout_log_probs": batch["sampling"],
        "advantages": batch["advantages"] * batch["mask"],
    }
    return DataProto.from_dict(tensors)


def packed_output(current, data):
    """What the engine gives for the current policy: a nested tensor over prompt and response, one token ahead."""
    lengths = data["attention_mask"][:, 2:].sum(-1).tolist()
    rows = []
    for i, length in enumerate(lengths):  # position p holds the log-prob of token p + 1
        rows.append(torch.cat([torch.zeros(1), current[i, :length], torch.zeros(1)]))
    packed = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    if RANKS > 1:
        packed = torch.nested.nested_tensor_from_jagged(cut_and_gathered(packed.values()), packed.offsets())
    return {"log_probs": packed}


def cut_and_gathered(values):
    """This rank's part, as verl's engine cuts it, and what the engine makes of the parts before the loss."""
    from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

    part, _, padding = ulysses_pad_and_slice_inputs(values.unsqueeze(0), sp_size=RANKS)
    return gather_outputs_and_unpad(part.squeeze(0), gather_dim=0, unpad_dim=0, padding_size=padding)


def run(config, proto, batch, totals, function):
    """Loss, gradient and metrics of one micro-batch in verl's worker."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    data = left_right_2_no_padding(proto.to_tensordict())
    tu.assign_non_tensor(data, **totals)
    current = batch["current"].clone().requires_grad_()
    loss, metrics = function(config, packed_output(current, data), data)
    (gradient,) = torch.autograd.grad(loss, current)
    if RANKS > 1:
        torch.distributed.all_reduce(gradient)
        gradient = gradient / RANKS  # verl's gather multiplies by the ranks, over which its FSDP then takes the mean
    numbers = {name: float(getattr(value, "aggregate", lambda v=value: v)()) for name, value in metrics.items()}
    return {"loss": loss.item(), "gradient": gradient.tolist(), "metrics": numbers}


def compare(name, batch, totals, aggregation):
    """One preset of verl, by verl and by this kit; ``totals`` may name the actor's ``loss_scale_factor``."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    import trl_offpolicy.integrations.verl as ours

    correction = getattr(RolloutCorrectionConfig, name)()
    bypass = correction.bypass_mode
    own, theirs = data_proto(batch), data_proto(batch)
    changes, metrics = {"loss_agg_mode": aggregation, "loss_scale_factor": totals.get("loss_scale_factor")}, {}
    totals = {key: value for key, value in totals.items() if key != "loss_scale_factor"}
    if bypass:
        for proto in (own, theirs):  # as verl's trainer does
            proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
        given = {item.name: getattr(correction, item.name) for item in fields(correction) if item.name[0] != "_"}
        target = "verl.trainer.config.algorithm.RolloutCorrectionConfig"
        rolled = {
            "policy_loss.loss_mode": "bypass_mode",
            "policy_loss.rollout_correction": {"_target_": target, **given},
        }
    else:
        rolled = {}
        theirs, metrics = compute_rollout_correction_and_add_to_batch(theirs, correction)
    answer = run(actor_config((), **changes, **rolled), theirs, batch, totals, ours._ORIGINAL[0])
    answer["metrics"] |= metrics
    config = actor_config(OURS, **changes, **{"policy_loss.offpolicy.preset": f"verl/{name}"})
    return {"verl": answer, "kit": run(config, own, batch, totals, ours.ppo_loss)}


def main():
    request = json.load(sys.stdin)
    if RANKS > 1:
        from verl.utils.ulysses import set_ulysses_sequence_parallel_group

        torch.distributed.init_process_group("gloo")
        set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    answers = {}
    for kind, given in request["batches"].items():
        batch = {name: torch.tensor(values) for name, values in given.items()}
        for name in request["named"]:
            for i, (totals, aggregation) in enumerate(request["settings"]):
                answers[f"{kind} {name} {i}"] = compare(name, batch, totals, aggregation)
    print("ORACLE", json.dumps(answers))


if __name__ == "__main__":
    main()
