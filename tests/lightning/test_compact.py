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

from trl_offpolicy.rollouts import micro_batches
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix

PROMPTS = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 4 + i % 7]) for i in range(24)]})
LIMIT = 1e-4
"""After up to three optimizer steps, which carry rounding on (both_trainers.py)."""
PLAIN = {"trim_padding": False, "share_prefix": False}
RUNS: dict[
    str, tuple[dict[str, Any], dict[str, Any], int]
] = {  # the module's options, the data's, micro-batches a step
    "accumulated": ({}, {"steps_per_generation": 3}, 3),
    "several steps": ({"share_prefix": "auto"}, {"steps_per_generation": 4}, 2),
    "cut off by the epoch": ({}, {"steps_per_generation": 2}, 2),
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


def run(
    folder: Path, calls: list[Any] | None, accumulation: int, options: Any, sizes: Any, limit: int | None = None
) -> tuple[Watch, Any, Any]:
    torch.manual_seed(0)  # of an adapter
    engine = OwnMismatch(shift=0.1, noise=0.3) if calls is None else Played(calls)
    watch = Watch()
    fit = trainer(
        folder, callbacks=[watch], max_steps=3, accumulate_grad_batches=accumulation, limit_train_batches=limit
    )
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
def test_the_steps_are_those_of_the_plain_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "LEAST_SAVED", 1)  # so that auto shares these short prompts
    options, sizes, accumulation = RUNS[name]
    share = "auto" if name == "cut off by the epoch" else True  # true gathers whole groups over steps
    limit = 3 if name == "cut off by the epoch" else None  # its second step has one micro-batch
    theirs, engine, plain_widths = run(tmp_path, None, accumulation, {**options, **PLAIN}, sizes, limit)
    ours, _, widths = run(tmp_path, engine.calls, accumulation, {"share_prefix": share, **options}, sizes, limit)
    assert sum(widths) < sum(plain_widths)
    assert len(ours.gradients) == 3
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert max(float(gradient.abs().max()) for gradient in other.values()) > 1e-3
        assert distance(one, other) < LIMIT


@pytest.mark.integration
def test_no_forward_of_the_loss_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides how it passes is on the host since the split, also in a second pass over a generation."""
    original, known = SharedPrefix.prompts, []

    def prompts(self: SharedPrefix, model: Any, ids: Any, mask: Any, width: int, seen: Any = None) -> Any:
        if torch.is_grad_enabled():
            known.append(seen is not None)
            if seen is not None:
                expected = torch.where(mask.bool(), ids, -1)
                assert torch.equal(torch.from_numpy(seen), expected)
        return original(self, model, ids, mask, width, seen)

    monkeypatch.setattr(SharedPrefix, "prompts", prompts)
    run(tmp_path, None, 2, {"share_prefix": True}, {"steps_per_generation": 2, "num_iterations": 2})
    assert known == [True] * 6


@pytest.mark.integration
def test_the_noise_floor_takes_its_turn_with_the_micro_batches(tmp_path: Path) -> None:
    """Sorted ones differ in length. The second score has the rows in their order and full width."""
    model = tiny_model()
    policy = module(OwnMismatch(), model=model, noise_floor_steps=1)
    original, seen, widths = policy.score, [], []

    def score(inputs: dict[str, Any], **how: Any) -> Any:
        widths.clear()
        result = original(inputs, **how)
        if how.get("in_order"):
            parts = policy.generation._buffer.micro_batches
            seen.append([part is inputs for part in parts].index(True))
            assert set(widths) == {inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]}
        return result

    def watch(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    policy.score = score  # type: ignore[method-assign]
    model.register_forward_pre_hook(watch, with_kwargs=True)
    trainer(tmp_path, max_steps=3, accumulate_grad_batches=2).fit(policy, data(PROMPTS, steps_per_generation=2))
    assert seen == [0, 1, 0]


def test_reasons_are_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for options, reason in (
        ({"entropy": {"entropy_coef": 0.1}}, "the entropy bonus is a mean over the tokens of its micro-batch"),
        ({"model": tiny_model("qwen3_moe"), "router_aux_loss_coef": 0.0}, "'qwen3_moe' are not proved"),
    ):
        policy = module(OwnMismatch(), share_prefix=True, **options)
        with pytest.raises(ValueError, match=reason):
            trainer(tmp_path, max_steps=1).fit(policy, data(PROMPTS))
    policy = module(OwnMismatch(), entropy={"entropy_coef": 0.1})
    trainer(tmp_path, max_steps=1).fit(policy, data(PROMPTS))
    assert "trim_padding cuts micro-batches, but does not sort rows by length: the entropy bonus" in caplog.text


def test_rows_keep_their_width_where_padding_changes_log_probs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny_model(max_position_embeddings=6, rope_parameters=rope)
    policy = module(OwnMismatch(), model=model)
    trainer(tmp_path, max_steps=1).fit(policy, data(PROMPTS, steps_per_generation=2))
    assert caplog.text.count("trim_padding keeps every column: rotary embeddings of type 'dynamic'") == 1
    parts = policy.generation._buffer.micro_batches
    assert len({part["prompt_ids"].shape[1] for part in parts}) == 1
    assert not policy.compact.scoring.trim


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"share_prefix must be true, false or one of \['auto'\], but got 'yes'"):
        module(share_prefix="yes")
