"""A replay buffer under Lightning: the rows, draws, weights and numbers of TRL's trainer; refusals; a resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from both_trainers import PROMPTS, WatchTRL, assert_same_numbers, distance
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import OwnMismatch, Played, Watch, data, module, trainer
from tiny_models import EOS, FIRST_WORD, score_last_word
from trainer_runs import GENERATIONS, TIMES, Engine, records

from lightning_module import RunFolder
from lightning_module.replay import ModuleReplay, own_folder
from trl_offpolicy.rollouts.replay import ReplayBuffer, ReplayGroup, Response
from trl_offpolicy.rollouts.replay.settings import ReplaySettings

STEPS, RATE = 4, 0.02
REPLAY = {"groups": 2, "max_rows": 1000}
HALVES = {"steps_per_generation": 2}  # two micro-batches a generation, one optimizer step


WIDE = {"preset": "paper/tis", "correction": {"normalize": "original"}}
"""Weights that average to 1 over the whole generation batch, the replayed rows among them."""


def fit(
    folder: Path, engine: Any, replay: Any, *, steps: int = STEPS, correction: Any = "paper/tis", **flags: Any
) -> tuple[Watch, Any]:
    watch, resume = Watch(), flags.pop("resume", None)
    callbacks = [watch, RunFolder(str(folder), report=False), *flags.pop("callbacks", [])]
    owner = trainer(folder, callbacks=callbacks, max_steps=steps, accumulate_grad_batches=2, **flags)
    ours = module(engine, correction=correction, optimizer=partial(torch.optim.SGD, lr=RATE), replay=replay)
    owner.fit(ours, data(PROMPTS, **HALVES), ckpt_path=resume, weights_only=True if resume else None)
    return watch, ours


def assert_one_prompt_each(frame: pd.DataFrame) -> None:
    """No two prompt groups of a run have the same number; a replayed group keeps its own at every draw."""
    for number, rows in frame.groupby("group_id"):
        assert rows.prompt_ids.map(tuple).nunique() == 1
        assert rows.groupby("step").size().eq(GENERATIONS).all()
        assert number < 0 or (rows.policy_version == rows.step).all()
        assert rows.completion_ids.map(tuple).nunique() <= GENERATIONS


class Same(OwnMismatch):
    """Completions that depend on prompt and version alone, so that a resumed run samples what the whole one did."""

    def generate(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.words.random.manual_seed(sum(map(sum, prompt_ids)) + 1000 * (self.version or 0))
        return super().generate(prompt_ids, *args, **kwargs)


@pytest.mark.integration
@pytest.mark.parametrize(("max_lag", "correction"), [(None, "paper/tis"), (1, "paper/tis"), (None, WIDE)])
def test_weights_and_numbers_are_those_of_trl(
    max_lag: int | None,
    correction: Any,
    make_args: Any,
    fresh_model: Callable[..., Any],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    from trl_offpolicy.trl.replay import ReplayGRPOTrainer

    engine, calls = Engine(shift=0.2, noise=0.3), []

    def rollouts(prompts: list[str], owner: Any) -> dict[str, Any]:
        calls.append(engine(prompts, owner))
        return calls[-1]

    args = make_args(
        optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_steps=STEPS, max_grad_norm=1e9,
        shuffle_dataset=False, offpolicy=correction,
    )  # fmt: skip
    with ReplayBuffer(tmp_path / "theirs", max_rows=1000) as buffer:
        theirs = ReplayGRPOTrainer(
            fresh_model(), score_last_word, args, train_dataset=PROMPTS, processing_class=tokenizer,
            rollout_func=rollouts, replay=buffer, replay_groups=2, max_lag=max_lag,
        )  # fmt: skip
        watch = WatchTRL(theirs.model)
        theirs.add_callback(watch)
        theirs.train()
    seen, _ = fit(tmp_path / "ours", Played(calls), {**REPLAY, "max_lag": max_lag}, correction=correction)

    rows = records(theirs)
    assert len(seen.logs) == len(rows) == STEPS
    lags = [row["offpolicy/rollout/version_lag_max"] for row in rows]
    assert lags == [0, 1, 1, 1] if max_lag else max(lags) > 1
    for step in range(STEPS):
        assert distance(seen.weights[step], watch.weights[step]) < 1e-5
        assert_same_numbers(seen.logs[step], rows[step])


@pytest.mark.integration
def test_a_generation_has_its_fresh_rows_and_drawn_ones(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", max_rows=1000) as buffer:
        fit(tmp_path, OwnMismatch(noise=0.1), {"groups": 2, "buffer": buffer})

    frame = pd.read_parquet(tmp_path / "rollouts.parquet")
    for step, rows in frame.groupby("step"):
        assert (rows.policy_version == step).sum() == 8
        assert (rows.policy_version < step).sum() == (8 if step else 0)
        assert rows.group_id.nunique() == (4 if step else 2)
    assert_one_prompt_each(frame)
    assert len(buffer) == 2 * STEPS  # the user's own stays open


@pytest.mark.integration
@pytest.mark.parametrize("in_checkpoint", [True, False])
def test_a_resumed_run_draws_what_the_whole_one_drew(in_checkpoint: bool, tmp_path: Path) -> None:
    """Groups that came later go, and groups that made room for them come back; without the files it is another run."""
    replay = {"groups": 2, "max_rows": 24, "folder": str(tmp_path / "buffer"), "in_checkpoint": in_checkpoint}
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    saving = {"callbacks": [saver], "enable_checkpointing": True}
    whole, _ = fit(tmp_path / "whole", Same(noise=0.2), replay, steps=7, **saving)
    rest, _ = fit(tmp_path / "rest", Same(noise=0.2), replay, steps=7, resume=tmp_path / "saved" / "step=4.ckpt")

    assert_one_prompt_each(pd.read_parquet(tmp_path / "rest" / "rollouts.parquet"))
    same = [torch.equal(value, rest.weights[-1][name]) for name, value in whole.weights[-1].items()]
    assert all(same) == in_checkpoint
    if in_checkpoint:
        keys = [key for key in whole.logs[-1] if key not in {*TIMES, "offpolicy/rollout/sync_seconds"}]
        assert {key: rest.logs[-1][key] for key in keys} == pytest.approx(
            {key: whole.logs[-1][key] for key in keys}, abs=1e-12, nan_ok=True
        )


@pytest.mark.integration
def test_replayed_rows_are_scored_by_the_reference(tmp_path: Path) -> None:
    ours = module(
        OwnMismatch(noise=0.1), correction="paper/tis", objective={"kl": {"coef": 0.1}}, replay=REPLAY,
        optimizer=partial(torch.optim.SGD, lr=RATE),
    )  # fmt: skip
    seen: list[dict[str, Any]] = []
    mixed = ours.replay.mixed
    ours.replay.mixed = lambda rows, *rest, **named: seen.append(mixed(rows, *rest, **named)) or {**seen[-1]}
    trainer(tmp_path, max_steps=3, accumulate_grad_batches=2).fit(ours, data(PROMPTS, **HALVES))
    assert [len(rows["ref_per_token_logps"]) for rows in seen] == [8, 16, 16]
    for rows in seen:
        again, mask = ours.generation._score_reference(rows, 3), rows["completion_mask"].bool()
        torch.testing.assert_close(rows["ref_per_token_logps"][mask], again[mask], rtol=1e-4, atol=2e-5)
        assert float(again[mask].abs().min()) > 0


KEPT = {"preset": "paper/geometric-mask", "correction": {"baseline": "kept"}}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"replay": {"groups": 0, "max_rows": 9}}, ValueError, r"^replay.groups must be .* but got 0"),
        ({"replay": {"groups": 1}}, ValueError, r"^replay.max_rows or replay.max_bytes must be given"),
        ({"replay": {"max_rows": 9}}, ValueError, r"^replay.groups must be given"),
        ({"replay": {"groups": 1, "rows": 9}}, ValueError, r"^replay.rows is not an option of replay"),
        ({"replay": 3}, ValueError, r"^replay must be a mapping with 'groups' and a buffer, but got 3"),
        (
            {"objective": {"kl": {"coef": 0.1, "estimator": "k1", "place": "reward"}}},
            NotImplementedError,
            "^replay does not work with a KL term in the reward",
        ),
        ({"routing_replay": "r3"}, NotImplementedError, "^replay does not work with routing_replay"),
        ({"correction": KEPT}, NotImplementedError, "^replay does not work with baseline 'kept'"),
        ({"advantages": "rloo"}, NotImplementedError, "^replay does not work with other advantages than grpo"),
        ({"engine": "transformers", "correction": "measure"}, NotImplementedError, "an engine without log-probs"),
        (
            {"engine": {"type": "server", "base_url": "http://127.0.0.1:1"}, "async_rollouts": 1},
            NotImplementedError,
            "^replay does not work with async_rollouts",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"engine": OwnMismatch(), "correction": "paper/tis", "replay": REPLAY, **options}
    with pytest.raises(error, match=message):
        module(given.pop("engine"), **given)


@pytest.mark.parametrize(
    ("sizes", "accumulation", "replay", "message"),
    [
        ({"steps_per_generation": 2}, 1, {}, r"^accumulate_grad_batches must be a multiple .* but got 1 and 2 \* 1"),
        ({"num_iterations": 2}, 1, {}, r"^accumulate_grad_batches must be a multiple .* but got 1 and 1 \* 2"),
        (
            {"steps_per_generation": 3},
            3,
            {},
            r"^replay.groups \* num_generations must be a multiple of .* 3, but got 2 \* 4",
        ),
        # smaller than a generation batch, and than what must be there for a draw
        (HALVES, 2, {"max_rows": 7}, r"^replay\.max_rows must be at least 8, .* but got 7"),
        (HALVES, 2, {"max_rows": 15, "groups": 3}, r"^replay\.max_rows must be at least 16, .* 3 groups .* but got 15"),
        ({}, 2, {"max_rows": 7}, r"^replay\.max_rows must be at least 8, .* but got 7"),  # 2 micro-batches by default
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_a_model_is_loaded(
    sizes: dict[str, Any], accumulation: int, replay: dict[str, int], message: str, tmp_path: Path
) -> None:
    engine = OwnMismatch()
    ours = module(engine, correction="paper/tis", replay={**REPLAY, **replay})
    owner = trainer(tmp_path, max_steps=1, accumulate_grad_batches=accumulation)
    with pytest.raises(ValueError, match=message):
        owner.fit(ours, data(PROMPTS, **sizes))
    assert ours.policy is None and ours.generation.engine is None and not engine.calls
    assert not (tmp_path / "replay").exists()


def test_a_given_buffer_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path / "buffer", max_rows=7) as buffer:
        ours = module(OwnMismatch(), correction="paper/tis", replay={"groups": 2, "buffer": buffer})
        owner = trainer(tmp_path, max_steps=1, accumulate_grad_batches=2)
        with pytest.raises(ValueError, match=r"^replay\.buffer\.max_rows must be at least 8, .* but got 7"):
            owner.fit(ours, data(PROMPTS, **HALVES))


def test_the_settings_are_hyperparameters_of_a_mapping() -> None:
    assert module(OwnMismatch(), correction="paper/tis", replay=REPLAY).hparams["replay"] == REPLAY


@pytest.mark.integration
def test_a_checkpoint_after_the_run_holds_the_buffer(tmp_path: Path) -> None:
    _, ours = fit(tmp_path, Same(noise=0.2), REPLAY, steps=2)
    ours.trainer.save_checkpoint(tmp_path / "end.ckpt")
    kept = torch.load(tmp_path / "end.ckpt", weights_only=True)["offpolicy"]["replay"]["buffer"]
    assert len(kept) == len(list((tmp_path / "replay").glob("part-*.parquet"))) == 2


def test_a_checkpoint_of_an_empty_buffer_leaves_it_empty(tmp_path: Path) -> None:
    """Groups from after such a checkpoint go; without the files in checkpoints the buffer stays as it is."""
    response = Response(completion_ids=(5,), sampling_logps=(-0.1,), policy_versions=(0,), reward=1.0)
    for name, saves, loads, left in (("a", True, True, 0), ("b", True, False, 1), ("c", False, True, 1)):
        with ReplayBuffer(tmp_path / name, max_rows=9) as buffer:
            saving, loading = (
                ModuleReplay(SimpleNamespace(), ReplaySettings(groups=1, buffer=buffer, in_checkpoint=one))  # type: ignore[arg-type]
                for one in (saves, loads)
            )
            state = saving.state_dict()
            buffer.add([ReplayGroup(prompt_ids=(1,), responses=(response,), group_id=0)])
            loading.load_state_dict(state)
            assert len(buffer) == left


@pytest.mark.integration
def test_groups_of_another_size_are_left_out_and_said_once(tmp_path: Path) -> None:
    response = Response(completion_ids=(5,), sampling_logps=(-0.1,), policy_versions=(0,), reward=1.0)
    with ReplayBuffer(tmp_path / "buffer", max_rows=1000) as buffer:
        buffer.add([ReplayGroup(prompt_ids=(1, 2), responses=(response,) * 2, group_id=one) for one in range(6)])
        with pytest.warns(UserWarning, match="they have 2 responses, and num_generations is 4") as said:
            fit(tmp_path, OwnMismatch(noise=0.1), {"groups": 2, "buffer": buffer})

    assert sum("are not replayed" in str(warning.message) for warning in said) == 1
    frame = pd.read_parquet(tmp_path / "rollouts.parquet")
    assert frame.groupby("step").size().tolist() == [8, 16, 16, 16]
    assert_one_prompt_each(frame)


@pytest.mark.integration
def test_a_new_run_does_not_draw_from_an_earlier_one(tmp_path: Path) -> None:
    for _ in range(2):
        fit(tmp_path, Same(noise=0.2), REPLAY, steps=2)
    assert own_folder(tmp_path, resumed=False).name == "replay-3"
    assert own_folder(tmp_path, resumed=True).name == "replay-2"
    assert all(len(list((tmp_path / name).glob("part-*.parquet"))) == 2 for name in ("replay", "replay-2"))


@pytest.mark.integration
def test_groups_with_a_cut_completion_are_not_stored(tmp_path: Path) -> None:
    class SomeCut(Same):
        """Every second prompt has completions that end; the others are cut."""

        def generate(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            rollouts = super().generate(prompt_ids, *args, **kwargs)
            for i, ids in enumerate(rollouts.completion_ids):
                ids[-1] = EOS if i // GENERATIONS % 2 == 0 else FIRST_WORD
            return rollouts

    owner = trainer(tmp_path, max_steps=1, accumulate_grad_batches=2)
    ours = module(SomeCut(noise=0.2), correction="paper/tis", replay=REPLAY, mask_truncated_completions=True)
    owner.fit(ours, data(PROMPTS, **HALVES))
    with ReplayBuffer(tmp_path / "replay", max_rows=1000) as buffer:
        assert len(buffer) == 1 and buffer.rows == GENERATIONS
