"""The module under a real Trainer: when rollouts are made, what flags do, what is logged."""

from __future__ import annotations

import csv
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning_runs import OwnMismatch, Watch, data, module, trainer
from tiny_models import EOS, tiny_prompts

from lightning_module import OffPolicyProgressBar, RunFolder
from trl_offpolicy.run_folder.syncs import read_syncs, repeated_syncs

pytestmark = pytest.mark.integration  # trains


def fit(folder: Path, ours: Any, prompts: Any = None, *, sizes: Any = None, **flags: Any) -> Watch:
    watch = Watch()
    flags = {"max_steps": 2, **flags}
    callbacks = [watch, *flags.pop("callbacks", [])]
    trainer(folder, callbacks=callbacks, **flags).fit(ours, prompts or data(**(sizes or {})))
    return watch


# ---------------------------------------------------------------------------------------------- the moment of rollouts


def test_one_generation_feeds_its_slots_in_every_iteration(tmp_path: Path) -> None:
    engine = OwnMismatch()
    sizes = {"steps_per_generation": 2, "num_iterations": 2}
    watch = fit(tmp_path, module(engine), sizes=sizes, max_steps=8)
    assert watch.generations == [(0, 0)] * 4 + [(0, 1)] * 4
    assert engine.synced == [0, 4]  # only where it samples
    assert len(engine.prompts[0]) == 8 and len({tuple(ids) for ids in engine.prompts[0]}) == 2  # whole groups


def test_staleness_appears_with_the_second_optimizer_step_on_a_batch(tmp_path: Path) -> None:
    watch = fit(tmp_path, module(OwnMismatch()), sizes={"num_iterations": 2}, max_steps=2)
    first, second = (logs["offpolicy/staleness/kl_k3"] for logs in watch.logs)
    assert first == pytest.approx(0.0, abs=1e-9) and second > 1e-6
    assert [logs["offpolicy/mismatch/logp_diff_max"] for logs in watch.logs] == pytest.approx([0.0] * 2, abs=1e-5)


def test_the_engine_gets_the_weights_of_the_step_it_samples_for(tmp_path: Path) -> None:
    """The engine scores with the trainer's weights as they are then: any other moment would show as mismatch."""
    engine = OwnMismatch()
    watch = fit(tmp_path, module(engine, learning_rate=0.05), max_steps=4)
    assert engine.synced == [0, 1, 2, 3]
    assert all(logs["offpolicy/mismatch/logp_diff_max"] < 1e-5 for logs in watch.logs)


def test_a_shift_of_the_engine_is_measured_with_its_sign_and_corrected(tmp_path: Path) -> None:
    watch = fit(tmp_path, module(OwnMismatch(shift=0.5), correction="paper/tis"), max_steps=1)
    assert watch.logs[0]["offpolicy/mismatch/kl_k1"] == pytest.approx(0.5, abs=1e-5)
    assert watch.logs[0]["offpolicy/weight/mean"] == pytest.approx(2.718281828**-0.5, abs=1e-5)


def test_learning_raises_the_reward(tmp_path: Path) -> None:
    """With the sign of the gradient flipped the share of early ends would fall instead."""

    def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-float(len(ids)) for ids in completion_ids]

    ours = module(reward_funcs=short, learning_rate=0.01, sampling={"max_tokens": 16})
    torch.manual_seed(0)
    watch = fit(tmp_path, ours, sizes={"micro_batch_size": 32, "num_generations": 16}, max_steps=15)
    rewards = [logs["reward"] for logs in watch.logs]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 2


# ------------------------------------------------------------------------------------------------------- trainer flags


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    whole = fit(tmp_path / "a", module(OwnMismatch(noise=0.3)), sizes={"micro_batch_size": 8}, max_steps=1)
    parts = fit(tmp_path / "b", module(OwnMismatch(noise=0.3)), accumulate_grad_batches=2, max_steps=1)
    assert len(parts.losses) == 2
    assert close(whole.gradients[0], parts.gradients[0], 1e-6)
    assert whole.logs[0]["loss"] == pytest.approx(parts.logs[0]["loss"], abs=1e-6)


def test_an_accumulation_window_that_the_epoch_cuts_is_still_a_mean(tmp_path: Path) -> None:
    """Three batches with accumulation 2: the last window has one batch, which must not count half."""
    alone = fit(tmp_path / "a", module(OwnMismatch(noise=0.3), learning_rate=0.0), max_steps=3)
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 3, "max_epochs": 1, "max_steps": -1}
    cut = fit(
        tmp_path / "b", module(OwnMismatch(noise=0.3), learning_rate=0.0), sizes={"steps_per_generation": 1}, **options
    )
    assert len(cut.gradients) == 2
    assert close(alone.gradients[2], cut.gradients[1], 1e-6)


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], limit: float) -> bool:
    largest = max(float(value.abs().max()) for value in one.values())
    assert largest > 1e-3
    return all(float((one[name] - other[name]).abs().max()) < limit * (1 + largest) for name in one)


