"""Starts ``recipes/grpo.py`` on the tiny model with ``accelerate launch`` and reads what each rank left."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from processes import run_command
from tiny_models import save_tiny_model, tiny_prompts
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = Path(__file__).with_name("launched.py")
STEPS, ROWS = 4, 8
"""Optimizer steps, and rows of a micro-batch over all ranks."""

TRAINING = {
    "reward": "last_word",
    "eval_size": 4,
    "offpolicy": {"preset": "paper/geometric-mask", "options": {"low": 0.9, "high": 1.1, "max_weight": 1.2}},
    "use_vllm": True,
    "vllm_mode": "colocate",
    "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "seed": 3},
    "dtype": "float32",
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 3.0e-3,
    "lr_scheduler_type": "constant",
    "adam_epsilon": 1.0e-3,  # so that a gradient of 1e-8 moves nothing by a whole step
    "beta": 0.05,
    "loss_type": "dapo",
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_steps": 2,
    "noise_floor_steps": 2,
    "write_report": False,
}
OF_ITS_OWN = ("rollout/sync_seconds", "offpolicy/time/", "noise_floor/")
"""Not a function of the data: the clock, and the rounding of one micro-batch."""
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj", "down_proj"]}


@dataclass(frozen=True)
class Run:
    """What a launch left."""

    folder: Path
    ranks: list[dict[str, Any]]
    output: str

    def rows(self) -> list[dict[str, Any]]:
        """The training rows of ``metrics.jsonl``."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "loss" in row]


def prepare(folder: Path) -> Path:
    """The tiny model and its prompts as files."""
    save_tiny_model(folder / "model")
    (folder / "data").mkdir()
    tiny_prompts().to_json(folder / "data" / "train.jsonl")
    return folder


def environment() -> dict[str, str]:
    """One thread a process, no GPU, DeepSpeed's compiled operations where the caller keeps them."""
    chosen = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_KVCACHE_SPACE": "1", "DO_NOT_TRACK": "1"}
    chosen |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **chosen, "PYTHONPATH": os.pathsep.join(paths)}


def launch(made: Path, folder: Path, strategy: str | None, *, timeout: float = 500, **options: Any) -> Run:
    """Train under ``recipes/accelerate/STRATEGY.yaml``, or in one process, and return what was left.

    Args:
        made: folder of :func:`prepare`.
        folder: ``output_dir``.
        strategy: file name without ending; None is one process.
        timeout: seconds.
        **options: of the recipe.
    """
    processes = 1 if strategy is None else 2
    batch = {"per_device_train_batch_size": ROWS // processes, "output_dir": str(folder)}
    batch |= {"model_name_or_path": str(made / "model"), "dataset_name": str(made / "data")}
    if strategy == "cpu_fsdp2":
        batch["accelerator_config"] = {"use_configured_state": True}
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "recipe.yaml"
    config.write_text(yaml.safe_dump({**TRAINING, **batch, **options}))
    plain = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    chosen = plain if strategy is None else ["--config_file", str(ROOT / "recipes" / "accelerate" / f"{strategy}.yaml")]
    command = [sys.executable, "-m", "accelerate.commands.launch", *chosen, "--main_process_port", "0", str(LAUNCHED)]
    done = run_command([*command, "--config", config], seconds=timeout, cwd=ROOT, env=environment())
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]
    return Run(folder, ranks, output)


def metrics(run: Run) -> list[dict[str, float]]:
    """The offpolicy/* values of each step that depend on the data alone."""
    return [
        {k: v for k, v in row.items() if k.startswith("offpolicy/") and not any(own in k for own in OF_ITS_OWN)}
        for row in run.rows()
    ]


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], atol: float) -> None:
    """The same names with the same tensors."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
