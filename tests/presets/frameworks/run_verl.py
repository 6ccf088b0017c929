"""Runs verl's own rollout correction; ``test_verl_oracle.py`` starts it with the Python of an environment with verl.

Reads from standard input ``{"batch": {...}, "cases": {name: options}, "named": [...], "losses": {name: options}}``
with lists of numbers, writes ``{name: {"weights": ..., "mask": ..., "loss": ...}}`` to standard output, for ``losses``
``{name: {"loss": ..., "gradient": ..., "entropy_gradient": ...}}``. ``named`` are class methods of verl's
``RolloutCorrectionConfig``; ``losses`` hold options of the actor and its policy loss beside those of the rollout
correction, ``dp_size`` with the ``tokens`` and ``sequences`` of all ranks, and ``by_token``, advantages of each token.
With ``advantages`` in the request it answers ``{"advantages": {name: ...}}`` of verl's estimators.
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
ACTOR += ("loss_scale_factor", "entropy_coeff", "use_kl_loss", "kl_loss_coef", "kl_loss_type")


def run_loss(options, batch):
    """Loss and gradient of verl's registered loss with its real ``ActorConfig``, added up as in its ``ppo_loss``."""
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    options = dict(options)
    mask = batch["mask"]
    dp_size, by_token = options.pop("dp_size", 1), options.pop("by_token", False)
    tokens, sequences = options.pop("tokens", int(mask.sum())), options.pop("sequences", len(mask))
    correction = {name: value for name, value in options.items() if name in CORRECTION}
    actor = {name: value for name, value in options.items() if name in ACTOR}
    own = {name: value for name, value in options.items() if name not in (*CORRECTION, *ACTOR)}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig(**own), **actor
    )
    config.global_batch_info.update(
        dp_size=dp_size,
        batch_num_tokens=tokens,
        global_batch_size=sequences,
        loss_scale_factor=config.loss_scale_factor,
    )
    proto, kept, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch["old"], rollout_log_prob=batch["sampling"], response_mask=mask, **correction
    )
    current, entropies = (batch[name].clone().requires_grad_() for name in ("current", "entropies"))
    advantages = batch["token_advantages"] if by_token else batch["advantages"].unsqueeze(1).expand_as(mask)
    loss, _ = core_algos.get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=batch["old"],
        log_prob=current,
        advantages=advantages * mask,
        response_mask=kept,
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None if proto is None else proto.batch["rollout_is_weights"],
    )
    how = {"loss_agg_mode": config.loss_agg_mode, **config.global_batch_info}
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * core_algos.agg_loss(entropies, kept, **how)
    if config.use_kl_loss:
        kl = core_algos.kl_penalty(current, batch["ref"], config.kl_loss_type)
        loss = loss + config.kl_loss_coef * core_algos.agg_loss(kl, kept, **how)
    slopes = torch.autograd.grad(loss, (current, entropies), allow_unused=True)
    gradient, of_entropy = (torch.zeros_like(mask) if slope is None else slope for slope in slopes)
    return {"loss": loss.item(), "gradient": gradient.tolist(), "entropy_gradient": of_entropy.tolist()}


def run_advantages(options, batch):
    """Advantages by token of verl's registered estimator, called as its ``compute_advantage`` does."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    options = dict(options)
    name, mask = options.pop("adv_estimator"), batch[options.pop("mask")]
    groups = batch[options.pop("groups", "groups")]
    if "token_baseline" in name:
        options["old_log_probs"], options["sum_pi_squared"] = batch["filled_old"], batch["squares"]
        options["rollout_is_weights"] = batch["weights"] if options.pop("weighted") else None
    of_config = {key: options.pop(key) for key in ("gamma",) if key in options}
    if name == "grpo_passk" and "norm_adv_by_std_in_grpo" in options:
        of_config["norm_adv_by_std_in_grpo"] = options.pop("norm_adv_by_std_in_grpo")
    found, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=batch["token_rewards"].clone(),
        response_mask=mask,
        index=groups.long().numpy(),
        config=AlgoConfig(**of_config),
        **options,
    )
    return found.tolist()


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
    made = {name: run_advantages(options, batch) for name, options in request.get("advantages", {}).items()}
    answer |= {"advantages": made} if made else {}
    print("ORACLE", json.dumps(answer))


if __name__ == "__main__":
    main()