def test_clipping_limits_the_update(tmp_path: Path) -> None:
    ours = module(OwnMismatch(), optimizer=partial(torch.optim.SGD, lr=1.0))
    before = {name: p.detach().clone() for name, p in ours.settings["model"].named_parameters()}
    watch = fit(tmp_path, ours, gradient_clip_val=0.01, max_steps=1)
    update = torch.stack([(watch.weights[0][name] - value).norm() for name, value in before.items()]).norm()
    assert float(update) == pytest.approx(0.01, rel=1e-3)
    assert watch.logs[0]["grad_norm"] > 0.1  # logged before clipping, as TRL does


def test_bfloat16_reaches_the_loss_and_not_the_engine(tmp_path: Path) -> None:
    engine = OwnMismatch()
    watch = fit(tmp_path, module(engine), precision="bf16-mixed", max_steps=2)
    assert 1e-4 < watch.logs[0]["offpolicy/mismatch/logp_diff_max"] < 1.0  # the engine stayed in float32
    own = fit(tmp_path, module(), precision="bf16-mixed", max_steps=2)
    assert all(torch.isfinite(torch.tensor([logs["loss"] for logs in own.logs])))


def test_overfitting_repeats_the_prompts_and_samples_anew(tmp_path: Path) -> None:
    engine = OwnMismatch()
    prompts = data(shuffle=True, seed=5)
    watch = fit(tmp_path, module(engine), prompts, overfit_batches=2, max_epochs=3, max_steps=-1)
    assert len(watch.losses) == 6
    assert engine.prompts[0] == engine.prompts[2] == engine.prompts[4] != engine.prompts[1]
    assert engine.calls[0]["completion_ids"] != engine.calls[2]["completion_ids"]


def test_limits_and_fast_dev_run(tmp_path: Path) -> None:
    engine = OwnMismatch()
    sizes = {"steps_per_generation": 2}
    watch = fit(tmp_path, module(engine), sizes=sizes, limit_train_batches=3, max_epochs=2, max_steps=-1)
    assert watch.generations == [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1)]
    trainer(tmp_path / "dev", fast_dev_run=True).fit(module(OwnMismatch()), data(val_dataset=tiny_prompts(2)))
    assert not list((tmp_path / "dev").rglob("*.jsonl"))


# ------------------------------------------------------------------------------------------------------------- logging


def test_loggers_and_run_folder_receive_the_same_numbers(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="board")]
    ours = module(OwnMismatch(noise=0.2), correction="paper/tis")
    watch = fit(tmp_path, ours, logger=loggers, callbacks=[RunFolder(str(tmp_path / "run"))], max_steps=3)
    with next((tmp_path / "csv").rglob("metrics.csv")).open() as file:
        table = list(csv.DictReader(file))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(table) == len(rows) == len(watch.logs) == 3
    for logged, row, logs in zip(table, rows, watch.logs, strict=True):
        assert set(logs) <= set(logged) and set(logs) <= set(row)
        for key in ("loss", "reward", "offpolicy/mismatch/kl_k3", "offpolicy/weight_applied/ess_token"):
            assert float(logged[key]) == pytest.approx(logs[key], rel=1e-5) and row[key] == logs[key]
    assert list((tmp_path / "board").rglob("events.out.tfevents.*"))
    hparams = (tmp_path / "csv" / "version_0" / "hparams.yaml").read_text()
    assert "correction: paper/tis" in hparams


def test_the_parts_of_a_step_add_up_to_its_time(tmp_path: Path) -> None:
    """Generation and rewards are made slow; a validation in between is left out."""

    class Slow(OwnMismatch):
        def generate(self, *args: Any, **options: Any) -> Any:
            time.sleep(0.2)
            return super().generate(*args, **options)

    def slow_reward(completions: list[str], **_: Any) -> list[float]:
        time.sleep(0.1)
        return [float(len(text)) for text in completions]

    ours = module(Slow(), reward_funcs=slow_reward)
    sizes = {"num_iterations": 2, "val_dataset": tiny_prompts(6), "val_batch_size": 1}  # six slow validation batches
    watch = fit(tmp_path, ours, sizes=sizes, max_steps=4, val_check_interval=2)
    for logs in watch.logs:
        assert sum(value for key, value in logs.items() if "/time/" in key) == pytest.approx(logs["step_time"])
    sampled, again, after_validation, _ = watch.logs
    assert sampled["offpolicy/time/generation"] > 0.2 and sampled["offpolicy/time/rewards"] > 0.1
    assert again["offpolicy/time/generation"] < 0.2 and again["offpolicy/time/rewards"] < 0.1  # the same generation
    assert after_validation["step_time"] < 6 * 0.3


