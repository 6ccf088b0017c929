"""The policy loss ``offpolicy`` of verl, loaded by verl's ``external_lib`` or the ``_target_`` of its options.

Under ``actor.policy_loss``: ``_target_: trl_offpolicy.integrations.verl.PolicyLossConfig``, ``loss_mode: offpolicy``,
``offpolicy: {preset: paper/tis}``; beside it ``rollout.calculate_log_probs: true``.

verl does not hand the sampler's log-probs to its policy losses. Its batch has them, so :func:`ppo_loss` takes the place
of verl's function of that name, keeps them for the loss, and calls verl's. Read in verl 0.9.1.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import make_dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from trl_offpolicy.integrations import _common as shared
from trl_offpolicy.objective.losses import PPOClip
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.presets.frameworks.verl.losses import AGGREGATIONS
from trl_offpolicy.stats import PREFIX
from trl_offpolicy.types import PolicyBatch, Reduction

NAME = "offpolicy"
_HOLDERS = ("verl.workers.utils.losses", "verl.workers.engine_workers", "verl.trainer.distillation.losses")
"""The modules of verl that hold ``ppo_loss`` under that name."""
_THEIRS = {"actor/pg_clipfrac": "loss/clip_region_fraction", "actor/ppo_kl": "staleness/kl_k1"}
_CALL: ContextVar[tuple[Tensor | None, Any]] = ContextVar("verl_call")
"""The sampler's log-probs and the data-parallel group of the batch whose loss is computed."""
_ORIGINAL: list[Callable[..., Any]] = []


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch, reduced as verl does, and numbers for its log; arguments are those of verl's losses.

    ``rollout_log_probs`` (B, T) are the sampler's; None = those that :func:`ppo_loss` keeps.

    Raises:
        ValueError: the sampler's log-probs are missing, or a quantity is set here and in verl.
    """
    kept, group = _CALL.get((None, None))
    sampling = kept if rollout_log_probs is None else rollout_log_probs
    if rollout_is_weights is not None:
        raise ValueError(
            "algorithm.rollout_correction.rollout_is must be null with loss_mode 'offpolicy', but verl's own weights "
            "came with the batch: the loss would be weighted twice."
        )
    method = _method(config)
    old = _old_policy(method, old_log_prob, sampling, response_mask, group)
    objective = method.objective if old is not None else shared.measured_as_total(method)
    batch = PolicyBatch(
        per_token_logps=log_prob,
        old_per_token_logps=old,
        sampling_per_token_logps=sampling,
        completion_mask=response_mask,
        advantages=advantages,
    )
    objective = replace(objective, aggregation=AGGREGATIONS[loss_agg_mode])
    result = objective(batch, _reduction(config.global_batch_info))
    stats = shared.over_ranks(result.stats, group)
    if log_prob.requires_grad:
        shared.record(method, stats, framework="verl", rows_of="one rank" if group is None else "all ranks")
    numbers = shared.logged(stats)
    theirs = {name: numbers[PREFIX + ours] for name, ours in _THEIRS.items() if PREFIX + ours in numbers}
    return result.loss, {**theirs, **numbers}


def _method(config: Any) -> shared.Method:
    """The method of an ``ActorConfig``; one that names no loss takes the actor's clip."""
    low, high = (config.clip_ratio if one is None else one for one in (config.clip_ratio_low, config.clip_ratio_high))
    base = Objective(policy_loss=PPOClip(low=low, high=high, dual_clip=config.get("clip_ratio_c", 3.0)))
    spec = config.policy_loss.get(NAME)
    return shared.read_method(spec, where=f"actor.policy_loss.{NAME}", framework="verl", base=base)


def _old_policy(method: shared.Method, old: Tensor, sampling: Tensor | None, mask: Tensor, group: Any) -> Tensor | None:
    """The log-probs of pi_old; None if verl gave those of the sampler in their place (bypass_mode is not told)."""
    if sampling is None and method.objective.needs_sampling:
        raise ValueError(
            "rollout_log_probs must be in verl's batch, but there are none. Set rollout.calculate_log_probs to true, "
            "and let verl load trl_offpolicy.integrations.verl before it builds the actor."
        )
    bypass = method.objective.mode == "bypass"
    if sampling is None or not shared.same_on_tokens(old, sampling, mask, group if bypass else None):
        return old
    if bypass:
        return None
    warnings.warn(
        "verl's old_log_probs are those of the sampler on every token: the engine is exact, or bypass_mode is on, and "
        "then a decoupled method corrects nothing (choose one of mode bypass, or set bypass_mode to false).",
        stacklevel=2,
    )
    return old


def _reduction(info: dict[str, Any]) -> Reduction:
    """Totals of the mini-batch over all ranks, from ``global_batch_info``; without them the micro-batch alone."""
    ranks, tokens, sequences = info.get("dp_size", 1), info.get("batch_num_tokens"), info.get("global_batch_size")
    if ranks > 1 and (tokens is None or sequences is None):
        raise ValueError(
            f"batch_num_tokens and global_batch_size must be known with dp_size {ranks}, but got {tokens} and "
            f"{sequences}: the loss of a rank alone would not add up to that of the mini-batch."
        )
    return Reduction(tokens=tokens, sequences=sequences, world_size=ranks, max_length=info.get("loss_scale_factor"))


def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """The ``ppo_loss`` of verl, which hands :func:`policy_loss` the sampler's log-probs and the ranks."""
    sampling = None
    if "rollout_log_probs" in data:  # nested or padded: beside the mask it gets the width of the other fields
        sampling = data.select("response_mask", "rollout_log_probs").to_padded_tensor()["rollout_log_probs"]
    token = _CALL.set((sampling, dp_group))
    try:
        return _ORIGINAL[0](config, model_output, data, dp_group)
    finally:
        _CALL.reset(token)


def _register() -> None:
    """Enter the loss in verl's registry and :func:`ppo_loss` in its modules, and make ``PolicyLossConfig``."""
    import_module("verl.trainer.ppo.core_algos").register_policy_loss(NAME)(policy_loss)
    if not _ORIGINAL:
        _ORIGINAL.append(import_module(_HOLDERS[0]).ppo_loss)
    for name in _HOLDERS:  # one that is imported later takes it from the first
        if name in sys.modules:
            vars(sys.modules[name])["ppo_loss"] = ppo_loss
    base = import_module("verl.workers.config").PolicyLossConfig
    made = make_dataclass("PolicyLossConfig", [(NAME, Any, None)], bases=(base,))
    made.__module__, made.__doc__ = __name__, "verl's ``PolicyLossConfig`` with ``offpolicy``, for ``_target_``."
    globals()["PolicyLossConfig"] = made


if find_spec("verl") is not None:
    _register()
