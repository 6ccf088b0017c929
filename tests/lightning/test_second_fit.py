"""What one call of Lightning's trainer leaves for the next: a second fit, weights loaded for one, a run that broke."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_runs import OwnMismatch, Watch, data, module, trainer
from tiny_models import score_last_word, tiny_model, tiny_prompts, tiny_tokenizer

from lightning_module import OffPolicyGRPOModule, OffPolicyObserver
from lightning_module.callbacks import RunFolder
from lightning_module.models import without_dropout
from lightning_module.rollouts import RolloutBuffer
from trl_offpolicy.types import Average

pytestmark = pytest.mark.integration

KL = {"kl": {"coef": 0.1}}


def measured(**options: Any) -> OffPolicyGRPOModule:
    return module(OwnMismatch(noise=0.1), **{"correction": "measure", "control": None, **options})


def passes() -> Any:
    """Generations that serve two optimizer steps, so that a checkpoint after three holds rollouts."""
    return data(val_dataset=tiny_prompts(4), micro_batch_size=4, num_iterations=2, steps_per_generation=4)


def test_the_numbers_of_a_fit_that_ended_between_two_rows_are_not_the_next_ones(tmp_path: Path) -> None:
    ours, watch = measured(), Watch()
    trainer(tmp_path, max_steps=3, log_every_n_steps=5).fit(ours, data())
    trainer(tmp_path, max_steps=1, callbacks=[watch]).fit(ours, data())

    assert ours.step_logs["loss"] == pytest.approx(sum(float(loss) for loss in watch.losses), abs=1e-6)
    assert ours.step_logs["num_tokens"] < 60 and ours.measuring._steps == 0


def by_validation(path: Path, folder: Path) -> OffPolicyGRPOModule:
    ours = measured()
    trainer(folder).validate(ours, passes(), ckpt_path=str(path), verbose=False, weights_only=True)
    return ours


def by_loading(path: Path, folder: Path) -> OffPolicyGRPOModule:
    given = {"model": tiny_model(), "reward_funcs": score_last_word, "tokenizer": tiny_tokenizer()}
    found: OffPolicyGRPOModule = OffPolicyGRPOModule.load_from_checkpoint(
        path, weights_only=True, engine=OwnMismatch(noise=0.1), **given
    )
    return found


@pytest.mark.parametrize("load", [by_validation, by_loading])
def test_a_checkpoint_that_is_only_loaded_brings_no_rollouts(load: Callable[..., Any], tmp_path: Path) -> None:
    owner = trainer(tmp_path, max_steps=3)
    owner.fit(measured(), passes())
    owner.save_checkpoint(tmp_path / "x.ckpt")
    ours = load(tmp_path / "x.ckpt", tmp_path / "other")
    before = len(ours.generation.engine.prompts) if ours.generation.engine is not None else 0

    trainer(tmp_path / "other", max_steps=1).fit(ours, passes())

    assert len(ours.generation.engine.prompts) > before
    assert ours.step_logs["offpolicy/rollout/version_lag_max"] == 0.0
    # fresh rows: nothing was learned since they were sampled
    assert ours.step_logs["offpolicy/loss/clip_region_fraction"] == 0.0


class Breaks(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        raise RuntimeError("out of memory")


class Twice(pl.Callback):
    """What two forwards outside of learning differ by when a run begins."""

    difference = float("nan")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.noise.learning(False)
        ids = torch.arange(3, 9)[None]
        with torch.no_grad():
            one, other = (pl_module.policy(input_ids=ids).logits for _ in range(2))
        self.difference = float((one - other).abs().max())


def test_a_run_that_broke_leaves_no_noise_in_the_policy(tmp_path: Path) -> None:
    ours, twice = measured(perturbation={"std": 0.05, "learn": False}), Twice()
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(tmp_path, max_steps=3, callbacks=[Breaks()]).fit(ours, data(micro_batch_size=8))
    trainer(tmp_path, max_steps=1, callbacks=[twice]).fit(ours, data(micro_batch_size=8))
    assert twice.difference == 0.0


def test_a_validation_after_the_run_is_not_the_runs(tmp_path: Path) -> None:
    ours, prompts = measured(learning_rate=0.05), data(val_dataset=tiny_prompts(4), micro_batch_size=8)
    owner = trainer(tmp_path, max_steps=2, callbacks=[RunFolder(str(tmp_path), report=False)], val_check_interval=2)
    owner.fit(ours, prompts)
    files = [tmp_path / name for name in ("evaluation.json", "metrics.jsonl")]
    before = [file.read_text() for file in files]
    with torch.no_grad():
        for parameter in ours.policy.parameters():
            parameter.zero_()
    owner.validate(ours, prompts, verbose=False)
    assert [file.read_text() for file in files] == before


def run_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_each_run_says_how_its_ids_were_checked_and_a_dry_run_says_it_nowhere(tmp_path: Path) -> None:
    ours, folders = measured(), [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        callbacks = [RunFolder(str(folder), report=False)]
        trainer(folder, max_steps=1, callbacks=callbacks).fit(ours, data(micro_batch_size=8))
        assert "token_ids" in run_json(folder)
    marked = json.dumps({**run_json(folders[0]), "token_ids": "of the run"})
    (folders[0] / "run.json").write_text(marked)
    dry = trainer(folders[0], fast_dev_run=True, callbacks=[RunFolder(str(folders[0]), report=False)])
    dry.fit(measured(), data(micro_batch_size=8))
    assert (folders[0] / "run.json").read_text() == marked


class Saves(pl.Callback):
    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if args[-1] == self.after:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("after", "warned"), [(1, 1), (3, 0)])
def test_gradients_that_no_checkpoint_holds_are_told(after: int, warned: int, tmp_path: Path) -> None:
    def rows() -> Any:
        return data(micro_batch_size=2, num_generations=2)

    options: dict[str, Any] = {"accumulate_grad_batches": 4}
    trainer(tmp_path, max_steps=1, callbacks=[Saves(tmp_path / "x.ckpt", after)], **options).fit(measured(), rows())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        owner = trainer(tmp_path, max_steps=2, **options)
        owner.fit(measured(), rows(), ckpt_path=str(tmp_path / "x.ckpt"), weights_only=True)
    found = [one for one in said if "after 2 of the 4 micro-batches" in str(one.message)]
    assert len(found) == warned


# ------------------------------------------------------------------------------------------------- what is set at start


def test_the_reference_has_the_policys_precision(tmp_path: Path) -> None:
    ours = measured(objective=KL)
    trainer(tmp_path, max_steps=1, precision="bf16-true").fit(ours, data(micro_batch_size=8))
    assert next(ours.generation._reference.parameters()).dtype == next(ours.policy.parameters()).dtype == torch.bfloat16
    assert ours.step_logs["kl"] == 0.0  # the weights are those of the reference


def test_dropout_that_a_model_keeps_as_a_number_is_switched_off_too() -> None:
    model = tiny_model(attention_dropout=0.5).train()
    ids = torch.arange(3, 15)[None]
    one, other = (model(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(one, other)
    without_dropout(model)
    one, other = (model(input_ids=ids).logits for _ in range(2))
    assert torch.equal(one, other)


def test_an_average_goes_where_its_rows_go() -> None:
    average = Average(logps=torch.zeros(2, 3), count=torch.ones(2, 1))
    buffer = RolloutBuffer((0, 0), [{"completion_ids": torch.zeros(2, 3), "past_average": average}])
    (restored,) = RolloutBuffer.restored(buffer.state_dict(), torch.device("meta")).micro_batches
    moved = restored["past_average"]
    assert restored["completion_ids"].is_meta and moved.logps.is_meta and moved.count.is_meta


class Own(pl.LightningModule):
    """A module of the user's, whose engine is ``shift`` nats from its trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = torch.nn.Linear(1, 1), 0.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        scores = self.layer(torch.ones(2, 3, 1)).squeeze(-1)
        old = torch.full((2, 3), -1.0)
        return {
            "loss": scores.mean(), "per_token_logps": scores * 0 + old, "sampling_per_token_logps": old - self.shift,
            "completion_mask": torch.ones(2, 3, dtype=torch.bool),
        }  # fmt: skip

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_an_observer_begins_anew(tmp_path: Path) -> None:
    observer = OffPolicyObserver(control=None, report=False, folder=str(tmp_path / "run"))
    own, loader = Own(), torch.utils.data.DataLoader(range(8), batch_size=1)  # type: ignore[arg-type,var-annotated]
    own.shift = 1.0
    trainer(tmp_path, max_steps=3, log_every_n_steps=5, callbacks=[observer]).fit(own, loader)
    own.shift = 0.0
    owner = trainer(tmp_path, max_steps=1, callbacks=[observer])
    owner.fit(own, loader)
    assert float(owner.callback_metrics["offpolicy/mismatch/kl_k1"]) == 0.0
