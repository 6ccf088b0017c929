"""What the TRL trainer cannot train on is an error that says what to do, not a fault further on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from datasets import Dataset
from tiny_models import score_last_word, tiny_prompts
from trainer_runs import Engine

from trl_offpolicy.rollouts.screening import RolloutError
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer


class Silent(Engine):
    """Log-probs are NaN for the first completions of every call, so many of each eight."""

    def __init__(self, silent: int) -> None:
        super().__init__(noise=0.1)
        self.silent = silent

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        answer = super().__call__(prompts, trainer)
        answer["logprobs"][: self.silent] = [[math.nan] * len(row) for row in answer["logprobs"][: self.silent]]
        return answer


@pytest.mark.parametrize("offpolicy", ["measure", "paper/tis"])
@pytest.mark.parametrize("silent", [7, 8])
def test_rollouts_without_log_probs_stop_the_run_before_a_step(
    build: Callable[..., Any], silent: int, offpolicy: str
) -> None:
    trainer = build(Silent(silent), offpolicy=offpolicy, max_steps=1)
    if silent < 8:
        trainer.train()
        return
    with pytest.raises(RolloutError, match=r"gave none that is finite in a whole generation batch"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_rollout_func_given_by_position_is_seen(make_args: Any, fresh_model: Any, tokenizer: Any) -> None:
    """``paper/tis`` needs an engine; the rollout function is one, wherever it stands in the call."""
    rest = (tiny_prompts(), None, tokenizer, None, None, (None, None), None, None, None, Engine(noise=0.1))
    trainer = OffPolicyGRPOTrainer(fresh_model(), score_last_word, make_args(offpolicy="paper/tis"), *rest)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_prompt_without_a_token_is_shown(make_args: Any, fresh_model: Any, tokenizer: Any) -> None:
    trainer = OffPolicyGRPOTrainer(
        fresh_model(), score_last_word, make_args(offpolicy="measure"),
        train_dataset=Dataset.from_dict({"prompt": [""] * 8}), processing_class=tokenizer,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"prompt must have at least one token, but prompt 0 of the batch, '', has"):
        trainer.train()


def test_a_policy_that_an_update_broke_is_told_of(make_args: Any, fresh_model: Any, tokenizer: Any) -> None:
    """transformers samples; torch alone says "probability tensor contains either inf, nan or element < 0"."""
    trainer = OffPolicyGRPOTrainer(
        fresh_model(), score_last_word, make_args(offpolicy="measure", learning_rate=1e30, max_grad_norm=1e9),
        train_dataset=tiny_prompts(), processing_class=tokenizer,
    )  # fmt: skip
    with pytest.raises(FloatingPointError, match="An earlier update broke them"):
        trainer.train()
    assert trainer.state.global_step >= 1
