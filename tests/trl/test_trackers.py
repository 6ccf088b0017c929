"""What wandb (offline) and trackio (local) are given by a run: the keys of its own ``metrics.jsonl``."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Engine, records

pytestmark = pytest.mark.slow


def logged_keys(trainer: Any) -> set[str]:
    row, *_ = records(trainer)
    return {key for key in row if key.startswith("offpolicy/") and row[key] is not None}


def test_wandb_offline_gets_the_keys_of_the_run_folder(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    trainer = build(Engine(noise=0.1), report_to="wandb")
    trainer.train()
    names = set(wandb.run.summary.keys())
    wandb.finish()
    (file,) = tmp_path.rglob("*.wandb")
    keys = logged_keys(trainer)
    assert len(keys) > 50 and {f"train/{key}" for key in keys} <= names
    assert b"train/offpolicy/mismatch/kl_k3" in file.read_bytes()


def test_trackio_gets_the_keys_of_the_run_folder(
    build: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    for module in ("trackio.utils", "trackio.sqlite_storage"):  # not in the home of who runs the tests
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path)
    trainer = build(Engine(noise=0.1), report_to="trackio")
    trainer.train()
    (path,) = tmp_path.rglob("*.db")
    rows = sqlite3.connect(path).execute("SELECT metrics FROM metrics").fetchall()
    names = {name for (text,) in rows for name in json.loads(text)}
    keys = logged_keys(trainer)
    assert len(keys) > 50 and {f"train/{key}" for key in keys} <= names
