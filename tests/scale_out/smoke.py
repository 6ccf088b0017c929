"""A recipe's own command on the tiny model: same entry point, same config.yaml; only sizes and machine are other."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from processes import run_command
from scale_out.launching import ROOT, environment
from tiny_models import tiny_model, tiny_tokenizer

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SMALL = {"use_cpu": True, "bf16": False, "train_size": 32, "eval_size": 4, "disable_tqdm": True}
ONE_PROCESS = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")


def save_chat_model(folder: Path) -> Path:
    """The tiny Llama with room for a system message and a word problem, and a template for both."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.config.max_position_embeddings = 1024
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run_recipe(name: str, folder: Path, *, launch: tuple[str, ...], script: str = "recipes/grpo.py", **own: Any) -> str:
    """Run ``recipes/NAME/config.yaml`` with the overrides; returns what it printed."""
    options = {**SMALL, "output_dir": str(folder), **own}
    said = [json.dumps(value) if isinstance(value, dict) else str(value) for value in options.values()]
    flags = [part for key, value in zip(options, said, strict=True) for part in (f"--{key}", value)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "--main_process_port", "0", script]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = [*command, "--config", f"recipes/{name}/config.yaml", *flags]
    done = run_command(words, seconds=500, cwd=ROOT, env={**environment(), "PYTHONPATH": path})
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` that belong to an optimizer step."""
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


def ranks_that_recorded(folder: Path) -> set[int]:
    """Process numbers in the names of the recorded rollouts."""
    return {int(part.stem.split("-")[2]) for part in (folder / "rollouts.parquet").glob("part-*.parquet")}
