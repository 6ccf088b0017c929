"""Checkpoints under Lightning on a small disk, and resuming past one that is not whole; one folder, one run."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import OwnMismatch, data, module, trainer
from small_disk import small_disk

from lightning_module import RunFolder
from trl_offpolicy.run_folder import lock
from trl_offpolicy.run_folder.checkpoints import fault_of
from trl_offpolicy.run_folder.layout import LOCK_FILE
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.run_folder.writer import RolloutRecorder, RunFolderWriter

pytestmark = pytest.mark.integration


def run(folder: Path, checkpoints: Path, *, steps: int = 3, ckpt_path: Any = None) -> Any:
    keep = ModelCheckpoint(checkpoints, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    records = RunFolder(str(folder), report=False, rollouts=False)
    made = trainer(folder, max_steps=steps, enable_checkpointing=True, callbacks=[keep, records])
    made.fit(module(OwnMismatch(noise=0.3), correction="paper/tis"), data(), ckpt_path=ckpt_path)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, tmp_path / "kept")
    assert names(tmp_path / "kept") == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert not (tmp_path / LOCK_FILE).exists()
    last = tmp_path / "kept" / "step=3.ckpt"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    assert fault_of(last) == "was cut short"
    with caplog.at_level(logging.WARNING):
        again = run(tmp_path, tmp_path / "kept", steps=4, ckpt_path=str(last))
    assert "step=2.ckpt, because what is newer is not whole (step=3.ckpt: was cut short)" in caplog.text
    assert again.global_step == 4
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=r"must find a whole checkpoint, but none"):
        run(tmp_path, tmp_path / "kept", steps=5, ckpt_path=str(last))


def test_a_full_disk_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    run(tmp_path, tmp_path / "free", steps=1)
    size = (tmp_path / "free" / "step=1.ckpt").stat().st_size
    with small_disk(tmp_path / "disk", int(1.6 * size)) as disk:
        said = r"is full: .*step=2.ckpt could not be written, which needs about .* MB; step=1.ckpt is whole"
        with pytest.raises(RunFolderError, match=said):
            run(tmp_path, disk)
        assert names(disk) == ["step=1.ckpt"]
        assert run(tmp_path, tmp_path / "free", steps=2, ckpt_path=str(disk / "step=1.ckpt")).global_step == 2


def test_found_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    made = module(OwnMismatch(noise=0.3))
    monkeypatch.setattr(made, "configure_model", lambda: pytest.fail("the model was loaded first"))
    records = RunFolder(str(tmp_path / "file" / "run"))
    with pytest.raises(RunFolderError, match=r"the run folder must be a folder that can be written"):
        trainer(tmp_path, max_steps=1, callbacks=[records]).fit(made, data())


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolderWriter(tmp_path, {}).begin(0, seed=1)
    monkeypatch.setattr(lock, "_is_own", lambda holder: False)  # this process stands for two
    with pytest.raises(RunFolderError, match=r"must belong to one run, but .* is in use by process"):
        run(tmp_path, tmp_path / "kept")


def test_only_a_resumed_run_takes_another_checkpoint(tmp_path: Path) -> None:
    """To test or to predict with another file than the one that was named would be a wrong result, unseen."""
    run(tmp_path, tmp_path / "kept", steps=2)
    last = tmp_path / "kept" / "step=2.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(RunFolderError, match=r"ckpt_path must be a whole checkpoint, but .*step=2.ckpt is not"):
        trainer(tmp_path).validate(module(OwnMismatch(noise=0.3)), data(), ckpt_path=str(last))


def test_what_a_killed_run_left_beside_its_checkpoints_goes(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "_unfinished-step=7.ckpt").write_text("half")
    run(tmp_path, tmp_path / "kept", steps=1)
    assert names(tmp_path / "kept") == ["step=1.ckpt"]


def test_a_full_disk_in_the_last_records_gives_the_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that ended the run stays the one that is raised."""
    records = RunFolder(str(tmp_path))
    records._writer = RunFolderWriter(tmp_path, {})
    records._writer.begin(0, seed=1)
    records._recorder = RolloutRecorder(tmp_path, str, 0)
    records._recorder.add(1)
    monkeypatch.setattr(RolloutRecorder, "_table", lambda self, step, host: pyarrow.table({}))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(RunFolderError, match="is full"):
        records._recorder.flush()
    made: Any = None
    records.on_exception(made, made, ValueError("what ended the run"))
    assert not (tmp_path / LOCK_FILE).exists()
