"""Replayed groups behind the fresh ones of a generation batch: what the loss step sees of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from plain_simulated import SPARSE, logps
from tiny_models import score_last_word, tiny_model, tiny_prompts
from trainer_runs import GENERATIONS, LENGTH, MICRO_BATCH, TIMES, Engine, records, rollouts

from trl_offpolicy.rollouts.replay import ReplayBuffer, ReplayGroup, Response, pad_groups

pytestmark = pytest.mark.integration

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, fresh_model: Callable[..., Any], tokenizer: Any) -> Make:
    """A trainer with a buffer: micro-batches of one group, two groups a step, one replayed group for each."""
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig
    from trl_offpolicy.trl.replay import ReplayGRPOTrainer

    def build(
        *,
        replay_groups: int = 2,
        max_lag: int | None = None,
        engine: Engine | None = None,
        max_rows: int = 1000,
        in_checkpoint: bool = True,
        peft_config: Any = None,
        **options: Any,
    ) -> Any:
        given: dict[str, Any] = {"gradient_accumulation_steps": 2, "learning_rate": 1e-2, "offpolicy": "paper/tis"}
        given |= {"max_steps": 3, "save_strategy": "no"}
        args = OffPolicyGRPOConfig(
            str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_steps=1,
            per_device_train_batch_size=MICRO_BATCH, num_generations=GENERATIONS, max_completion_length=LENGTH,
            gradient_checkpointing=False, write_report=False, **{**given, **options},
        )  # fmt: skip
        buffer = ReplayBuffer(tmp_path / "replay", max_rows=max_rows)
        extra = {"replay": buffer, "replay_groups": replay_groups, "max_lag": max_lag, "in_checkpoint": in_checkpoint}
        data, sampler = tiny_prompts(), engine or Engine(noise=0.1)
        return ReplayGRPOTrainer(
            fresh_model(), score_last_word, args, train_dataset=data, processing_class=tokenizer, rollout_func=sampler,
            peft_config=peft_config, **extra,
        )  # fmt: skip

    return build


def test_replayed_rows_have_the_dense_context_as_their_reference_as_fresh_ones_have(make: Make) -> None:
    kl = {"preset": "paper/tis", "objective": {"kl": {"coef": 0.1}}}
    trainer = make(learner_kv_cache=SPARSE, kl_reference="dense_context", offpolicy=kl)
    scored: list[tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]] = []
    score = trainer._score_reference

    def noted(rows: dict[str, Any]) -> torch.Tensor:
        found: torch.Tensor = score(rows)
        scored.append((rows, found, {name: value.clone() for name, value in trainer.model.state_dict().items()}))
        return found

    trainer._score_reference = noted
    trainer.train()
    assert scored
    for rows, found, weights in scored:
        plain = tiny_model()
        plain.load_state_dict(weights)
        dense, here = logps(plain, rows), rows["completion_mask"].bool()
        torch.testing.assert_close(found[here], dense[here], rtol=0, atol=1e-3)


def test_it_learns_from_fresh_and_replayed_rows(make: Make, monkeypatch: Any) -> None:
    trainer = make()
    seen: list[dict[str, Any]] = []
    original = type(trainer)._compute_loss
    monkeypatch.setattr(type(trainer), "_compute_loss", lambda self, m, i: seen.append(i) or original(self, m, i))
    trainer.train()
    steps = [seen[i : i + 2] for i in (0, 2, 4)]
    assert [sum(len(part["advantages"]) for part in step) for step in steps] == [8, 16, 16]  # nothing to draw at first
    assert len(trainer.replay) == 6 and trainer.replay.rows == 24
    for number, step in enumerate(steps):
        masks = sum(int(part["completion_mask"].sum()) for part in step)
        assert all(float(part["num_items_in_batch"]) == masks for part in step)
        versions = torch.cat([part["policy_versions"].reshape(len(part["advantages"]), -1)[:, 0] for part in step])
        assert int((versions == number).sum()) == 8 and int((versions < number).sum()) == (8 if number else 0)
    frame = rollouts(trainer)
    assert frame.groupby("group_id").prompt.nunique().eq(1).all()
    assert ((frame.group_id < 0) == (frame.policy_version < frame.step)).all()
    logged = records(trainer)
    assert [row["offpolicy/rollout/version_lag_max"] for row in logged] == [0, 1, 2]
    assert logged[1]["offpolicy/rollout/version_lag_mean"] == pytest.approx(0.5, abs=0.15)  # by token
    assert all(row["offpolicy/total/kl_k3"] > 0 for row in logged)


def test_replayed_rows_are_what_was_sampled(make: Make, monkeypatch: Any) -> None:
    """Ids, log-probs and rewards of every row are those that engine and reward gave, whatever the padding."""
    engine = Engine(noise=0.1)
    trainer = make(engine=engine)
    batches: list[dict[str, Any]] = []
    original = type(trainer)._generate_and_score_completions
    monkeypatch.setattr(
        type(trainer),
        "_generate_and_score_completions",
        lambda self, inputs: batches.append(original(self, inputs)) or batches[-1],
    )
    trainer.train()
    last = batches[-1]
    assert last["group_ids"].unique().numel() == 4
    for row in range(16):
        inside = last["completion_mask"][row].bool()
        said = tuple(last["completion_ids"][row][inside].tolist())
        assert last["sampling_per_token_logps"][row][inside].tolist() == pytest.approx(engine.returned[said], abs=1e-6)
        text = trainer.processing_class.decode(said, skip_special_tokens=True)
        assert float(last["rewards"][row]) == pytest.approx(score_last_word([text])[0])
        assert not last["completion_mask"][row][len(said) :].any() and last["prompt_mask"][row][-1]
    for rows in last["group_ids"].unique().tolist():
        rewards = last["rewards"][last["group_ids"] == rows]
        advantages = last["advantages"][last["group_ids"] == rows]
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("adapted", [False, True])
def test_replayed_rows_are_scored_by_the_reference(make: Make, monkeypatch: Any, adapted: bool) -> None:
    trainer = make(beta=0.1, peft_config=LoraConfig(r=2, target_modules=["q_proj"]) if adapted else None)
    seen: list[dict[str, Any]] = []
    original = type(trainer)._compute_loss
    monkeypatch.setattr(type(trainer), "_compute_loss", lambda self, m, i: seen.append(i) or original(self, m, i))
    trainer.train()
    assert [len(part["ref_per_token_logps"]) for part in seen] == [4, 4, 8, 8, 8, 8]
    assert (trainer.ref_model is None) == adapted
    for part in seen:
        again, mask = trainer._score_reference(part), part["completion_mask"].bool()
        torch.testing.assert_close(part["ref_per_token_logps"][mask], again[mask], rtol=1e-4, atol=2e-5)
    assert all(row["kl"] > 0 for row in records(trainer)[1:])


def test_a_wide_correction_sees_fresh_and_replayed_rows(make: Make, monkeypatch: Any) -> None:
    """Weights normalised over all 16 rows: TIS at the weights of the step, over what sampled each token."""
    options = {"preset": "paper/tis", "correction": {"normalize": "original"}, "advantages": "grpo"}
    trainer = make(offpolicy=options, learning_rate=0.05)
    seen: list[tuple[dict[str, Any], torch.Tensor]] = []
    original = type(trainer)._generate_and_score_completions

    def watched(self: Any, inputs: Any) -> Any:
        output = original(self, inputs)
        seen.append((output, self._score(self.model, output)[0].detach()))
        return output

    monkeypatch.setattr(type(trainer), "_generate_and_score_completions", watched)
    trainer.train()

    assert [len(output["decided_weights"]) for output, _ in seen] == [8, 16, 16]
    for output, now in seen:
        mask = output["completion_mask"].bool()
        capped = (now - output["sampling_per_token_logps"]).exp().clamp(max=2.0)  # paper/tis
        expected = capped / capped[mask].mean()
        torch.testing.assert_close(output["decided_weights"][mask], expected[mask], rtol=1e-3, atol=1e-4)
    output, _ = seen[-1]
    stale = (output["policy_versions"] < 2).any(1)
    assert stale.sum() == 8 and output["decided_weights"][stale].std() > output["decided_weights"][~stale].std()
    assert "old_per_token_logps" not in output and "proximal_per_token_logps" in output


def test_stored_groups_are_whole(make: Make) -> None:
    trainer = make(max_lag=1)
    assert not trainer.replay.available(current_version=0)
    trainer.train()
    assert [trainer.replay.available(current_version=3, max_lag=lag) for lag in (0, 1, 2, None)] == [0, 2, 4, 6]
    drawn = trainer.replay.sample(6, current_version=3, rng=trainer._replay_rng)
    rows = pad_groups(drawn.groups, pad_token_id=0)
    assert sorted(rows.policy_versions[:, 0].tolist()) == [0] * 8 + [1] * 8 + [2] * 8
    assert {len(group.responses) for group in drawn.groups} == {GENERATIONS}
    assert [row["offpolicy/rollout/version_lag_max"] for row in records(trainer)] == [0, 1, 1]


class Same(Engine):
    """Completions that depend on prompt and version alone, so that a resumed run samples what the whole one did."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        self.random.manual_seed(sum(map(ord, "".join(prompts))) + 1000 * trainer.state.global_step)
        return super().__call__(prompts, trainer)


