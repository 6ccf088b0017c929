"""The real trainer behind a server that answers at once or when it is cut: what is asked for when, and of what lag."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from rollouts.ahead.fake_server import BEHIND_SERVER, FakeServer, lags_by_step, note_submissions, server_class
from trainer_runs import records, rollouts
from transformers import TrainerCallback

from trl_offpolicy.control import read_actions
from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.rollouts.ahead import old_policy
from trl_offpolicy.rollouts.ahead.flight import Flight
from trl_offpolicy.trl import engine as trl_engines
from trl_offpolicy.trl.ahead import AVERAGE_FILE
from trl_offpolicy.trl.control import ControlCallback
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

pytestmark = pytest.mark.integration

SERVER = {**BEHIND_SERVER, "learning_rate": 0.05, "max_steps": 5}


@pytest.fixture
def run(build: Callable[..., Any], fresh_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run(server_options, resume=..., callback=..., **trainer_options)``: the trained trainer and its server."""
    note_submissions(monkeypatch)

    def train(
        server: dict[str, Any] | None = None,
        resume: Any = None,
        callback: Any = None,
        trainers: list[Any] | None = None,
        **options: Any,
    ) -> tuple[Any, FakeServer]:
        made: list[FakeServer] = []
        monkeypatch.setattr(trl_engines, "ServerEngine", server_class(fresh_model(), made, **(server or {})))
        trainer = build(**{**SERVER, **options})
        if trainers is not None:
            trainers.append(trainer)
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, made[0]

    return train


def lags(trainer: Any) -> list[list[int]]:
    """By optimizer step: the lags of the rows' tokens, without repetition."""
    return lags_by_step(rollouts(trainer))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_batch_is_learned_from_lag_generations_after_it_was_asked_for(run: Any, lag: int) -> None:
    trainer, server = run(async_rollouts={"lag": lag, "partial": "finish"})

    assert lags(trainer) == [[min(step, lag)] for step in range(5)]
    assert server.syncs == [0, 1, 2, 3, 4]
    assert len(server.asked) == 5 * 2  # nothing for after the end
    prompts = [tuple(prompt) for prompt, _ in server.asked]
    assert len(set(prompts)) == len(prompts)
    logged = [row["offpolicy/rollout/version_lag_mean"] for row in records(trainer)]
    assert logged == [min(step, lag) for step in range(5)]
    assert all(row["offpolicy/rollout/cross_version_fraction"] == 0.0 for row in records(trainer))


def test_half_a_lag_is_half_of_each_batch_a_generation_early(run: Any) -> None:
    """Two prompts a batch: 1.5 batches are three prompts, and no sample is older than a generation."""
    trainer, server = run(async_rollouts=0.5)

    assert lags(trainer) == [[0], [0, 1], [0, 1], [0, 1], [0, 1]]
    at = [version for _, version in sorted(server.asked, key=lambda one: server.submitted.index(one[0]))]
    assert at == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]  # in the order of the requests
    logged = [row["offpolicy/rollout/version_lag_mean"] for row in records(trainer)]
    assert logged == [0.0, 0.5, 0.5, 0.5, 0.5]
    assert all(row["offpolicy/rollout/cross_version_fraction"] == 0.0 for row in records(trainer))


def test_the_same_prompts_in_the_same_order_as_in_turn(run: Any) -> None:
    in_turn, ahead = (run(async_rollouts=lag)[1].submitted for lag in (0, 2))

    assert len(in_turn) == 10
    assert ahead == in_turn


def test_log_probs_at_todays_weights_are_not_called_old(run: Any) -> None:
    trainer, _ = run(async_rollouts={"lag": 2, "partial": "finish"})

    for step, row in enumerate(records(trainer)):
        assert ("offpolicy/mismatch/kl_k3" in row) == (step == 0)
        assert "offpolicy/staleness/kl_k3" not in row
        assert (row["offpolicy/total/kl_k3"] > 1e-6) == (step > 0)
        assert (row["offpolicy/weight/std"] > 1e-2) == (step > 0)  # proximal/sampling
    assert rollouts(trainer).query("step > 0").old_per_token_logps.map(lambda x: np.isnan(x).all()).all()