def test_the_run_folder_lists_every_sync_with_a_checksum(tmp_path: Path) -> None:
    fit(tmp_path, module(OwnMismatch()), callbacks=[RunFolder(str(tmp_path), report=False)], max_steps=3)
    syncs = read_syncs(tmp_path)
    assert [sync.version for sync in syncs] == [0, 1, 2]
    changed = [sync.changed for sync in syncs]
    assert changed[0] is None and all(share is not None and 0.5 < share <= 1.0 for share in changed[1:])
    assert len({sync.checksum for sync in syncs}) == 3 and repeated_syncs(syncs) == ()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("offpolicy/rollout/sync_changed_fraction") for row in rows] == changed


@pytest.mark.parametrize("sanity", [-1, 1])
def test_a_whole_sanity_check_is_the_evaluation_before_training(tmp_path: Path, sanity: int) -> None:
    folder, sizes = RunFolder(str(tmp_path), report=False), {"val_dataset": tiny_prompts(3), "val_batch_size": 1}
    ours = module(OwnMismatch(), learning_rate=0.1)
    fit(tmp_path, ours, sizes=sizes, callbacks=[folder], max_steps=2, num_sanity_val_steps=sanity, val_check_interval=2)
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["before"]["step"] == (0 if sanity == -1 else 2)
    assert (found["after"] or found["before"])["step"] == 2
    if sanity == -1:  # on the same draws, by other weights
        assert found["before"]["eval_reward"] != found["after"]["eval_reward"]


def test_the_run_folder_holds_what_the_trl_side_writes(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    sizes = {"num_iterations": 2, "val_dataset": tiny_prompts(3)}
    watch = fit(tmp_path, module(OwnMismatch(noise=0.2)), sizes=sizes, callbacks=[folder], max_steps=4)
    table = pd.read_parquet(tmp_path / "rollouts.parquet")
    assert len(table) == 8 and sorted(set(table["step"])) == [0, 2]  # once each, on the first pass
    assert list(table.groupby("group_id").size()) == [4, 4]
    first = table.iloc[0]
    assert len(first["completion_ids"]) == len(first["sampling_per_token_logps"]) == len(first["weights"])
    assert (tmp_path / "report.html").stat().st_size > 10_000
    info = json.loads((tmp_path / "run.json").read_text())
    assert info["preset"] == "paper/tis" and "TruncateWeight" in info["correction"] and "lightning" in info["trainer"]
    settings = info["settings"]
    assert (settings["framework"], settings["num_iterations"], settings["dtype"]) == ("lightning", 2, "float32")
    assert settings["gradient_accumulation_steps"] == 1 and settings["temperature"] == 1.0
    prompts = table["prompt_ids"].map(len)
    assert (prompts > 0).all() and len(set(map(tuple, table["prompt_ids"]))) == 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    assert len(watch.logs) == 4


def test_run_json_names_the_settings_that_change_the_sampling_policy(tmp_path: Path) -> None:
    sampling = {"max_tokens": 6, "extra": {"min_tokens": 2}}
    ours = module(OwnMismatch(noise=0.2), sampling=sampling)
    fit(tmp_path, ours, callbacks=[RunFolder(str(tmp_path), report=False)], max_steps=1)
    info = json.loads((tmp_path / "run.json").read_text())
    (found,) = info["sampling_states"]
    assert (found["severity"], found["setting"]) == ("warn", "min_tokens=2") and "1 - p(end)" in found["reason"]
    assert info["declared"]["engine"]["tools"] is False


def test_validation_reports_reward_and_pass_at_1_over_counted_prompts(tmp_path: Path) -> None:
    def by_prompt(prompts: list[str], **_: Any) -> list[float]:
        return [float(prompt.startswith("w0")) for prompt in prompts]

    ours = module(reward_funcs=by_prompt, correct_threshold=1.0, learning_rate=0.0)
    held_out = data(val_dataset=tiny_prompts(5), val_batch_size=2, val_generations=3)
    values = trainer(tmp_path).validate(ours, held_out, verbose=False)[0]
    assert values["eval_reward"] == pytest.approx(0.2) and values["eval_pass@1"] == pytest.approx(0.2)
    assert 1 <= values["eval_completions/mean_length"] <= 6


def test_the_progress_bar_shows_what_matters(tmp_path: Path) -> None:
    ours = module(OwnMismatch(noise=0.2), correction="paper/tis")
    bar = OffPolicyProgressBar()
    fit(tmp_path, ours, max_steps=1)
    shown = bar.get_metrics(ours.trainer, ours)
    assert {"reward", "KL", "ESS"} <= set(shown)
    assert float(str(shown["ESS"])) == pytest.approx(ours.step_logs["offpolicy/weight_applied/ess_token"], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "description", "total"),
    [({"max_steps": 1}, "Epoch 0", 2), ({"max_epochs": 1, "limit_train_batches": 4}, "Epoch 0/0", 4)],
)
def test_the_progress_bar_counts_to_its_end(
    tmp_path: Path, options: dict[str, Any], description: str, total: int
) -> None:
    """Lightning's own counts two micro-batches of one optimizer step to "2/1", in epoch "0/-2"."""
    seen = []

    class Look(Watch):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *rest)
            bar = next(one for one in trainer.callbacks if isinstance(one, OffPolicyProgressBar))
            seen.extend((task.description.removeprefix("[]").strip(), task.completed, task.total)
                        for task in bar.progress.tasks if "Epoch" in task.description)  # fmt: skip

    run = trainer(
        tmp_path, accumulate_grad_batches=2, enable_progress_bar=True, callbacks=[OffPolicyProgressBar(), Look()],
        **options,
    )  # fmt: skip
    run.fit(module(), data())
    assert {one[0] for one in seen} == {description} and {one[2] for one in seen} == {total}
    assert seen[-1][1] <= total


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_correction_without_a_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="correction must not read the sampling policy when engine is 'transformers'"):
        module(correction="paper/tis")
    with pytest.raises(ValueError, match=r"engine\.type must be one of"):
        module("vlm")


