"""The check of replies in the TRL trainer: where they enter, where the ranks agree, and what a dropped row leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trl_offpolicy.rollouts.agents.environments import bound_environment, made_by
from trl_offpolicy.rollouts.agents.guard import ToolGuard
from trl_offpolicy.rollouts.screening import Columns, Screen, Screened, Unusable
from trl_offpolicy.rollouts.token_rewards import TOKEN_REWARDS
from trl_offpolicy.stats import Stats
from trl_offpolicy.trl.engine import TRLEngine

_MASKS = ("env_mask", "tool_mask")


def made_in_guard(given: Mapping[str, Any], guard: ToolGuard) -> dict[str, Any]:
    """The arguments of a trainer, with factories whose environments are made where ``guard`` calls their methods."""
    factory = given.get("environment_factory")
    if isinstance(factory, dict):
        return {**given, "environment_factory": {name: made_by(guard, make) for name, make in factory.items()}}
    return {**given} if factory is None else {**given, "environment_factory": made_by(guard, factory)}


class TrainerScreen:
    """Checks what vLLM or a ``rollout_func`` returns to a trainer.

    Args:
        trainer: the trainer; its ``rollout_func`` is wrapped.
        mode: the option ``on_bad_rollout``.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        tokenizer = trainer._tokenizer
        filler = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        vocabulary = getattr(trainer.model.config.get_text_config(), "vocab_size", None)
        self.screen = Screen(mode, vocabulary=vocabulary, filler=filler, decode=tokenizer.decode)
        self.screened = Screened()
        """Of the generation batch at hand."""
        engine = getattr(trainer, "vllm_generation", None)
        if isinstance(engine, TRLEngine):
            engine.screen = self.screen
        if trainer.rollout_func is not None:
            trainer.rollout_func = self._checked(trainer.rollout_func)

    def bound_environments(self, trainer: Any, guard: ToolGuard) -> None:
        """Bound what the environments of a trainer do when they are reset and asked for rewards."""

        def bound(environment: Any) -> Any:
            return bound_environment(environment, guard, self.screen)

        def bounded(make: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: bound(make())

        if trainer.environment_factories is not None:
            factories = trainer.environment_factories.items()
            trainer.environment_factories = {name: bounded(make) for name, make in factories}
            for pool in trainer._environment_pool.values():
                pool[:] = map(bound, pool)

    def _checked(self, rollout_func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function to check its completions before TRL decodes them."""

        def checked(prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
            output = rollout_func(prompts, *args, **kwargs)
            if not isinstance(output, Mapping) or "completion_ids" not in output:
                return output  # TRL says what is missing
            return {**output, **self._replies(output, len(prompts))}

        return checked

    def _replies(self, output: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The checked fields of what the function returned for ``count`` prompts."""
        names = [name for name in _MASKS if output.get(name) is not None]
        columns = {name: output[name] for name in ("prompt_ids", "completion_ids", *names)}
        if output.get("logprobs") is not None:
            columns["logps"] = output["logprobs"]
        if isinstance(output.get(TOKEN_REWARDS), Sequence):  # else who reads it says what is wrong
            columns[TOKEN_REWARDS] = output[TOKEN_REWARDS]
        prompts = list(output["prompt_ids"])
        if any(len(column) != count for column in columns.values()):
            lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
            self.screen.fail(f"rollout_func must return {count} entries, one per prompt, but got {lengths}")
            prompts = [[self.screen.filler]] * count
            empty = ("completion_ids", "logps", *({TOKEN_REWARDS} & columns.keys()))
            columns = {"prompt_ids": prompts, **{name: [[]] * count for name in empty}}

        def fill(row: int, reason: str) -> dict[str, Any]:
            if "logps" not in columns:
                self.screen.fail(reason)
            return {
                "completion_ids": [self.screen.filler],
                "logps": [Unusable(reason)],
                TOKEN_REWARDS: [0.0],
                **{name: [1] for name in names},
            }

        screened: Columns = self.screen.replies(columns, prompts, fill)
        if "logps" in screened:
            screened["logprobs"] = screened.pop("logps")
        return screened

    # ------------------------------------------------------------------------------------------- a generation batch

    def agree(
        self,
        completions: Sequence[Sequence[int]],
        mask: list[list[int]] | None,
        logps: Sequence[Sequence[float | None]] | None,
    ) -> list[list[int]] | None:
        """Agree with the other ranks on the rows that leave the batch. All ranks call it, before rewards are given.

        Returns:
            The mask, which a rank without tool tokens has too if another has one.

        Raises:
            RolloutError: on all ranks (:meth:`Screen.agree`).
        """
        self.screened = self.screen.agree(completions, logps, mask)
        return self.screened.mask_of(completions, mask)

    def rewards(self, by_function: Tensor) -> Tensor:
        """The (N, K) rewards of all ranks, NaN in the dropped rows: TRL then leaves them out of every baseline.

        Raises:
            RolloutError: on all ranks (:meth:`Screen.agree_on_scores`).
        """
        self.screen.agree_on_scores()
        return self.screened.without_rewards(by_function)

    def output(self, output: dict[str, Any]) -> Stats:
        """Take the tokens of the dropped rows out of TRL's batch, and return what is logged."""
        output["completion_mask"] = self.screened.without_tokens(output["completion_mask"])
        output["num_items_in_batch"] = output["num_items_in_batch"] - self.screened.tokens
        return self.screened.stats(output["completion_mask"].device)
