"""``offpolicy.advantages`` through the real trainer: values, what they read, what they refuse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import score_last_word, tiny_prompts
from trainer_runs import GENERATIONS, Engine, generation_batches, records, rollouts, scoring_calls

import trl_offpolicy as op
from trl_offpolicy.objective.advantages import AdvantageInputs
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, parse_advantages
from trl_offpolicy.rollouts.batches import trainable
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

Build = Callable[..., OffPolicyGRPOTrainer]

SPECS: dict[str, Any] = {name: name for name in ADVANTAGE_TYPES if name != "remax"} | {  # that is in test_remax.py
    "grpo, unscaled": {"type": "grpo", "scale": "none"},
    "otb, is-aware": {"type": "optimal_token_baseline", "is_aware": True},
    "otb, by turn": {"type": "optimal_token_baseline", "multi_turn": True, "alone": "return"},
}
CORRECTED = "paper/tis"
MISALIGNED = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "max_steps": 2}


def softmax_sums(trainer: Any, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the completions and sums of squared probabilities, from the model's plain logits."""
    prompt, completion = output["prompt_ids"], output["completion_ids"]
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.cat([prompt, completion], dim=1), attention_mask=attention).logits
    logits = logits[:, prompt.shape[1] - 1 : -1] / trainer.temperature
    logps = logits.log_softmax(-1)
    return logps.gather(-1, completion.unsqueeze(-1)).squeeze(-1), logps.exp().square().sum(-1)


def inputs_of(trainer: Any, output: dict[str, Any], *, sums: bool = True) -> AdvantageInputs:
    """What the estimator must have seen, made another way."""
    logps, sum_sq_probs = softmax_sums(trainer, output) if sums else (None, None)
    mask = trainable(output)
    ratio = None if logps is None else (logps - output["sampling_per_token_logps"]).exp().clamp(max=2.0)
    return AdvantageInputs(
        rewards=output["rewards"],
        group_ids=torch.arange(len(mask)) // GENERATIONS,
        mask=mask,
        per_token_logps=logps,
        sum_sq_probs=sum_sq_probs,
        weights=None if ratio is None else torch.where(mask, ratio, 0.0),
    )


