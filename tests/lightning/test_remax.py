"""ReMax in Lightning: whose reward is the baseline, and that nothing else of the greedy completions is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning_runs import Watch, data, module, trainer
from plain_greedy import plain_greedy
from tiny_models import EOS, score_last_word, tiny_tokenizer
from trainer_runs import LENGTH

from lightning_module import RunFolder

REMAX = {"preset": "measure", "advantages": "remax"}
SERVER = {"type": "server", "base_url": "http://127.0.0.1:1"}


@pytest.mark.integration
def test_the_baseline_is_the_greedy_completion_of_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewarded, batches, watch = [], [], Watch()

    def reward(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        rewarded.append(len(completions))
        log_metric("shown", float(len(completions)))
        return score_last_word(completions)

    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731
    ours = module(reward_funcs=reward, correction=REMAX, optimizer=sgd)
    whole, tokenizer = ours.generation._generate, tiny_tokenizer()

    def compared(step: Any) -> Any:
        rows = whole(step)
        batches.append(rows)
        for row, mask in enumerate(rows["prompt_mask"].bool()):
            prompt = rows["prompt_ids"][row][mask].tolist()
            ids = plain_greedy(ours.policy, prompt, length=LENGTH, ends={EOS})
            (text,) = tokenizer.batch_decode([ids], skip_special_tokens=True)
            wanted = rows["rewards"][row].item() - score_last_word([text])[0]
            assert rows["advantages"][row].item() == pytest.approx(wanted, abs=1e-6)
        return rows

    monkeypatch.setattr(ours.generation, "_generate", compared)
    owner = trainer(tmp_path, callbacks=[watch, RunFolder(str(tmp_path), report=False)], max_steps=3)
    owner.fit(ours, data(micro_batch_size=8))
    assert len(batches) == len(watch.logs) == 3 and rewarded == [8, 2] * 3
    assert len(pd.read_parquet(tmp_path / "rollouts.parquet")) == 3 * 8
    for rows, log in zip(batches, watch.logs, strict=True):
        assert rows["advantages"].abs().max() > 0.01 and log["grad_norm"] > 0
        assert log["reward"] == pytest.approx(rows["rewards"].mean().item(), abs=1e-6)
        assert log["shown"] == 8.0
    sampled = sum(int(rows["completion_mask"].sum() + rows["prompt_mask"].sum()) for rows in batches)
    assert watch.logs[-1]["num_tokens"] == sampled


def look_up(word: str) -> str:
    """Say what a word is.

    Args:
        word: the word.
    """
    return word


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": SERVER, "async_rollouts": 1}, "async_rollouts"),
        ({"tools": [look_up]}, "tools"),
        ({"rollout": print}, "rollout"),
    ],
)
def test_what_it_does_not_go_with(options: dict[str, Any], name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"^advantages must not be 'remax' with {name}: "):
        module(options.pop("engine", "transformers"), correction=REMAX, **options)
