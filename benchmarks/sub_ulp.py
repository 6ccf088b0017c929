"""Updates that the engine cannot see: what a bfloat16 engine holds of a float32 trainer at a small learning rate.

    python benchmarks/sub_ulp.py [--model FOLDER] [--steps 30] [--seed 0] [--out runs/sub_ulp] [--only NAME ...]

Full fine-tuning (no LoRA) of SmolLM2-135M on one-digit sums with AdamW, vLLM in the trainer's process. Each setting is
a process of its own, because a process can build one engine. Per setting the table has, over the steps after the first:
the share of the weight elements that the trainer changed between two syncs, the share of those that differ in the
engine's precision, how many syncs brought nothing new, KL k3 and mean |log-ratio| at lag 0, and how far a fixed text's
log-probs moved since the start in the trainer and in the engine (nats a token). The run folders stay in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = "summary.json"


class Setting(NamedTuple):
    """Precision of both sides, and the learning rate."""

    trainer: str
    engine: str
    learning_rate: float


SETTINGS = {
    "hidden": Setting("float32", "bfloat16", 1e-6),
    "larger steps": Setting("float32", "bfloat16", 1e-5),
    "fixed: float32 engine": Setting("float32", "float32", 1e-6),
    "fixed: bfloat16 trainer": Setting("bfloat16", "bfloat16", 1e-6),
}
COLUMNS = {
    "changed": "offpolicy/rollout/sync_changed_fraction",
    "visible": "offpolicy/rollout/sync_visible_fraction",
    "KL k3": "offpolicy/mismatch/kl_k3",
    "|log-ratio|": "offpolicy/mismatch/logp_diff_mean",
    "confident": "offpolicy/mismatch/confident_disagreement_fraction",
}
"""Column of the table -> key in ``metrics.jsonl``."""


# ------------------------------------------------------------------------------------------------------- one setting


def train(setting: Setting, *, model: str, steps: int, seed: int, folder: Path) -> None:
    """Train, and write what the table needs."""
    sys.path.insert(0, str(ROOT))
    from types import SimpleNamespace

    from recipes.tasks import REWARDS, load_splits
    from trl_offpolicy.config import OffPolicyGRPOConfig
    from trl_offpolicy.run_folder.syncs import read_syncs, repeated_syncs
    from trl_offpolicy.trainer import OffPolicyGRPOTrainer

    args = OffPolicyGRPOConfig(
        output_dir=str(folder),
        offpolicy="measure",
        model_init_kwargs={"dtype": setting.trainer},
        learning_rate=setting.learning_rate,
        lr_scheduler_type="constant",
        max_steps=steps,
        per_device_train_batch_size=12,
        num_generations=4,
        max_completion_length=16,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        engine={"dtype": setting.engine, "enforce_eager": True, "seed": seed},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        seed=seed,
    )
    task = SimpleNamespace(
        dataset_name="reasoning-gym/chain_sum",
        dataset_options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        question_template="What is {expression}?",
        system_prompt="Answer with just the number.",
        train_size=2000,
        eval_size=64,
    )
    trainer = OffPolicyGRPOTrainer(model, REWARDS["graded_number"], args, train_dataset=load_splits(task)[0])
    probed = _observed(trainer)
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The first sync has nothing to compare with, so all columns are of the steps after it.
    means = {
        name: fmean(row[key] for row in rows[1:] if key in row) if any(key in row for row in rows[1:]) else None
        for name, key in COLUMNS.items()
    }
    syncs = read_syncs(folder)
    (trainer_before, engine_before), (trainer_after, engine_after) = probed[0], probed[-1]
    summary = {
        **means,
        "visible by step": [row.get(COLUMNS["visible"]) for row in rows],
        "syncs": len(syncs),
        "repeated": len(repeated_syncs(syncs)),
        "trainer moved": _distance(trainer_before, trainer_after),
        "engine moved": _distance(engine_before, engine_after),
        "apart": _distance(trainer_after, engine_after),
        "reward": fmean(row["reward"] for row in rows if "reward" in row),
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def _observed(trainer: Any) -> list[tuple[list[float], list[float]]]:
    """A list that gets the probe's log-probs (trainer, engine) at every sync."""
    check = trainer.vllm_generation._sync._check
    observe, probed = check.observe, []

    def observed(version: int, *, engine: Any, trainer: Any, others: Any = None) -> float:
        probed.append(tuple([value for row in side for value in row] for side in (trainer, engine)))
        return float(observe(version, engine=engine, trainer=trainer, others=others))

    check.observe = observed
    return probed


def _distance(a: list[float], b: list[float]) -> float:
    return fmean(abs(x - y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------------- the table


def main() -> None:
    """Run the settings one after the other and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/sub_ulp"))
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--here", choices=list(SETTINGS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = {name: options.out / name.replace(": ", "-").replace(" ", "-") for name in SETTINGS}
    if options.here is not None:
        train(SETTINGS[options.here], model=options.model, steps=options.steps, seed=options.seed,
              folder=folder[options.here])  # fmt: skip
        return
    for name in options.only:
        folder[name].mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--here", name, "--model", options.model]
        command += ["--steps", str(options.steps), "--seed", str(options.seed), "--out", str(options.out)]
        with (folder[name] / "log.txt").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)
    print(
        "| setting | trainer | engine | lr | changed | visible | syncs with nothing new | KL k3 | mean abs. log-ratio "
        "| trainer moved | engine moved |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in options.only:
        found, setting = json.loads((folder[name] / SUMMARY).read_text()), SETTINGS[name]
        visible = "all" if found["visible"] is None else f"{found['visible']:.3f}"
        print(f"| {name} | {setting.trainer} | {setting.engine} | {setting.learning_rate:g} | {found['changed']:.3f} | "
              f"{visible} | {found['repeated']} of {found['syncs']} | {found['KL k3']:.2g} | "
              f"{found['|log-ratio|']:.2g} | {found['trainer moved']:.2g} | {found['engine moved']:.2g} |")  # fmt: skip


if __name__ == "__main__":
    main()