def test_snapshots_give_the_old_policy_to_the_last_digit(run: Any) -> None:
    trainer, _ = run(async_rollouts={"lag": 2, "partial": "continue", "old_logps": "snapshot"}, server={"free": 2})

    assert lags(trainer) == [[0], [0, 1], [1, 2], [1, 2], [1, 2]]
    for step, row in enumerate(records(trainer)):
        assert row["offpolicy/mismatch/logp_diff_max"] < 2e-5
        assert (row["offpolicy/staleness/kl_k3"] > 1e-6) == (step > 0)
        assert row["offpolicy/rollout/cross_version_fraction"] == float(step > 0)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_model_of_its_own_trains_as_exchanged_weights_do(
    run: Any, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions in each batch, each read by a second model, without an exchange in the first."""
    options: dict[str, Any] = {"learning_rate": 1.0} if adapter else {}
    options |= {"server": {"free": 2}, "gradient_checkpointing": True}
    if adapter:
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        made = OffPolicyGRPOTrainer.__init__
        monkeypatch.setattr(OffPolicyGRPOTrainer, "__init__", partialmethod(made, peft_config=lora))
    logged = {}
    for name in ("snapshot", "model"):
        if name == "model":
            monkeypatch.setattr(old_policy, "loaded", None)  # nothing is exchanged in the model that is trained
        torch.manual_seed(0)
        trainer, _ = run(**options, async_rollouts={"lag": 2, "partial": "continue", "old_logps": name})
        logged[name] = records(trainer), trained_weights(trainer)
    (rows, weights), (others, their_weights) = logged["snapshot"], logged["model"]
    for step, (one, other) in enumerate(zip(rows, others, strict=True)):
        assert one["offpolicy/rollout/cross_version_fraction"] == float(step > 0)
        assert (one["offpolicy/staleness/kl_k3"] > 1e-6) == (step > 0)
        for key in ("loss", "grad_norm", "offpolicy/staleness/kl_k3", "offpolicy/mismatch/kl_k3"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7), (step, key)
    for name, value in weights.items():
        torch.testing.assert_close(their_weights[name], value, atol=1e-6, rtol=0.0, msg=name)


def trained_weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}


def test_the_mixture_of_the_versions_is_nearer_than_an_old_version_alone(run: Any) -> None:
    """Two versions in each batch: the mismatch is the engine's own (none here), and pi / m is at most 1 / c pi / mu."""
    options = {"server": {"free": 2}, "offpolicy": "measure"}
    ahead = {"lag": 2, "partial": "continue"}
    rows = {
        name: records(run(**options, async_rollouts={**ahead, "old_logps": name})[0])
        for name in ("snapshot", "balance")
    }
    for step, (own, mixed) in enumerate(zip(rows["snapshot"], rows["balance"], strict=True)):
        assert mixed["offpolicy/mismatch/logp_diff_max"] < 2e-5
        same = mixed["offpolicy/staleness/kl_k3"] == pytest.approx(own["offpolicy/staleness/kl_k3"], rel=1e-3, abs=1e-7)
        assert same == (step == 0)
    # the first step is the same, so the second has the same weights: the mixture lies nearer to the policy that learns
    assert rows["balance"][1]["offpolicy/staleness/kl_k3"] < 0.9 * rows["snapshot"][1]["offpolicy/staleness/kl_k3"]


def test_a_cut_response_keeps_its_tokens_and_goes_on_under_the_new_weights(run: Any) -> None:
    trainer, _ = run(async_rollouts=2, server={"free": 2, "before_cut": 3})

    frame = rollouts(trainer)
    for row in frame.itertuples():
        versions = row.policy_versions.tolist()
        assert len(versions) == len(row.completion_ids) == 6
        assert row.policy_version == versions[0]
        assert versions == ([0] * 6 if row.step == 0 else [versions[0]] * 3 + [versions[0] + 1] * 3)
    assert (frame.step - frame.policy_version).max() == 2
    weights = np.stack(frame.query("step == 1").weights)
    assert np.abs(weights[:, 3:] - 1).max() < 1e-5 < 1e-3 < np.abs(weights[:, :3] - 1).max()


@pytest.mark.parametrize(
    "spec",
    [{"control": {"controllers": {"accept_update": {}}}}, {"offpolicy": "paper/mipu"}],
    ids=["option", "preset"],
)
def test_an_update_that_parts_engine_and_trainer_is_taken_back(
    run: Any, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    """Of the syncs, the third has three times the usual gap; the fourth sends the accepted weights again."""
    errors, held = [0.05, 0.05, 0.15, 0.05, 0.05, 0.05], list[torch.Tensor]()

    def score(server: FakeServer, ids: Any) -> list[list[float]]:
        found = []
        for row in ids:
            with torch.no_grad():
                logps = server._model(input_ids=torch.tensor([list(row)])).logits[0, :-1].log_softmax(-1)
            known = logps.gather(-1, torch.tensor(list(row)[1:])[:, None])[:, 0]
            found.append((known + errors[len(server.syncs) - 1]).tolist())
        return found

    sync_weights = FakeServer.sync_weights

    def kept(server: FakeServer, version: int) -> Any:
        report = sync_weights(server, version)
        held.append(torch.cat([value.flatten() for value in server._model.state_dict().values()]).clone())
        return report

    monkeypatch.setattr(FakeServer, "score", score)
    monkeypatch.setattr(FakeServer, "sync_weights", kept)
    engine = {"check_sync": True, "transfer": "folder"}
    trainer, server = run(async_rollouts=0, engine=engine, max_steps=5, **{"control": "warn", **spec})

    assert server.syncs == [0, 1, 2, 2, 3, 4]
    same = [torch.equal(one, other) for one, other in zip(held, held[2:], strict=False)]
    assert same == [False, True, False, False]  # what is sent in the place of version 2 is version 1
    (action,) = read_actions(Path(trainer.args.output_dir) / "actions.jsonl")
    assert (action.step, action.controller, action.what, action.after) == (2, "accept_update", "update", 0)
    assert [row["offpolicy/control/updates_rejected"] for row in records(trainer)][-1] == 1.0


def groups(trainer: Any) -> list[set[str]]:
    """The prompts of every generation batch that was learned from, in order."""
    return [set(part.prompt) for _, part in rollouts(trainer).groupby("step")]


def test_after_a_resume_nothing_is_skipped_or_learned_from_twice(run: Any, tmp_path: Any) -> None:
    folder = str(tmp_path / "whole")
    whole = groups(run(async_rollouts={"lag": 2, "partial": "finish"}, output_dir=folder)[0])
    parts = {"async_rollouts": {"lag": 2, "partial": "finish"}, "output_dir": str(tmp_path / "parts")}
    run(**parts, max_steps=2, save_strategy="steps", save_steps=2)
    trainer, server = run(**parts, resume=True)

    assert groups(trainer) == whole
    assert len(set().union(*whole)) == 10
    assert server.syncs == [2, 3, 4]
    assert lags(trainer) == [[0], [1], [0], [1], [2]]
    assert len(server.asked) == 3 * 2


def test_the_average_of_the_weights_goes_on_after_a_resume(run: Any, tmp_path: Any, caplog: Any) -> None:
    """Its first rows are clipped around the average and not around the weights of the checkpoint."""
    given = {"async_rollouts": {"lag": 1, "old_logps": "ewma", "ewma_decay": 0.9}, "output_dir": str(tmp_path)}
    before = run(**given, max_steps=2, save_strategy="steps", save_steps=2)[0]._ahead._old.average.state_dict()
    assert before["version"] == 1
    seen: list[Any] = []

    class First(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seen.append(resumed[0]._ahead._old.average.state_dict())

    resumed: list[Any] = []
    run(**given, resume=True, callback=First(), trainers=resumed)
    assert seen[0]["version"] == 1 and seen[0]["average"].keys() == before["average"].keys()
    assert all(torch.equal(seen[0]["average"][name], value) for name, value in before["average"].items())

    (tmp_path / "checkpoint-2" / AVERAGE_FILE).unlink()
    run(**given, resume=str(tmp_path / "checkpoint-2"))
    assert "the checkpoint has no average" in caplog.text


def test_a_resync_sends_everything_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the trainer has not changed: the engine's copy of that may be what is wrong."""
    trainer, _ = run(control={"controllers": ["resync"]}, async_rollouts=None, max_steps=2)
    told: list[bool] = []
    monkeypatch.setattr(trainer.vllm_generation, "confirm", told.append)
    (control,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, ControlCallback)]
    control.session._resync()
    assert told == [False] and trainer._last_loaded_step == -1


def test_over_several_epochs_each_has_every_prompt_once(run: Any) -> None:
    trainer, server = run(async_rollouts=1, max_steps=-1, num_train_epochs=2)

    epochs = [groups(trainer)[:16], groups(trainer)[16:]]
    assert all(len(set().union(*epoch)) == 32 and len(epoch) == 16 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert len(server.asked) == 2 * 32
    assert [lag for (lag,) in lags(trainer)] == [0, *[1] * 15] * 2  # the lookahead ends with the epoch


def test_an_epoch_that_a_callback_ends_leaves_nothing_behind(run: Any) -> None:
    """One generation of the first epoch; the second begins with rows of its own weights."""

    class Leave(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step in (1, 5)

    ahead = {"lag": 2, "partial": "finish"}
    trainer, _ = run(async_rollouts=ahead, callback=Leave(), max_steps=-1, num_train_epochs=2)

    assert lags(trainer) == [[0], [0], [1], [2], [2]]
    assert groups(trainer)[0] != groups(trainer)[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # two generations a step: both were asked for in the step before
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [[0], *[[1]] * 5]),
        # one generation for two steps, at lags 0 and 1, then 2 and 3
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, [[0], [1], [2], [3], [2], [3]]),
        # every row twice
        ({"gradient_accumulation_steps": 2, "num_iterations": 2}, [[0], [], [2], [], [2], []]),
    ],
)
def test_generations_and_optimizer_steps_of_different_length(
    run: Any, options: dict[str, int], expected: list[list[int]]
) -> None:
    trainer, server = run(async_rollouts=1, max_steps=6, **options)

    frame = rollouts(trainer)
    seen: dict[int, set[int]] = {step: set() for step in range(6)}
    for row in frame.itertuples():
        seen[row.step] |= {int(row.step - version) for version in row.policy_versions}
    assert [sorted(seen[step]) for step in range(6)] == expected
    assert len({tuple(ids) for ids, _ in server.asked}) == len(server.asked)
    assert len(set(frame.prompt)) * 4 == len(frame)


@pytest.mark.parametrize(
    "spec", [{"async_rollouts": 0}, {"offpolicy": "paper/periodic-async"}], ids=["option", "preset"]
)
def test_periodic_asynchrony_asks_for_a_whole_step_and_is_never_stale(
    run: Any, monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]
) -> None:
    """Four generations a step, lag 0: the later ones are sampled while the trainer learns from the first."""
    in_step: dict[str, Any] = {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "max_steps": 3}
    in_step |= {} if "offpolicy" in spec else {"loss_type": "grpo"}  # the preset has that denominator
    counts, submitted, submit = list[int](), list[Any](), Flight.submit

    def submitting(self: Flight, prompt: Any, *rest: Any) -> Any:
        submitted.append(prompt)
        return submit(self, prompt, *rest)

    class Count(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            counts.append(len(submitted))

    whole, _ = run(async_rollouts=None, **{**in_step, "loss_type": "grpo"})
    monkeypatch.setattr(Flight, "submit", submitting)
    trainer, server = run(callback=Count(), **in_step, **spec)

    prompts = len(submitted) // 3  # of a step
    assert counts == [prompts] * 3 + [2 * prompts] * 3 + [3 * prompts] * 3  # all of a step before its first loss
    assert server.syncs == [0, 1, 2]
    assert lags(trainer) == [[0]] * 3
    assert all(row["offpolicy/mismatch/logp_diff_max"] < 2e-5 for row in records(trainer))
    for one, other in zip(records(whole), records(trainer), strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name


def test_several_steps_on_a_stale_batch_have_a_proximal_policy_and_no_old_one(run: Any) -> None:
    trainer, _ = run(async_rollouts=1, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=6)

    for step, row in enumerate(records(trainer)):
        assert "offpolicy/staleness/kl_k3" not in row
        assert ("offpolicy/mismatch/kl_k3" in row) == (step == 0)
        assert (row["clip_ratio/region_mean"] > 0) == (step % 2 == 1)  # pi has left the proximal policy


def test_evaluation_samples_in_turn(run: Any) -> None:
    trainer, server = run(async_rollouts={"lag": 2, "partial": "finish"}, eval_strategy="steps", eval_steps=2)

    assert lags(trainer) == [[min(step, 2)] for step in range(5)]
    assert server.syncs == [0, 1, 2, 3, 4, 5]  # that of an evaluation serves the next generation too
    assert len(server.asked) == 10


@pytest.mark.parametrize("old_logps", ["ewma", "recompute_proximal"])
def test_the_average_is_the_centre(run: Any, old_logps: str) -> None:
    trainer, _ = run(async_rollouts={"lag": 1, "old_logps": old_logps, "ewma_decay": 0.5})

    for step, row in enumerate(records(trainer)):
        assert (row["clip_ratio/region_mean"] > 0) == (old_logps == "ewma" and step > 0)
        assert ("offpolicy/mismatch/kl_k3" in row) == (step == 0)


@pytest.mark.parametrize("proximal", ["interpolated", {"type": "averaged", "decay": 0.5}])
def test_other_centres_need_no_old_policy_either(run: Any, proximal: Any) -> None:
    objective = {"preset": "paper/tis", "objective": {"proximal": proximal}}
    trainer, _ = run(async_rollouts=1, offpolicy=objective, steps_per_generation=4, max_steps=4)

    for row in records(trainer)[2:]:
        assert np.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert "offpolicy/mismatch/kl_k3" not in row
        assert row["offpolicy/weight/std"] > 1e-4


def test_a_staleness_bound_drops_what_is_too_old(run: Any) -> None:
    bound = {"preset": "paper/tis", "correction": {"keep": [{"type": "staleness_bound", "max_lag": 1}]}}
    trainer, _ = run(async_rollouts={"lag": 2, "partial": "finish"}, offpolicy=bound)

    dropped = [row["offpolicy/keep/staleness_bound/dropped_fraction"] for row in records(trainer)]
    assert dropped == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_what_needs_the_whole_generation_batch_reads_the_proximal_policy(run: Any) -> None:
    wide = {"preset": "paper/tis", "correction": {"normalize": "original"}}
    trainer, _ = run(async_rollouts=1, offpolicy=wide)

    for step, row in enumerate(records(trainer)):
        assert ("offpolicy/mismatch/kl_k3" in row) == (step == 0)
        assert "offpolicy/staleness/kl_k3" not in row
        assert (row["offpolicy/weight/std"] > 1e-2) == (step > 0)
        assert row["offpolicy/weight_applied/mean"] == pytest.approx(1.0, abs=1e-5)


def test_with_copies_of_the_weights_a_wide_scope_clips_around_the_old_policy_as_well(run: Any) -> None:
    options = {"async_rollouts": {"lag": 1, "old_logps": "snapshot"}, "max_steps": 4}
    all_kept = {"type": "ratio_band", "level": "group", "low": 1e-8, "high": 1e8}
    by_row = records(run(**options, offpolicy="paper/tis")[0])  # the next run has the same folder
    trainer, _ = run(**options, offpolicy={"preset": "paper/tis", "correction": {"keep": [all_kept]}})

    assert trainer.objective.scope == "group"
    for step, (one, other) in enumerate(zip(by_row, records(trainer), strict=True)):
        assert (one["clip_ratio/region_mean"] > 0) == (step > 0)  # one step off: pi has left pi_old
        for name in ("loss", "grad_norm", "clip_ratio/region_mean", "offpolicy/staleness/kl_k3"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (step, name)


class Breaks(TrainerCallback):
    """Makes a weight NaN after the checkpoint of step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                next(iter(model.parameters())).fill_(float("nan"))


def test_a_run_whose_weights_break_keeps_its_last_good_checkpoint(run: Any, tmp_path: Path) -> None:
    """With one checkpoint kept, one of the broken weights would have taken its place."""
    kept = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "output_dir": str(tmp_path)}
    said = r"weights after step 3 are not finite, and are not saved. Go on from checkpoint-2"
    with pytest.raises(EngineError, match=said):
        run(async_rollouts=None, callback=Breaks(), **kept)
    assert [one.name for one in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
