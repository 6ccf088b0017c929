"""Routing replay of the engine (R3) with rollouts that are sampled ahead, in both trainers.

The server sends every token to the next experts and scores its tokens routed so. Copies of the old weights, routed as
it reports, then give its log-probs to the last digit, whatever the lag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from both_trainers import PROMPTS
from lightning_runs import Watch, data, module, trainer
from rollouts.ahead.fake_server import BEHIND_SERVER, FakeServer
from tiny_models import score_last_word
from trainer_runs import records

from lightning_module import engines
from trl_offpolicy.engines.routing import record, replay
from trl_offpolicy.engines.server.answers import Answer
from trl_offpolicy.rollouts.ahead.parts import Part, ResponseInParts
from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

AHEAD = {"lag": 1, "partial": "finish", "old_logps": "snapshot"}
STEPS = 3


def stacked(weights: Mapping[str, torch.Tensor], shape: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with a tensor for each expert, as a checkpoint has them, as the model has them: one for all experts."""
    found = {name: value for name, value in weights.items() if name in shape}
    for name in shape.keys() - found.keys():
        layer, _, kind = name.rpartition(".")
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        experts = range(len(shape[name]))
        found[name] = torch.cat(
            [torch.stack([weights[f"{layer}.{expert}.{part}.weight"] for expert in experts]) for part in kinds], dim=1
        )
    return found


class RoutedServer(FakeServer):
    """Every expert is the next one; log-probs are those under this routing."""

    def bind(self, source: Any) -> None:
        shape = self._model.state_dict()
        super().bind(SimpleNamespace(merged=lambda: stacked(dict(source.merged()), shape)))

    def parts(self, prompt: list[int], options: dict[str, Any], n: int) -> Any:
        answers = super().parts(prompt, options, n)
        return [Answer(*answer[:3], None, self.known[tuple([*prompt, *answer[0]])]) for answer in answers]

    @torch.no_grad()
    def _sample(self, prompt: list[int], length: int, reason: str) -> tuple[list[int], list[float], str]:
        words, _, _ = super()._sample(prompt, length, reason)
        with self._lock:
            fed = torch.tensor([[*prompt, *words][:-1]])
            with record(self._model) as recorded:
                self._model(input_ids=fed)
            routes = (recorded.routed_experts + 1) % 4
            with replay(self._model, routes):
                logits = self._model(input_ids=fed).logits[0, len(prompt) - 1 :]
            self.known = {**getattr(self, "known", {}), tuple([*prompt, *words]): routes[0]}
        return words, logits.log_softmax(-1).gather(-1, torch.tensor(words)[:, None])[:, 0].tolist(), reason


def check(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == STEPS
    for step, row in enumerate(rows):
        assert row["offpolicy/rollout/version_lag_max"] == min(step, 1)
        assert row["offpolicy/mismatch/logp_diff_max"] < 1e-4
        assert row["offpolicy/routing/flip_fraction"] > 0.5  # the router would have chosen others


@pytest.mark.integration
def test_trl(
    make_args: Callable[..., Any], fresh_model: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RoutedServer(fresh_model("qwen3_moe"))
    monkeypatch.setattr(trl_engines, "ServerEngine", lambda *_, **__: server)
    args = make_args(
        **BEHIND_SERVER, async_rollouts=AHEAD, routing_replay="r3", learning_rate=0.02, optim="sgd", max_steps=STEPS,
    )  # fmt: skip
    theirs = OffPolicyGRPOTrainer(
        fresh_model("qwen3_moe"), score_last_word, args, train_dataset=PROMPTS, processing_class=tokenizer
    )
    theirs.train()
    check(records(theirs))


@pytest.mark.integration
def test_lightning(fresh_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = RoutedServer(fresh_model("qwen3_moe"))
    monkeypatch.setattr(engines, "ServerEngine", lambda *_, **__: server)
    ours = module(
        {"type": "server", "base_url": "http://127.0.0.1:1"}, model=fresh_model("qwen3_moe"), async_rollouts=AHEAD,
        correction="paper/tis", routing_replay="r3", optimizer=partial(torch.optim.SGD, lr=0.02), control="off",
    )  # fmt: skip
    watch = Watch()
    owner = trainer(tmp_path, callbacks=[watch], max_steps=STEPS, accumulate_grad_batches=2)
    owner.fit(ours, data(PROMPTS, steps_per_generation=2))
    check(watch.logs)


def part(ids: tuple[int, ...], routes: list[int] | None, reason: str = "abort") -> Part:
    found = None if routes is None else torch.tensor(routes).view(-1, 1, 1)
    return Part(token_ids=ids, logps=(-1.0,) * len(ids), version=0, finish_reason=reason, routes=found)


def test_a_cut_response_keeps_the_routes_of_each_token_as_it_was_sampled() -> None:
    """A prompt of two tokens. The second request feeds the first part again, at other weights."""
    first, empty = part((5, 6), [1, 1, 1]), part((), None)
    second = part((7, 8), [2, 2, 2, 2, 2], "stop")
    whole = ResponseInParts((first, empty, second)).routes
    assert whole is not None and whole.flatten().tolist() == [1, 1, 1, 2, 2]
    assert ResponseInParts((part((5,), None), second)).routes is None
    assert ResponseInParts((empty,)).routes is None