@pytest.mark.parametrize("in_checkpoint", [True, False])
def test_a_resumed_run_draws_what_the_whole_one_drew(make: Make, tmp_path: Path, in_checkpoint: bool) -> None:
    """The draws go on, groups that came later go, and those that made room come back; else it is another run."""
    options = {
        "max_rows": 24,
        "in_checkpoint": in_checkpoint,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = make(engine=Same(noise=0.2), **options)
    whole.train()
    kept, expected = [(one.part, one.version) for one in whole.replay.entries], records(whole)[-1]
    whole.replay.close()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    assert len(list(checkpoint.glob("replay/part-*.parquet"))) == (3 if in_checkpoint else 0)

    rest = make(engine=Same(noise=0.2), **options)
    rest.train(resume_from_checkpoint=str(checkpoint))
    assert (whole._replay_rng.bit_generator.state == rest._replay_rng.bit_generator.state) == in_checkpoint
    assert ([(one.part, one.version) for one in rest.replay.entries] == kept) == in_checkpoint
    pairs = zip(whole.model.parameters(), rest.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs) == in_checkpoint
    if in_checkpoint:
        assert {key: value for key, value in records(rest)[-1].items() if key not in TIMES} == pytest.approx(
            {key: value for key, value in expected.items() if key not in TIMES}, nan_ok=True
        )


@pytest.mark.filterwarnings("default")
def test_groups_of_another_size_are_left_out_and_said_once(make: Make, tmp_path: Path) -> None:
    """Six groups of an earlier run in the folder, of two responses; none is drawn, and this run's own are."""
    with ReplayBuffer(tmp_path / "replay", max_rows=1000) as buffer:
        response = Response(completion_ids=(5,), sampling_logps=(-0.1,), policy_versions=(0,), reward=1.0)
        buffer.add([ReplayGroup(prompt_ids=(1, 2), responses=(response,) * 2, group_id=one) for one in range(6)])
    trainer = make()
    with pytest.warns(UserWarning, match="are not replayed") as said:
        trainer.train()
    (one,) = [str(warning.message) for warning in said if "are not replayed" in str(warning.message)]
    assert one.startswith("6 of 6 groups") and one.endswith("they have 2 responses, and num_generations is 4.")
    frame = rollouts(trainer)
    assert frame.groupby("step").size().tolist() == [8, 16, 16]
    assert frame.groupby(["step", "group_id"]).size().eq(GENERATIONS).all()


@pytest.mark.parametrize("scale", ["none", "group"])
def test_replayed_advantages_have_the_scale_of_the_fresh_ones(make: Make, scale: str, monkeypatch: Any) -> None:
    trainer = make(scale_rewards=scale)
    seen: list[dict[str, Any]] = []
    whole = type(trainer)._generate_and_score_completions

    def noted(self: Any, inputs: Any) -> Any:
        seen.append(whole(self, inputs))
        return seen[-1]

    monkeypatch.setattr(type(trainer), "_generate_and_score_completions", noted)
    trainer.train()
    rows = seen[-1]
    assert len(rows["rewards"]) == 16  # the second half is replayed
    groups = rows["rewards"].view(-1, GENERATIONS)
    expected = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        expected = expected / (groups.std(1, keepdim=True) + 1e-4)
    assert groups.std(1).max() > 0 and torch.allclose(rows["advantages"], expected.flatten(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"replay_groups": 0}, ValueError, "replay_groups must be at least 1, but got 0"),
        ({"steps_per_generation": 4}, ValueError, "one optimizer step a generation batch"),
        ({"max_rows": 7}, ValueError, r"^replay\.max_rows must be at least 8, .* but got 7"),
        ({"max_rows": 15, "replay_groups": 4}, ValueError, r"^replay\.max_rows must be at least 16, .* but got 15"),
        (
            {"offpolicy": {"preset": "paper/tis", "advantages": "optimal_token_baseline"}},
            NotImplementedError,
            "other advantages than grpo",
        ),
        ({"scale_rewards": "batch"}, NotImplementedError, "scale_rewards 'batch'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, NotImplementedError, "'normalize_then_sum'"),
    ],
)
def test_what_it_cannot_do_is_refused(make: Make, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)
