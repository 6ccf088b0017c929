"""Runs verl's own rollout correction; ``test_verl_oracle.py`` starts it with the Python of an environment with verl.

Reads from standard input ``{"batch": {...}, "cases": {name: options}, "named": [...], "losses": {name: options}}``
with lists of numbers, writes ``{name: {"weights": ..., "mask": ..., "loss": ...}}`` to standard output, for ``losses``
``{name: {"loss": ..., "gradient": ...}}``. ``named`` are class methods of verl's ``RolloutCorrectionConfig``;
``losses`` hold options of the actor and its policy loss beside those of the rollout correction.
"""

import json
import sys

import torch


class Config:
    """The part of verl's ``ActorConfig`` that its policy losses read, with its defaults."""

    clip_ratio = clip_ratio_low = clip_ratio_high = 0.2
    clip_ratio_c = 3.0

    def __init__(self, options, tokens):
        self.policy_loss = {"rollout_correction": options}
        self.global_batch_info = {"dp_size": 1, "batch_num_tokens": tokens}

    def get(self, name, default=None):
        return getattr(self, name, default)


def run(options, batch):
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    options = dict(options)
    bypass, use_v1 = options.get("bypass_mode", False), options.pop("use_v1", True)
    loss_type = options.get("loss_type")
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    settings = {name: options[name] for name in names if name in options}
    mask, advantages = batch["mask"], batch["advantages"].unsqueeze(1).expand_as(batch["mask"])
    proto, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch["current" if bypass else "old"],
        rollout_log_prob=batch["sampling"],
        response_mask=mask,
        **settings,
    )
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    if bypass:  # both trainers count the tokens of the mini-batch before the loss rejects any
        config = Config(settings | {"loss_type": loss_type or "ppo_clip"}, int(mask.sum()))
        loss, _ = core_algos.compute_policy_loss_bypass_mode(
            batch["sampling"], batch["current"], advantages, mask, "token-mean", config
        )
    else:
        config = Config(None, int(mask.sum() if use_v1 else kept.sum()))
        loss, _ = core_algos.compute_policy_loss_vanilla(
            batch["old"], batch["current"], advantages, kept, "token-mean", config, weights
        )
    return {
        "weights": None if weights is None else weights.tolist(),
        "mask": kept.tolist(),
        "loss": loss.item(),
    }


CORRECTION = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
ACTOR = ("loss_agg_mode", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")


def run_loss(options, batch):
    """Loss and gradient of verl's registered policy loss, with its real ``ActorConfig``."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    correction = {name: value for name, value in options.items() if name in CORRECTION}
    actor = {name: value for name, value in options.items() if name in ACTOR}
    own = {name: value for name, value in options.items() if name not in (*CORRECTION, *ACTOR)}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**own), **actor
    )
    mask = batch["mask"]
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    config.global_batch_info.update(info)
    proto, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch["old"], rollout_log_prob=batch["sampling"], response_mask=mask, **correction
    )
    current = batch["current"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=batch["old"],
        log_prob=current,
        advantages=batch["advantages"].unsqueeze(1).expand_as(mask).clone(),
        response_mask=kept,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None if proto is None else proto.batch["rollout_is_weights"],
    )
    (gradient,) = torch.autograd.grad(loss, current)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def main():
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    request = json.load(sys.stdin)
    batch = {name: torch.tensor(values) for name, values in request["batch"].items()}
    cases = dict(request["cases"])
    for name in request["named"]:
        made = getattr(RolloutCorrectionConfig, name)()
        cases[f"verl/{name}"] = {item: getattr(made, item) for item in made.__dataclass_fields__ if item[0] != "_"}
    answer = {name: run(options, batch) for name, options in cases.items()}
    answer |= {name: run_loss(options, batch) for name, options in request["losses"].items()}
    print("ORACLE", json.dumps(answer))


if __name__ == "__main__":
    main()