@pytest.mark.parametrize("name", SPECS)
def test_one_step_of_every_estimator(build: Build, name: str) -> None:
    """The advantages are those of the pure function on the rewards; the step changes the weights."""
    trainer = build(Engine(noise=0.3), offpolicy={"preset": CORRECTED, "advantages": SPECS[name]}, max_steps=1)
    seen = generation_batches(trainer)
    before = {key: value.clone() for key, value in trainer.model.named_parameters()}
    plain = trainer._generate_and_score_completions

    def compared(inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = plain(inputs)
        estimator = parse_advantages(SPECS[name], where="advantages")
        assert estimator is not None
        expected = estimator(inputs_of(trainer, output))
        assert output["advantages"].shape == expected.shape
        torch.testing.assert_close(output["advantages"], expected, rtol=1e-4, atol=1e-5)
        assert (expected > 0.01).any() and ((expected < -0.01).any() or name == "grpo_passk")  # it blames nobody
        return output

    trainer._generate_and_score_completions = compared
    trainer.train()
    (output,) = seen
    (row,) = records(trainer)
    assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
    assert any(not torch.equal(before[key], value) for key, value in trainer.model.named_parameters())
    by_row = output["advantages"]
    if by_row.dim() == 2:
        by_row = torch.where(trainable(output), by_row, 0.0).sum(-1) / trainable(output).sum(-1)
    assert list(trainer._logs["advantages"]) == pytest.approx(by_row.tolist(), abs=1e-6)  # TRL's table of completions
    texts = {tuple(ids[mask].tolist()): i for i, (ids, mask) in enumerate(_rows(output))}
    for rollout in rollouts(trainer).itertuples():
        assert rollout.advantage == pytest.approx(by_row[texts[tuple(rollout.completion_ids)]].item(), abs=1e-5)


def _rows(output: dict[str, Any]) -> Any:
    return zip(output["completion_ids"], output["completion_mask"].bool(), strict=True)


@pytest.mark.parametrize(
    ("spec", "forwards"),
    [("rloo", {4: 2}), ("gdpo", {4: 2}), ("opo", {4: 2}), ("optimal_token_baseline", {4: 2, 8: 1})],
)
@pytest.mark.parametrize("misaligned", [False, True])
def test_forward_passes(
    build: Build, monkeypatch: pytest.MonkeyPatch, spec: str, forwards: dict[int, int], misaligned: bool
) -> None:
    """Estimators of rewards alone cost none; those that read the policy one, which is TRL's where it makes one."""
    calls = scoring_calls(monkeypatch)
    options = MISALIGNED if misaligned else {}
    trainer = build(Engine(noise=0.3), offpolicy={"advantages": spec}, **{"max_steps": 1, **options})
    trainer.train()
    # TRL's pass for the old log-probs scores rows of like length together, a micro-batch at a time
    old = {8: 1} if 8 in forwards else {4: 4}
    assert Counter(calls) == ({**forwards, **old} if misaligned else forwards)
    assert trainer.args.gradient_accumulation_steps == (1 if misaligned else 2)


@pytest.mark.parametrize(
    ("mode", "options", "passes"),
    [
        ("decoupled", {}, 3),  # loss, reference, old policy
        ("bypass", {}, 2),  # the sampler is the old policy
        ("decoupled", MISALIGNED, 3),
        ("bypass", MISALIGNED, 3),  # TRL scores the old policy, which `mismatch/` and `staleness/` read
    ],
)
def test_forward_passes_with_the_kl_in_the_reward(
    build: Build, monkeypatch: pytest.MonkeyPatch, mode: str, options: dict[str, Any], passes: int
) -> None:
    calls = scoring_calls(monkeypatch)
    kl = {"coef": 0.1, "estimator": "k1", "place": "reward"}
    spec = {"preset": "measure", "objective": {"mode": mode, "kl": kl}}
    trainer = build(Engine(noise=0.3), offpolicy=spec, **{"max_steps": 1, **options})
    trainer.train()
    assert calls == [4, 4] * passes  # each over 8 rows, a micro-batch at a time


def trainer_of(make_args: Any, model: Any, tokenizer: Any, *, rewards: Any = score_last_word, **options: Any) -> Any:
    """A trainer with other rewards or adapters than those of ``build``."""
    peft_config = options.pop("peft_config", None)
    return OffPolicyGRPOTrainer(
        model,
        rewards,
        make_args(**options),
        train_dataset=tiny_prompts(),
        processing_class=tokenizer,
        peft_config=peft_config,
        rollout_func=Engine(noise=0.3),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("lora", [False, True])
def test_sum_sq_probs_is_that_of_a_softmax(
    make_args: Any, fresh_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, temperature: float, lora: bool
) -> None:
    """Read off the fused head during the extra forward only, whose ``forward`` is put back."""
    seen: list[op.PolicyBatch] = []
    adapter = LoraConfig(r=4, target_modules="all-linear") if lora else None
    options = {"offpolicy": {"advantages": "optimal_token_baseline"}, "temperature": temperature}
    trainer = trainer_of(make_args, fresh_model(), tokenizer, peft_config=adapter, **options)
    base = trainer.model.get_base_model() if lora else trainer.model
    forward = base.forward
    decide = type(trainer._stages).decide

    def watched(self: Any, batch: op.PolicyBatch, inputs: Any = None) -> Any:
        seen.append(batch)
        return decide(self, batch, inputs)

    monkeypatch.setattr(type(trainer._stages), "decide", watched)
    outputs = generation_batches(trainer)
    plain, expected = trainer._generate_and_score_completions, []

    def compared(inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = plain(inputs)
        expected.append(softmax_sums(trainer, output))
        return output

    trainer._generate_and_score_completions = compared
    trainer.train()
    assert base.forward == forward and len(seen) == len(outputs) == 2
    for batch, (logps, sums) in zip(seen, expected, strict=True):
        assert batch.sum_sq_probs is not None
        torch.testing.assert_close(batch.per_token_logps[batch.mask], logps[batch.mask], rtol=0, atol=1e-4)
        torch.testing.assert_close(batch.sum_sq_probs[batch.mask], sums[batch.mask], rtol=1e-4, atol=1e-6)
        assert sums[batch.mask].std() > 1e-3


def test_token_advantages_reach_the_loss(build: Build) -> None:
    """On the first pass the ratio is 1: the policy loss is minus the weighted mean of the tokens' advantages."""
    trainer = build(
        Engine(noise=0.3), offpolicy={"preset": CORRECTED, "advantages": "optimal_token_baseline"}, max_steps=1
    )
    seen = generation_batches(trainer)
    expected = []
    plain = trainer._generate_and_score_completions

    def measured(inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = plain(inputs)
        mask = trainable(output)
        weights = (softmax_sums(trainer, output)[0] - output["sampling_per_token_logps"]).exp().clamp(max=2.0)
        expected.append(-(weights * output["advantages"])[mask].sum().item() / mask.sum().item())
        return output

    trainer._generate_and_score_completions = measured
    trainer.train()
    (row,) = records(trainer)
    assert seen[0]["advantages"].dim() == 2 and abs(expected[0]) > 1e-3
    assert row["offpolicy/loss/policy"] == pytest.approx(expected[0], abs=1e-5)
    assert row["loss"] == pytest.approx(expected[0], abs=1e-5)


def test_rejected_responses_are_not_counted(build: Build) -> None:
    """``baseline: kept`` with an estimator of its own: leave-one-out over what is left."""
    keep = [{"type": "ratio_band", "level": "sequence_mean", "low": 0.9, "high": 1.1}]
    spec = {"correction": {"keep": keep, "baseline": "kept"}, "advantages": "rloo"}
    trainer = build(Engine(noise=0.3), offpolicy=spec)
    trainer.train()
    frame = rollouts(trainer)
    frame["kept"] = frame.keep_mask.map(any)
    assert 0 < frame.kept.sum() < len(frame)
    for _, group in frame.groupby("group_id"):
        kept = group[group.kept]
        others = (kept.reward.sum() - kept.reward) / max(len(kept) - 1, 1)
        expected = kept.reward - others if len(kept) > 1 else 0 * kept.reward
        assert list(kept.advantage) == pytest.approx(list(expected), abs=1e-5)
        assert (group[~group.kept].advantage == 0).all()


def first_word(completions: list[str], **_: object) -> list[float | None]:
    """Ten times as spread as ``score_last_word``, and silent on some."""
    words = [text.split()[0] if text.split() else "w0" for text in completions]
    return [None if word.endswith("4") else float(word.removeprefix("w")) / 10 for word in words]


@pytest.mark.parametrize("name", ["gdpo", "rloo"])
def test_several_reward_functions(make_args: Any, fresh_model: Any, tokenizer: Any, name: str) -> None:
    """GDPO sees the columns and their weights, the others the weighted sum; TRL's own metrics stay as they are."""
    options = {"offpolicy": {"advantages": name}, "reward_weights": [1.0, 0.25], "max_steps": 1}
    trainer = trainer_of(make_args, fresh_model(), tokenizer, rewards=[score_last_word, first_word], **options)
    seen = generation_batches(trainer)
    trainer.train()
    (output,) = seen
    columns = trainer._rewards
    assert columns is not None and columns.shape == (8, 2) and columns.isnan().any()
    estimator = parse_advantages(name, where="advantages")
    assert estimator is not None
    ids, weights = torch.arange(8) // GENERATIONS, torch.tensor([1.0, 0.25])
    whole = AdvantageInputs(rewards=columns, group_ids=ids, reward_weights=weights, mask=trainable(output))
    torch.testing.assert_close(output["advantages"], estimator(whole))
    swapped = estimator(replace(whole, reward_weights=weights.flip(0)))
    assert not torch.allclose(output["advantages"], swapped, atol=1e-2)
    (row,) = records(trainer)
    assert row["reward"] == pytest.approx((columns * weights).nansum(1).mean().item(), rel=1e-5)


def test_grpo_is_trls_own(build: Build) -> None:
    """The same rewards, the same advantages: a run under ``advantages: grpo`` is a run without the option."""
    losses = []
    for spec in ("measure", {"preset": "measure", "advantages": "grpo"}):
        trainer = build(Engine(noise=0.3), offpolicy=spec)
        trainer.train()
        losses.append([row["loss"] for row in records(trainer)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and abs(losses[0][0]) > 1e-3


def test_evaluation_has_them_too(build: Build) -> None:
    trainer = build(Engine(noise=0.3), offpolicy={"advantages": "rloo"})
    seen = generation_batches(trainer)
    trainer.evaluate()
    rewards = seen[0]["rewards"]
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    torch.testing.assert_close(seen[0]["advantages"], rewards - others)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "near miss": ("rlo", {}, r"offpolicy\.advantages\.type must be one of .* Did you mean .*'rloo'"),
    "unknown option": ({"type": "grpo", "scal": "none"}, {}, r"offpolicy\.advantages\.scal is not .* 'scale'"),
    "no mapping": (3, {}, r"offpolicy\.advantages must be one of .* with the key type, but got 3"),
    "scale twice": ("rloo", {"scale_rewards": "none"}, r"offpolicy\.advantages and scale_rewards set the same"),
    "aggregation twice": (
        "gdpo",
        {"multi_objective_aggregation": "normalize_then_sum"},
        r"offpolicy\.advantages and multi_objective_aggregation set the same quantity",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(make_args: Callable[..., Any], name: str) -> None:
    spec, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_args(offpolicy={"advantages": spec}, **options)


NOT_BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "no weight": (
        {"preset": "measure", "advantages": "opob"},
        "correction.weight must be a weight on 'old/sampling' with the advantages of OPOB",
    ),
    "weight of the loss step": (
        {"correction": {"weight": {"type": "raw", "ratio": "current/sampling"}}, "advantages": "opob",
         "objective": {"policy_loss": {"type": "gpg"}}},
        "correction.weight must be a weight on 'old/sampling'",
    ),
    "sign": (
        {"preset": CORRECTED, "correction": {"keep": [{"type": "probability_difference"}]}, "advantages": "opob"},
        "correction.keep must not name probability_difference",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_BUILT)
def test_refused_before_loading(make_args: Callable[..., Any], name: str) -> None:
    spec, message = NOT_BUILT[name]
    with pytest.raises(ValueError, match=message):
        OffPolicyGRPOTrainer("no such model", score_last_word, make_args(use_vllm=True, offpolicy=spec))
