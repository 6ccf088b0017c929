"""Sample with a real vLLM under top-p, top-k and min-p, score with and without the same cut; prints one JSON line.

    python tests/engines/truncated_run.py FOLDER [--model FOLDER] [--prompts 32] [--rounding int8] [--lora] [--url URL]
                                            [--trl-6789] [--device cuda]

First two training steps through the configuration alone (``top_p: 0.8``); then, in the same engine, one generation for
every cut at the weights of the last step. Ratios are exp(old - sampling), one a token; the error is that of the mean.
"with" is as the trainer scores: over the tokens that the engine reports, if it does; "rule" always cuts by the rule.
With ``--url`` the engine is a server of FOLDER/model, which then exists.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_models import save_tiny_model, spread, tiny_prompts

from trl_offpolicy.functional.truncated_sampling import Truncation
from trl_offpolicy.rollouts.kept import KEY
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.scoring import FilteredScoring
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

GENERATIONS = 4
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "seed": 3}
CUTS = {
    "top_p 0.8": Truncation(top_p=0.8),
    "top_p 0.9": Truncation(top_p=0.9),
    "top_k 20": Truncation(top_k=20),
    "min_p 0.05": Truncation(min_p=0.05),
    "all three": Truncation(top_p=0.9, top_k=20, min_p=0.02),
    "none": Truncation(),
}
TRL_6789 = {
    "top_p 1": Truncation(),
    "top_p 0.95": Truncation(top_p=0.95),
    "top_p 0.9": Truncation(top_p=0.9),
    "top_p 0.8": Truncation(top_p=0.8),
    "top_k 50": Truncation(top_k=50),
    "top_k 20": Truncation(top_k=20),
    "top_p 0.9, top_k 50": Truncation(top_p=0.9, top_k=50),
}
"""The rows of the table in TRL's issue 6789."""


def train(options: argparse.Namespace, model: Path, data: Dataset) -> OffPolicyGRPOTrainer:
    """Two steps with ``top_p: 0.8`` in the configuration, nothing else said."""
    # rounding changes with such a large step: the proof of the sync would take that for weights that did not arrive
    rounding = {"weight_rounding": options.rounding, "check_sync": False} if options.rounding else {}
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=options.device == "cpu",
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server" if options.url else "colocate",
        vllm_server_base_url=options.url,
        engine={**({} if options.url else ENGINE), **rounding},
        offpolicy="paper/tis",
        top_p=0.8,
        temperature=options.temperature,
        beta=0.01,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_steps=2,
        per_device_train_batch_size=16,
        num_generations=GENERATIONS,
        max_completion_length=options.length,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
    )
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if options.lora else None
    trainer = OffPolicyGRPOTrainer(str(model), spread, args, train_dataset=data, peft_config=adapter)
    trainer.train()
    return trainer


@torch.no_grad()
def sample(trainer: OffPolicyGRPOTrainer, data: Dataset, cut: Truncation, prompts: int) -> dict[str, Any]:
    """One generation under ``cut``; ratios of the same tokens scored with it and without."""
    engine = trainer.vllm_generation
    engine.top_p, engine.top_k, engine.min_p = cut.top_p, cut.top_k, cut.min_p
    trainer._filtered = FilteredScoring(cut)
    rows = [data[i % len(data)] for i in range(prompts) for _ in range(GENERATIONS)]
    batch = trainer._generate_and_score_completions(rows)
    mask = batch["completion_mask"].bool()
    result: dict[str, Any] = {"tokens": int(mask.sum())}
    if KEY in batch:
        counts = torch.cat([kept.counts for kept in batch[KEY]])
        result["kept"] = {"mean": float(counts.float().mean()), "unknown": int((counts == 0).sum())}
    ruled = {name: value for name, value in batch.items() if name != KEY}
    scorings = {"without": (Truncation(), ruled), "rule": (cut, ruled), "with": (cut, batch)}
    for name, (truncation, scored) in scorings.items():
        trainer._filtered = scoring = FilteredScoring(truncation)
        # in one part, so that its stats are of all rows
        old = trainer._score(trainer.model, scored, compact=False)[0]
        ratio = (old - batch["sampling_per_token_logps"])[mask].double().exp()
        error = float(ratio.std() / len(ratio) ** 0.5)
        result[name] = {"mean": float(ratio.mean()), "error": error, "largest": float((ratio - 1).abs().max())}
        if stats := scoring.stats(mask):
            result["outside"] = float(stats["rollout/outside_fraction"])
    return result


def main() -> None:
    """Train, sample, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--length", type=int, default=32, help="at most 40")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--rounding", help="of the engine's weights: int8, int4, fp8")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of trainer and engine")
    parser.add_argument("--trl-6789", action="store_true", help="the cuts of TRL's issue 6789")
    options = parser.parse_args()
    data = tiny_prompts()
    if options.model is not None:
        data = Dataset.from_dict({"prompt": [f"Tell me about the number {i}." for i in range(32)]})
    model = options.folder / "model" if options.url else options.model or save_tiny_model(options.folder / "model")
    trainer = train(options, model, data)
    lines = (options.folder / "run" / "metrics.jsonl").read_text().splitlines()
    keys = ("kl_k1", "kl_k3", "logp_diff_max")
    trained = [
        {key: row[f"offpolicy/mismatch/{key}"] for key in keys}
        | {"outside": row["offpolicy/rollout/outside_fraction"], "kl": row["kl"]}
        for row in map(json.loads, lines)
        if "loss" in row
    ]
    wanted = TRL_6789 if options.trl_6789 else CUTS
    cuts = {name: sample(trainer, data, cut, options.prompts) for name, cut in wanted.items()}
    print(json.dumps({"trained": trained, "cuts": cuts, "no_mask": trainer.vllm_generation.no_mask}))


if __name__ == "__main__":
    main()
