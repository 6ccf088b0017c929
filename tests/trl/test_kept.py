"""Replay of the sampling mask in the TRL trainer: with transformers' generate, behind a server, in turn and ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollouts.ahead.fake_server import BEHIND_SERVER, FakeServer, note_submissions
from tiny_models import FIRST_WORD, VOCABULARY
from torch import Tensor
from trainer_runs import generation_batches, records

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.engines.server.answers import Answer
from trl_offpolicy.functional.truncated_sampling import KeptIds
from trl_offpolicy.rollouts.kept import KEY
from trl_offpolicy.trl import engine as trl_engines

pytestmark = pytest.mark.integration

SERVER = {**BEHIND_SERVER, "learning_rate": 0.05, "max_steps": 3, "top_k": 9}


def over_the_listed(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """Log-probs by the log-softmax over the listed ids, row by row without padding; those of all rows in one."""
    found = []
    for row, kept in enumerate(batch[KEY]):
        prompt, completion = (
            batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()].tolist() for part in ("prompt", "completion")
        )
        logits = trainer.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        for place, listed in enumerate(kept.tolist()):
            among = (logits[place][listed].float() / trainer.temperature).log_softmax(-1)
            found.append(among[listed.index(completion[place])])
    return torch.stack(found)


@pytest.mark.parametrize("steps_per_generation", [2, 4], ids=["aligned", "old_log_probs"])
def test_what_generate_kept_is_what_is_scored(
    build: Callable[..., Any], steps_per_generation: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Top-p beside min-p: transformers cuts in another order than the trainer's rule."""
    options = {"offpolicy": "measure", "top_p": 0.7, "min_p": 0.1, "temperature": 0.9, "beta": 0.01}
    trainer = build(None, steps_per_generation=steps_per_generation, **options)
    made = generation_batches(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count("renormalises over exactly these") == 1
    batch, mask = made[-1], made[-1]["completion_mask"].bool()
    with torch.no_grad():
        scored = trainer._score(trainer.model, batch, batch_size=3)[0]  # sorted by length, in several forwards
        by_rule = trainer._score(trainer.model, {**batch, KEY: None}, batch_size=3)[0]
        torch.testing.assert_close(scored[mask], over_the_listed(trainer, batch), rtol=1e-4, atol=2e-5)
    assert float((scored - by_rule)[mask].abs().max()) > 0.01
    assert ("old_per_token_logps" in batch and batch["old_per_token_logps"] is not None) == (steps_per_generation == 4)
    for row in records(trainer):
        assert row["offpolicy/rollout/recomputed_cut_fraction"] == 0.0
        assert row["offpolicy/rollout/outside_fraction"] == 0.0
        assert 1 < row["offpolicy/rollout/kept_ids_mean"] < 40


def test_nothing_is_noted_where_nothing_is_cut(build: Callable[..., Any]) -> None:
    trainer = build(None, offpolicy="measure", max_steps=1)
    made = generation_batches(trainer)
    trainer.train()
    assert KEY not in made[0]
    assert "offpolicy/rollout/kept_ids_mean" not in records(trainer)[0]


class Chooser(FakeServer):
    """A server that samples each token among five that it draws by itself, and reports these if it is to."""

    no_mask: str | None = None

    def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> Any:
        answers = super().parts(prompt, options, n)
        if self.no_mask is not None:
            return answers
        return [Answer(*answer[:3], self.kept[tuple([*prompt, *answer[0]])]) for answer in answers]

    def generate(self, prompt_ids: Any, sampling: Sampling, *, n: int = 1) -> Rollouts:
        found = super().generate(prompt_ids, sampling, n=n)
        if self.no_mask is not None:
            return found
        pairs = zip(found.prompt_ids, found.completion_ids, strict=True)
        masks = [self.kept[tuple([*prompt, *ids])] for prompt, ids in pairs]
        return Rollouts(**{**vars(found), "sampling_mask": masks})

    @torch.no_grad()
    def _sample(self, prompt: list[int], length: int, reason: str) -> tuple[list[int], list[float], str]:
        words, _, _ = super()._sample(prompt, length, reason)
        with self._lock:
            chance = torch.Generator().manual_seed(hash(tuple(words)) % 2**31)
            logits = self._model(input_ids=torch.tensor([prompt + words])).logits[0, len(prompt) - 1 : -1]
            sets, logps = [], []
            for place, word in enumerate(words):
                others = FIRST_WORD + torch.randperm(len(VOCABULARY) - FIRST_WORD, generator=chance)[:4]
                sets.append(sorted({word, *others.tolist()}))
                logps.append(float(logits[place][sets[-1]].log_softmax(-1)[sets[-1].index(word)]))
            self.kept = {**getattr(self, "kept", {}), tuple([*prompt, *words]): KeptIds.of(sets)}
        return words, logps, reason


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize(
    "ahead",
    [None, {"lag": 1, "partial": "finish", "old_logps": "snapshot"},
     {"lag": 2, "partial": "continue", "old_logps": "snapshot"}],
    ids=["in turn", "ahead", "ahead, cut"],
)  # fmt: skip
def test_behind_a_server(
    build: Callable[..., Any],
    fresh_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    reports: bool,
    ahead: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Old log-probs are those at the weights that sampled, so that the mismatch is 0 to the last digit."""
    note_submissions(monkeypatch)
    server = Chooser(fresh_model(), free=2 if ahead and ahead["partial"] == "continue" else None)
    server.no_mask = None if reports else "it was started so"
    monkeypatch.setattr(trl_engines, "ServerEngine", lambda *_, **__: server)
    trainer = build(**SERVER, async_rollouts=ahead)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    rows = records(trainer)
    assert len(rows) == 3
    for row in rows:
        if reports:
            assert row["offpolicy/mismatch/logp_diff_max"] < 1e-4
            assert 4 <= row["offpolicy/rollout/kept_ids_mean"] <= 5
            assert row["offpolicy/rollout/recomputed_cut_fraction"] == 0.0
        else:
            assert row["offpolicy/mismatch/logp_diff_mean"] > 0.3
            assert "offpolicy/rollout/kept_ids_mean" not in row
    assert caplog.text.count("(it was started so)") == (0 if reports else 1)
