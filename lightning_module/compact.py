"""Micro-batches without padding, and prompts computed once, in Lightning."""

from __future__ import annotations

import logging
import math
from typing import Any, cast

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lightning_module.engines import wants_exact
from lightning_module.host import Host
from lightning_module.streams import BatchPlan
from trl_offpolicy.checks import read_switch
from trl_offpolicy.objective.splitting import split_dependence
from trl_offpolicy.rollouts import compressed_forward
from trl_offpolicy.rollouts.compact import BIT_BY_BIT, NOT_SORTED, NOT_TRIMMED, CompactScoring, splitting_of
from trl_offpolicy.rollouts.micro_batches import Splitting, TrimPadding, sorts
from trl_offpolicy.rollouts.perturbed_forward import NOT_SHARED
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix, SharePrefix, varying_rope

logger = logging.getLogger(__name__)

PROVED = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
"""Strategies under which prompts that are computed once are tested to train as the plain path does."""


class CompactRows:
    """How a module splits its generation batches and scores its rows.

    Args:
        module: the module, with the settings ``trim_padding`` and ``share_prefix``.

    Raises:
        ValueError: a setting is not valid.
    """

    def __init__(self, module: Host) -> None:
        settings = module.settings
        self._module = module
        self._trim = cast("TrimPadding", read_switch("trim_padding", settings["trim_padding"], ["columns", "ranks"]))
        share = cast("SharePrefix", read_switch("share_prefix", settings["share_prefix"], ["auto"]))
        self._shared = SharedPrefix(share, counted=True, drop_padding=sorts(self._trim))
        self.scoring = CompactScoring(trim=self._trim is not False, shared=self._shared)

    def prepare(self) -> None:
        """Look at the policy before training; say what is not done, and why.

        Raises:
            ValueError: ``share_prefix`` is true, but refused.
        """
        module = self._module
        if self._trim is not False and (reason := varying_rope(module.policy)) is not None:
            logger.warning(NOT_TRIMMED, reason)
            self._trim = self.scoring.trim = False
        refused = self._why_whole()
        if wants_exact(module.settings["engine"]):
            refused = BIT_BY_BIT
        if module.settings["perturbation"] is not None:
            refused = NOT_SHARED
        if module.settings["learner_kv_cache"] is not None:
            refused = compressed_forward.NOT_SHARED
        if not isinstance(module.trainer.strategy, PROVED):
            refused = f"it is not proved equal under {type(module.trainer.strategy).__name__}"
        self._shared.prepare(module.policy, refused=refused)
        if sorts(self._trim) and (reason := self._why_whole()) is not None:
            logger.warning(NOT_SORTED, reason)

    def _why_whole(self) -> str | None:
        """Why rows must stay in the micro-batch that they are drawn into."""
        module: Any = self._module
        return split_dependence(
            module.objective,
            by_token=True,  # the module divides by the tokens of the step, as dapo does
            has_entropy_bonus=module.entropy.has_bonus(module.objective),
            top_entropy=module.entropy.options.top_entropy_quantile < 1.0,
            aux_loss=module.experts.balances,
        )

    def splitting(self, plan: BatchPlan) -> Splitting:
        """How a generation batch of these sizes becomes micro-batches.

        An optimizer step may begin within a generation batch, but only at a multiple of the greatest common divisor; so
        may the last one of an epoch end, which the epoch may cut off.
        """
        trainer: Any = self._module.trainer
        size, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        left = 0 if math.isinf(batches) else int(batches) % size
        window = math.gcd(plan.steps_per_generation, size, left)
        free = self._why_whole() is None
        return splitting_of(self._shared, self._module.policy, trim=self._trim, free=free, window=window)
