"""Sorted, trimmed and shared micro-batches in Lightning: the optimizer steps are those of the plain path."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from both_trainers import distance
from datasets import Dataset
from lightning_runs import OwnMismatch, Played, Watch, data, module, trainer
from tiny_models import WORDS, tiny_model

PROMPTS = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 4 + i % 7]) for i in range(24)]})
LIMIT = 1e-4
"""After up to three optimizer steps, which carry rounding on (both_trainers.py)."""
PLAIN = {"trim_padding": False, "share_prefix": False}
RUNS: dict[
    str, tuple[dict[str, Any], dict[str, Any], int]
] = {  # the module's options, the data's, micro-batches a step
    "accumulated": ({}, {"steps_per_generation": 3}, 3),
    "several steps": ({"share_prefix": False}, {"steps_per_generation": 4}, 2),
    "several iterations": ({}, {"steps_per_generation": 2, "num_iterations": 2}, 2),
    "kl": ({"objective": {"kl": {"coef": 0.1}}}, {"steps_per_generation": 2}, 2),
    "sequences": ({"objective": {"aggregation": "seq_mean_token_mean"}}, {"steps_per_generation": 2}, 2),
    "truncated": ({"sampling": {"max_tokens": 6, "top_p": 0.9}}, {"steps_per_generation": 2}, 2),
    "adapter": (
        {"adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"]}, "objective": {"kl": {"coef": 0.1}}},
        {"steps_per_generation": 2},
        2,
    ),
    "wide": (
        {"correction": {"preset": "paper/tis", "correction": {"keep": [{"type": "second_moment_budget"}]}}},
        {"steps_per_generation": 2},
        2,
    ),
}


def run(folder: Path, calls: list[Any] | None, accumulation: int, options: Any, sizes: Any) -> tuple[Watch, Any, Any]:
    torch.manual_seed(0)  # of an adapter
    engine = OwnMismatch(shift=0.1, noise=0.3) if calls is None else Played(calls)
    watch = Watch()
    fit = trainer(folder, callbacks=[watch], max_steps=3, accumulate_grad_batches=accumulation)
    policy = module(engine, optimizer=partial(torch.optim.SGD, lr=0.02), **{"correction": "paper/tis", **options})
    widths: list[int] = []
    original = policy.score

    def score(inputs: dict[str, Any], **how: Any) -> Any:
        widths.append(inputs["completion_ids"].shape[1] + inputs["prompt_ids"].shape[1])
        return original(inputs, **how)

    policy.score = score  # type: ignore[method-assign]
    fit.fit(policy, data(PROMPTS, **sizes))
    return watch, engine, widths


@pytest.mark.integration
@pytest.mark.parametrize("name", RUNS)
def test_the_steps_are_those_of_the_plain_path(name: str, tmp_path: Path) -> None:
    options, sizes, accumulation = RUNS[name]
    theirs, engine, plain_widths = run(tmp_path, None, accumulation, {**options, **PLAIN}, sizes)
    ours, _, widths = run(tmp_path, engine.calls, accumulation, {"share_prefix": True, **options}, sizes)
    assert sum(widths) < sum(plain_widths)
    assert len(ours.gradients) == 3
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert max(float(gradient.abs().max()) for gradient in other.values()) > 1e-3
        assert distance(one, other) < LIMIT


def test_reasons_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for options, reason in (
        ({"entropy": {"entropy_coef": 0.1}}, "the entropy bonus is a mean over the tokens of its micro-batch"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing recomputes"),
        ({"model": tiny_model("qwen3_moe"), "router_aux_loss_coef": 0.0}, "'qwen3_moe' are not proved"),
    ):
        policy = module(OwnMismatch(), share_prefix=True, **options)
        with pytest.raises(ValueError, match=reason):
            trainer(tmp_path, max_steps=1).fit(policy, data(PROMPTS))
    policy = module(OwnMismatch(), entropy={"entropy_coef": 0.1})
    trainer(tmp_path, max_steps=1).fit(policy, data(PROMPTS))
    assert "trim_padding cuts micro-batches, but does not sort rows by length: the entropy bonus" in caplog.text


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"share_prefix must be true, false or one of \['auto'\], but got 'yes'"):
        module(share_prefix="yes")
