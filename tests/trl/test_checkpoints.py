"""Checkpoints of the TRL trainer on a small disk, and resuming past one that is not whole."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_disk import small_disk
from trainer_runs import Engine, records
from transformers import TrainerState

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.server.contact import Refused
from trl_offpolicy.run_folder.checkpoints import by_step, bytes_of, fault_of
from trl_offpolicy.run_folder.layout import LOCK_FILE
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.run_folder.writer import RunFolderWriter
from trl_offpolicy.trl.checkpoints import saved_whole
from trl_offpolicy.trl.sync import kept_on_fault

pytestmark = pytest.mark.integration

SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "offpolicy": "paper/tis"}


def test_a_half_written_checkpoint_is_passed_over(build: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    """The run goes on from the one before and ends as the undisturbed run did."""
    whole = build(Engine(noise=0.3), **SAVED)
    whole.train()
    folder = Path(whole.args.output_dir)
    assert [path.name for path in by_step(folder)] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    assert all(fault_of(path) is None for path in by_step(folder)) and not list(folder.glob("_unfinished*"))
    assert not (folder / LOCK_FILE).exists()
    optimizer = folder / "checkpoint-3" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    with pytest.raises(RunFolderError, match=r"checkpoint-3 is not: optimizer.pt was cut short"):
        build(Engine(noise=0.3), **SAVED).train(resume_from_checkpoint=str(folder / "checkpoint-3"))

    again = build(Engine(noise=0.3), **SAVED)
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=True)
    assert "checkpoint-2, because what is newer is not whole (checkpoint-3: optimizer.pt was cut short)" in caplog.text
    assert again.state.global_step == 3 and [row["step"] for row in records(again)] == [1, 2, 3]
    assert fault_of(folder / "checkpoint-3") is None  # written again


def test_old_checkpoints_go_only_after_the_new_one_is_whole(build: Callable[..., Any]) -> None:
    trainer = build(Engine(noise=0.3), **SAVED, save_total_limit=1)
    trainer.train()
    assert [path.name for path in by_step(Path(trainer.args.output_dir))] == ["checkpoint-3"]


def test_a_full_disk_ends_the_run_with_one_sentence(build: Callable[..., Any], tmp_path: Path) -> None:
    """The first checkpoint fits, the second does not; what is safe is named, and can be gone on from."""
    options = {**SAVED, "record_rollouts": False}
    free = build(Engine(noise=0.3), **{**options, "max_steps": 1}, output_dir=str(tmp_path / "free"))
    free.train()
    size = bytes_of(tmp_path / "free" / "checkpoint-1")
    with small_disk(tmp_path / "disk", int(1.6 * size)) as disk:
        trainer = build(Engine(noise=0.3), **options, output_dir=str(disk))
        said = r"is full: .*checkpoint-2 could not be written, which needs about .* MB; checkpoint-1 is whole, and the "
        with pytest.raises(RunFolderError, match=said + "records of finished steps are safe"):
            trainer.train()
        assert [path.name for path in disk.glob("*checkpoint*")] == ["checkpoint-1"]
        assert [row["step"] for row in records(trainer)] == [1, 2]
        again = build(Engine(noise=0.3), **{**options, "save_strategy": "no"}, output_dir=str(disk))
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 3
        first, last = (torch.cat([p.flatten() for p in one.model.parameters()]) for one in (free, again))
        assert not torch.equal(first, last)


def test_found_before_the_model_loads(make_args: Callable[..., Any], tmp_path: Path) -> None:
    """The model does not exist, and nobody has looked for it yet."""
    from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"output_dir must be a folder that can be written"):
        OffPolicyGRPOTrainer("no-such-model", len, make_args(output_dir=str(tmp_path / "file" / "run")))


def test_a_second_run_in_the_folder_is_refused(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it loads anything, and again when it begins: another one may have come between."""
    from trl_offpolicy.run_folder import lock

    trainer = build(Engine(noise=0.3))
    other = RunFolderWriter(trainer.args.output_dir, {})
    other.begin(0, seed=1)
    monkeypatch.setattr(lock, "_is_own", lambda holder: False)  # this process stands for two
    with pytest.raises(RunFolderError, match=r"must belong to one run, but .* is in use by process"):
        trainer.train()
    with pytest.raises(RunFolderError, match=r"must belong to one run, but .* is in use by process"):
        build(Engine(noise=0.3))


def test_the_best_checkpoint_is_found_by_every_rank(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers names the folder aside on all ranks; a rank that saves nothing also reads it at the end."""
    monkeypatch.chdir(tmp_path)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward", "eval_strategy": "steps"}
    trainer = build(Engine(noise=0.3), **{**SAVED, **best, "eval_steps": 1}, output_dir="./run")
    trainer.train()
    found = Path(trainer.state.best_model_checkpoint)
    assert found.is_dir() and found.name.startswith("checkpoint-")
    said = TrainerState.load_from_json(str(by_step(Path("run"))[0] / "trainer_state.json"))
    assert said.best_model_checkpoint == trainer.state.best_model_checkpoint

    state = trainer.state
    state.best_model_checkpoint = f"./run/_unfinished-checkpoint-{state.global_step}"
    monkeypatch.setattr(type(trainer.args), "should_save", False)  # as on another rank
    with saved_whole(trainer, None):
        pass
    assert state.best_model_checkpoint == f"./run/checkpoint-{state.global_step}"


def test_a_full_disk_in_the_records_does_not_replace_the_engines_error() -> None:
    """It would be raised on one rank alone."""

    class Full:
        def flush(self) -> None:
            raise RunFolderError("The disk is full.")

    trainer: Any = SimpleNamespace(model=SimpleNamespace(training=False))
    with pytest.raises(EngineError, match="no answer"), kept_on_fault(trainer, Full()):
        raise EngineError("no answer")


def failing(weight: float, folder: Any, saved: list[Any]) -> Any:
    """A trainer with one weight, of which a checkpoint is only noted."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, weight)
    return SimpleNamespace(
        model=model, state=SimpleNamespace(global_step=3), args=SimpleNamespace(output_dir=str(folder)),
        accelerator=SimpleNamespace(device="cpu"),
        _save_checkpoint=lambda model, trial: saved.append(model),
    )  # fmt: skip


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_not_saved_over_a_good_checkpoint(tmp_path: Path, weight: float) -> None:
    saved: list[Any] = []
    said = r"diverged. The weights after step 3 are not finite, and are not saved."
    none = pytest.raises(EngineError, match=f"{said} .* has no earlier checkpoint")
    with none, kept_on_fault(failing(weight, tmp_path, saved), None):
        raise EngineError("diverged.")
    (tmp_path / "checkpoint-2").mkdir()
    named = pytest.raises(EngineError, match=f"{said} Go on from checkpoint-2 with train")
    with named, kept_on_fault(failing(weight, tmp_path, saved), None):
        raise EngineError("diverged.")
    assert not saved


def test_an_answer_of_the_server_keeps_its_words_when_the_state_is_saved() -> None:
    """Its error is made of a status and a message, so that another one carries the text."""
    saved: list[Any] = []
    said = pytest.raises(EngineError, match=r"404: no such route The state after step 3 is saved in run")
    with said, kept_on_fault(failing(1.0, "run", saved), None):
        raise Refused(404, "no such route")
    assert len(saved) == 1
