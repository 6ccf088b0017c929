"""ReMax in the TRL trainer: whose reward is the baseline, and that nothing else of the greedy completions is left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_greedy import plain_greedy
from rollouts.ahead.fake_server import BEHIND_SERVER, FakeServer
from tiny_models import EOS, score_last_word
from trainer_runs import GENERATIONS, LENGTH, Engine, records, rollouts

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.objective.advantages import ReMax
from trl_offpolicy.objective.objective import Objective
from trl_offpolicy.objective.staging import stage
from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.greedy import check_trainer_greedy, greedy_rewards

pytestmark = pytest.mark.integration


class Greedy(FakeServer):
    """A server that samples random words, or the most likely one where it keeps one token."""

    def generate(self, prompt_ids: Any, sampling: Sampling, *, n: int = 1) -> Rollouts:
        if sampling.top_k != 1:
            return super().generate(prompt_ids, sampling, n=n)
        assert (n, sampling.top_p, sampling.min_p) == (1, 1.0, 0.0)
        prompts = [list(ids) for ids in prompt_ids]
        found = [plain_greedy(self._model, ids, length=sampling.max_tokens, ends={EOS}) for ids in prompts]
        return Rollouts(
            prompt_ids=prompts,
            completion_ids=found,
            sampling_per_token_logps=[[0.0] * len(row) for row in found],
            policy_versions=[[self.version or 0] * len(row) for row in found],
            finish_reasons=["stop"] * len(found),
        )


@pytest.mark.parametrize("engine", ["transformers", "server"])
def test_the_baseline_is_the_greedy_completion_of_the_prompt(
    build: Callable[..., Any], fresh_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    options: dict[str, Any] = {"offpolicy": {"preset": "measure", "advantages": "remax"}}
    if engine == "server":
        monkeypatch.setattr(trl_engines, "ServerEngine", lambda *_, **__: Greedy(fresh_model()))
        options = {**BEHIND_SERVER, "offpolicy": {"preset": "paper/tis", "advantages": "remax"}}
    trainer = build(**options, learning_rate=0.05, max_steps=3)
    whole, batches, rewarded = trainer._generate_and_score_completions, [], []
    trainer.reward_funcs[0] = lambda log_metric, completions, **kwargs: (  # also logs by itself
        log_metric("shown", float(len(completions))), rewarded.append(len(completions)), score_last_word(completions)
    )[-1]  # fmt: skip

    def compared(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = whole(inputs)
        batches.append(output)
        for row, one in enumerate(inputs):
            prompt = tokenizer(one["prompt"])["input_ids"]
            ids = plain_greedy(trainer.model, prompt, length=LENGTH, ends={EOS})
            (text,) = tokenizer.batch_decode([ids], skip_special_tokens=True)
            wanted = output["rewards"][row].item() - score_last_word([text])[0]
            assert output["advantages"][row].item() == pytest.approx(wanted, abs=1e-6)
        return output

    trainer._generate_and_score_completions = compared
    trainer.train()
    frame, logs = rollouts(trainer), records(trainer)
    assert len(batches) == len(logs) == 3 and len(frame) == 3 * 2 * GENERATIONS
    assert rewarded == [8, 2] * 3  # the batch, and one for each of its prompts
    for output, row in zip(batches, logs, strict=True):
        assert output["advantages"].abs().max() > 0.01 and row["grad_norm"] > 0
        assert row["reward"] == pytest.approx(output["rewards"].mean().item(), abs=1e-6)
        assert row["shown"] == 8.0
        assert row.get("offpolicy/rollout/retokenised_fraction", 0.0) == 0.0
    assert len(trainer._logs["advantages"]) == len(trainer._logs["completion"])
    assert torch.cat([one["advantages"] for one in batches]).tolist()[-8:] == pytest.approx(
        list(trainer._logs["advantages"])[-8:], abs=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_func": Engine()}, r"must not be 'remax' with rollout_func: "),
        ({**BEHIND_SERVER, "async_rollouts": 1}, r"must not be 'remax' with async_rollouts: "),
    ],
)
def test_what_it_does_not_go_with(build: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        build(**{**options, "offpolicy": {"preset": "measure", "advantages": "remax"}})


def test_groups_that_an_evaluation_spreads_over_ranks_are_refused() -> None:
    stages = stage(Objective(), ReMax())
    args = SimpleNamespace(
        per_device_train_batch_size=4, steps_per_generation=1, num_generations=4, num_generations_eval=4,
        per_device_eval_batch_size=2, eval_strategy="steps", async_rollouts=None, logit_fusion=None,
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="with groups of evaluations that are spread over ranks"):
        check_trainer_greedy(args, stages, {})
    args.eval_strategy = "no"
    check_trainer_greedy(args, stages, {})
    trainer = SimpleNamespace(model=SimpleNamespace(training=False), num_generations_eval=4)
    with pytest.raises(NotImplementedError, match=r"num_generations_eval \(4\) with advantages 'remax', but got 2"):
        greedy_rewards(trainer, [{"prompt": "w1"}] * 2)
