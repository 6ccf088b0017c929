"""The policy loss ``offpolicy`` of SkyRL, registered by a key of its command line or by the script that starts it.

.. code-block:: text

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=trl_offpolicy.integrations.skyrl
        "offpolicy={preset: paper/tis, run_dir: runs/skyrl}" trainer.algorithm.policy_loss_type=offpolicy
        generator.sampling_params.logprobs=1 ...

A script calls :func:`register` in the place of the first two. SkyRL sums the loss; the advantages hold its reduction.
Read in SkyRL a9564572e.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.integrations._common import Method, logged, read_method, record
from trl_offpolicy.objective.losses import PPOClip
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.types import PolicyBatch

NAME = "offpolicy"
_OWN_CORRECTION = (
    "tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low", "token_mask_is_threshold_high",
)  # fmt: skip


def register(**spec: Any) -> None:
    """Enter the loss in SkyRL's ``PolicyLossRegistry`` under ``offpolicy``; its workers get it from there.

    Args:
        **spec: the keys of ``offpolicy`` and ``run_dir``, plain values.

    Raises:
        ValueError: a key or option is unknown, SkyRL sets the quantity, or pi_old is needed in fully async training.
        NotImplementedError: the method needs more than a micro-batch, or does not scale with the advantages.
    """
    mode = _method(spec, Objective()).objective.mode
    # SkyRL's own guard goes by the names of its losses; only a script that trains fully async imports this module
    if "skyrl.train.fully_async_trainer" in sys.modules and mode == "decoupled":
        raise ValueError(
            f"{NAME} must name a method of mode bypass in fully async training, but got one of mode decoupled: SkyRL "
            "scores the old log-probs with weights newer than those that sampled, so staleness would not be seen."
        )
    registry = import_module("skyrl.backends.skyrl_train.utils.ppo_utils").PolicyLossRegistry
    if NAME in registry.list_available():
        registry.unregister(NAME)
    registry.register(NAME, partial(policy_loss, spec=spec))


def main() -> None:
    """SkyRL's own ``main`` after :func:`register`: what ``trainer.override_entrypoint`` calls.

    It reads the arguments ``offpolicy=...`` and ``offpolicy.KEY=...``, which SkyRL's strict configuration does not
    know, and leaves the others to SkyRL.

    Raises:
        ValueError: there is no such argument, or the loss is not the one that SkyRL is asked for.
    """
    mine = [argument for argument in sys.argv[1:] if argument.split("=")[0].split(".")[0] == NAME]
    if not mine:
        raise ValueError(f"{NAME} must be given, e.g. {NAME}={{preset: paper/tis}}, but is not among the arguments.")
    if (chosen := f"trainer.algorithm.policy_loss_type={NAME}") not in sys.argv:
        raise ValueError(f"{chosen} must be among the arguments: without it SkyRL does not use the loss.")
    config = import_module("omegaconf").OmegaConf
    given = config.to_container(config.from_cli(mine))[NAME]
    if not isinstance(given, dict):
        raise ValueError(f"{NAME} must be a mapping, e.g. {NAME}={{preset: paper/tis}}, but got {given!r}.")
    register(**given)
    sys.argv = [one for one in sys.argv if one not in mine and not one.startswith("trainer.override_entrypoint=")]
    import_module("skyrl.train.entrypoints.main_base").main()


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    config: Any = None,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    spec: dict[str, Any],
) -> tuple[Tensor, dict[str, float]]:
    """The summed loss of a micro-batch and numbers for SkyRL's log; arguments are those of SkyRL's losses, (B, T).

    Raises:
        ValueError: SkyRL's own correction is on as well, or log-probs that the method reads are missing.
    """
    own = getattr(config, "off_policy_correction", None)
    if set_there := [name for name in _OWN_CORRECTION if getattr(own, name, None) is not None]:
        raise ValueError(
            f"trainer.algorithm.off_policy_correction.{set_there[0]} must be null with policy_loss_type 'offpolicy', "
            f"which is the correction, but got {getattr(own, set_there[0])!r}."
        )
    base = Objective(policy_loss=PPOClip(low=config.eps_clip_low, high=config.eps_clip_high))
    method = _method(spec, base)
    if old_log_probs is None and method.objective.mode == "decoupled":
        raise ValueError("old_log_probs must be given with a method of mode decoupled, but SkyRL skipped that forward.")
    batch = PolicyBatch(
        per_token_logps=log_probs,
        old_per_token_logps=old_log_probs,
        sampling_per_token_logps=rollout_logprobs,
        completion_mask=torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask,
        advantages=advantages,
    )
    result = method.objective(batch)
    if log_probs.requires_grad:
        record(method, result.stats, framework="SkyRL")
    return result.loss, logged(result.stats)


def _method(spec: dict[str, Any], base: Objective) -> Method:
    """The method, summed over tokens."""
    method = read_method(spec, where=NAME, framework="SkyRL", base=base)
    objective = replace(method.objective, aggregation="token_sum")
    if not _scales_with_advantages(objective):
        raise NotImplementedError(
            f"{NAME} must name a loss that scales with the advantages, into which SkyRL puts its denominators, but got "
            f"{type(objective.policy_loss).__name__} (drift_coef {objective.drift_coef})."
        )
    return Method(replace(method.preset, objective=objective), method.run_dir)


@lru_cache(maxsize=8)
def _scales_with_advantages(objective: Objective) -> bool:
    """Whether c times the advantages of a response give c times its loss, tried on four responses."""
    generator = torch.Generator().manual_seed(0)
    old, drift, mismatch, entropies = (torch.rand(4, 6, generator=generator) for _ in range(4))
    batch = PolicyBatch(
        per_token_logps=drift - old - 2,
        old_per_token_logps=-old - 2,
        sampling_per_token_logps=0.5 * mismatch - old - 2,
        completion_mask=torch.ones(4, 6, dtype=torch.bool),
        advantages=torch.tensor([1.0, -0.5, 0.8, -1.2]),
        entropies=entropies,
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        group_rewards=torch.tensor([[1.0, 0.0]] * 4),
    )
    scale = torch.tensor([0.25, 3.0, 0.5, 7.0])
    scaled = objective(replace(batch, advantages=batch.advantages * scale)).per_token_loss
    return bool(torch.allclose(scaled, objective(batch).per_token_loss * scale[:, None], rtol=1e-4, atol=1e-6))