def test_log_probs_that_are_not_finite_stop_the_run(tmp_path: Path) -> None:
    class Broken(Watch):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 1:  # the second step on a generation batch: nothing is sampled with NaN weights
                with torch.no_grad():
                    next(pl_module.policy.parameters()).fill_(torch.nan)

    with pytest.raises(ValueError, match="per_token_logps"):
        fit(tmp_path, module(OwnMismatch()), sizes={"num_iterations": 2}, callbacks=[Broken()], max_steps=3)


def test_completions_end_where_the_model_says(tmp_path: Path) -> None:
    ours = module()
    fit(tmp_path, ours, max_steps=1)
    assert ours.generation.prompts.ends == (EOS,)


def test_a_reward_function_logs_numbers_of_its_own(tmp_path: Path) -> None:
    def noting(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_metric("my/number", 3.0)
        log_extra("column", ["a"] * len(completions))
        return [0.0] * len(completions)

    watch = fit(tmp_path, module(OwnMismatch(), reward_funcs=noting), max_steps=2)
    assert [logs["my/number"] for logs in watch.logs] == [3.0, 3.0]


def test_fit_and_validate_one_after_the_other(tmp_path: Path) -> None:
    """The second run gives the engine the weights of the first, and the engine that a user brought stays open."""
    engine = OwnMismatch()
    ours, prompts = module(engine, learning_rate=0.05), data(val_dataset=tiny_prompts(2))
    owner = trainer(tmp_path, max_steps=2, limit_val_batches=0)
    owner.fit(ours, prompts)
    trainer(tmp_path).validate(ours, prompts, verbose=False)
    assert engine.synced == [0, 1, 0] and ours.generation.engine is engine


def test_a_second_fit_samples_anew(tmp_path: Path) -> None:
    """Its generations have the numbers of the first one's, whose rollouts older weights sampled."""
    engine = OwnMismatch(noise=0.2)
    ours = module(engine, correction="paper/tis", learning_rate=0.05)
    for _ in range(2):
        trainer(tmp_path, max_steps=1).fit(ours, data())
    assert len(engine.prompts) == 2
    assert ours.step_logs["offpolicy/mismatch/kl_k3"] < 0.5


def test_a_validation_in_training_does_not_send_the_weights_again(tmp_path: Path) -> None:
    engine = OwnMismatch(noise=0.2)
    held_out = data(val_dataset=tiny_prompts(4), num_iterations=2)
    trainer(tmp_path, max_steps=2, val_check_interval=1).fit(module(engine, correction="paper/tis"), held_out)
    assert engine.synced == [0, 1, 2]  # a generation serves two steps; each validation has the weights of its step
