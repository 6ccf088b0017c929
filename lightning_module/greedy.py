"""ReMax's greedy completions in Lightning: one for each prompt of a generation batch, by the same engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_module.agents import context_length
from lightning_module.engines import fusion_of
from lightning_module.host import Host
from trl_offpolicy.engines.engine import Engine
from trl_offpolicy.rollouts.greedy import NO_IMAGES, baseline_of_rows, check_greedy, greedy


def check_module_greedy(module: Host) -> None:
    """Raise if advantages read greedy completions that this module cannot sample.

    Raises:
        NotImplementedError: an option does not go with them; the message names it.
    """
    given = module.settings
    names = ("async_rollouts", "replay", "tools", "environment_factory", "rollout")
    refused = {name: given[name] is not None and given[name] != [] for name in names}
    refused["token_rewards"] = given["token_rewards"]
    check_greedy(module.stages, {**refused, "engine.logit_fusion": fusion_of(given["engine"]) is not None})


def greedy_rewards(
    module: Host, engine: Engine, prompts: Sequence[Mapping[str, Any]], count: int, trainer_state: Any
) -> Tensor:
    """(B,) total reward of the greedy completion of each row's prompt, at the weights that sampled the batch.

    Nothing of the completions is logged, recorded, counted or learned from. All ranks call it.

    Args:
        module: the module.
        engine: what samples; it has the weights already.
        prompts: rows of the data set.
        count: sampled completions of each.
        trainer_state: what the reward functions get under this name.

    Raises:
        NotImplementedError: the prompts have images.
    """
    batch = module.agents.batch(prompts, 1)
    if batch.request.images is not None:
        raise NotImplementedError(NO_IMAGES)
    longest = context_length(engine, module.policy)
    completions = batch.sample(engine, greedy(module.sampling), context_length=longest)
    rollouts, screen = completions.rollouts, batch.lane.screen
    screened = screen.agree(rollouts.completion_ids, rollouts.sampling_per_token_logps, rollouts.tool_mask)
    with module.measuring.clock.part("rewards", counted=module.trainer.training):
        by_function = module.rewards(
            completions.reward_rows(batch.request),
            completions.completions,
            rollouts.completion_ids,
            trainer_state=trainer_state,
            log_metric=_ignore,
            log_extra=_ignore,
        )
    screen.agree_on_scores()
    module.agents.give_back(batch)
    by_function = screened.without_rewards(by_function.to(module.device), local=True)
    return baseline_of_rows(by_function, module.rewards.weights, count)


def _ignore(*_: Any, **__: Any) -> None:
    """In the place of what logs from within a reward function."""
