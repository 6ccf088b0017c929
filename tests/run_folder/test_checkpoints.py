"""Whole checkpoints by their files: what is cut is found, what is written aside is not met, a full disk is told."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_disk import small_disk

from trl_offpolicy.run_folder.checkpoints import (
    aside,
    by_step,
    choose,
    fault_of,
    is_full,
    newest_whole,
    no_room,
    put_in_place,
    remove_unfinished,
)
from trl_offpolicy.run_folder.lock import RunFolderError
from trl_offpolicy.run_folder.writer import RunFolderWriter


def checkpoint(folder: Path, step: int) -> Path:
    """A small checkpoint as transformers writes it."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"weight": torch.zeros(64), "bias": torch.zeros(8)}, path / "model.safetensors")
    torch.save({"state": torch.zeros(64)}, path / "optimizer.pt")
    torch.save({"cpu": torch.get_rng_state()}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def cut(path: Path, *, keep: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"])
def test_a_file_that_was_cut_is_found(tmp_path: Path, name: str, keep: float) -> None:
    path = checkpoint(tmp_path, 2)
    assert fault_of(path) is None
    cut(path / name, keep=keep)
    assert name in str(fault_of(path))


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 2)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert fault_of(path) == "model.safetensors.index.json names model-1.safetensors, which is missing"
    (path / "trainer_state.json").unlink()
    assert fault_of(path) == "it has no trainer_state.json, which is written last"
    assert fault_of(tmp_path / "checkpoint-9") == "it does not exist"


def test_the_newest_whole_one_is_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (2, 10, 9):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    assert [path.name for path in by_step(tmp_path)] == ["checkpoint-10", "checkpoint-9", "checkpoint-2"]
    assert newest_whole(by_step(tmp_path)).whole == tmp_path / "checkpoint-10"
    cut(tmp_path / "checkpoint-10" / "optimizer.pt")
    with caplog.at_level(logging.WARNING):
        assert choose(by_step(tmp_path)) == tmp_path / "checkpoint-9"
    assert "checkpoint-10: optimizer.pt was cut short" in caplog.text
    for step in (2, 9):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    with pytest.raises(
        RunFolderError, match=r"none in .* is \(checkpoint-10: optimizer.pt was cut short; checkpoint-9"
    ):
        choose(by_step(tmp_path))
    assert choose([]) is None


def test_what_is_written_aside_is_not_met_before_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-2"
    checkpoint(tmp_path, 2).rename(aside(target))
    assert by_step(tmp_path) == []
    put_in_place(target)
    assert by_step(tmp_path) == [target]
    checkpoint(tmp_path / "again", 2).rename(aside(target))  # the same step once more
    (aside(target) / "new").write_text("")
    put_in_place(target)
    put_in_place(target)  # another machine, which comes later
    assert (target / "new").exists()
    assert not list(tmp_path.glob("_unfinished-*"))


def test_a_machine_that_comes_late_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine B has seen what is written; before it goes on, A puts it in place."""
    target = tmp_path / "checkpoint-2"
    checkpoint(tmp_path, 2).rename(aside(target))
    rename, first = Path.rename, [True]

    def slowly(path: Path, to: Path) -> Path:
        if first:
            first.clear()
            put_in_place(target)  # the other machine
        return rename(path, to)

    exists = Path.exists

    def seen(path: Path, **options: Any) -> bool:
        found = exists(path, **options)
        if first and path == aside(target):
            first.clear()
            put_in_place(target)
        return found

    monkeypatch.setattr(Path, "rename", slowly)
    monkeypatch.setattr(Path, "exists", seen)
    put_in_place(target)
    monkeypatch.undo()
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-2"]
    assert fault_of(target) is None


def test_a_kill_between_the_two_renames_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = checkpoint(tmp_path, 2)
    checkpoint(tmp_path / "again", 2).rename(aside(target))

    def killed(path: Path, to: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(target)
    monkeypatch.undo()
    assert not target.exists()
    remove_unfinished(tmp_path)
    assert fault_of(target) is None
    assert not list(tmp_path.glob("_unfinished-*"))


def test_leftovers_go_when_a_run_begins(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2).rename(aside(tmp_path / "checkpoint-2"))
    (tmp_path / "_unfinished-last.ckpt").write_text("")
    checkpoint(tmp_path, 1)
    remove_unfinished(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-1"]


def test_errors_of_a_full_disk(tmp_path: Path) -> None:
    assert is_full(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert is_full(RuntimeError("I/O error: No space left on device (os error 28)"), tmp_path)  # safetensors
    torch_error = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    assert is_full(torch_error, tmp_path, needed=10**18) and not is_full(torch_error, tmp_path, needed=1)
    assert not is_full(PermissionError(errno.EACCES, "Permission denied"), tmp_path, needed=10**18)
    try:
        raise ValueError("later") from OSError(errno.EDQUOT, "Disk quota exceeded")
    except ValueError as error:
        assert is_full(error, tmp_path)


def test_the_sentence(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    said = str(no_room(tmp_path, what="checkpoint-4", needed=2_400_000_000, safe=by_step(tmp_path)))
    assert "checkpoint-4 could not be written, which needs about 2.4 GB; checkpoint-2 is whole" in said
    assert "no checkpoint is whole yet" in str(no_room(tmp_path, what="checkpoint-4"))


@pytest.mark.integration
def test_rows_on_a_full_disk(tmp_path: Path) -> None:
    """The rows before stay whole, and the sentence comes in the place of an error of the system."""
    with small_disk(tmp_path / "disk", 64 * 1024) as folder:
        writer = RunFolderWriter(folder, {})
        writer.begin(0, seed=1)
        with pytest.raises(RunFolderError, match=r"is full: .* are free, and the numbers of step"):
            for step in range(10_000):
                writer.log(step, {f"number_{i}": 1.0 for i in range(50)})
        lines = (folder / "metrics.jsonl").read_text().split("\n")
        assert [json.loads(line)["step"] for line in lines[:-1]] == list(range(len(lines) - 1))
