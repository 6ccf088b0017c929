"""Train with TRL on a real vLLM server under several options at once; prints one JSON line.

    python tests/engines/combined_run.py FOLDER URL --model M [--replay r3] [--transfer T] [--top-p P]
        [--ahead OLD_LOGPS] [--lag K] [--partial P] [--buffer GROUPS] [--wide] [--beta B] [--steps N] [--length L]

Before each loss the batch is computed again in another way (``again.py``). Under a configuration of
``recipes/accelerate`` the weights are sharded, and what is computed is of the rows of all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch.distributed as dist
from engines.again import DECAY, Again
from scale_out.fsdp2_on_cpu import allow_fsdp2_on_cpu
from tiny_models import spread, tiny_prompts

from trl_offpolicy.rollouts.ahead import old_policy
from trl_offpolicy.rollouts.ahead.local_weights import is_sharded
from trl_offpolicy.rollouts.replay import ReplayBuffer
from trl_offpolicy.trl.config import OffPolicyGRPOConfig
from trl_offpolicy.trl.replay import ReplayGRPOTrainer
from trl_offpolicy.trl.trainer import OffPolicyGRPOTrainer

SHOWN = {
    "mismatch": "offpolicy/mismatch/logp_diff_max", "staleness": "offpolicy/staleness/logp_diff_mean",
    "total": "offpolicy/total/logp_diff_mean", "lag": "offpolicy/rollout/version_lag_max",
    "crossing": "offpolicy/rollout/cross_version_fraction", "routing": "offpolicy/routing/agreement",
    "kept": "offpolicy/rollout/kept_ids_mean", "by_rule": "offpolicy/rollout/recomputed_cut_fraction",
    "outside": "offpolicy/rollout/outside_fraction", "kl": "kl", "loss": "loss",
}  # fmt: skip

WIDE = {"preset": "paper/tis", "correction": {"normalize": "original"}}
"""Weights that average to 1 over the whole generation batch, the replayed rows among them."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--replay", default="none")
    parser.add_argument("--transfer", default="folder")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ahead")
    parser.add_argument("--lag", type=float, default=1)
    parser.add_argument("--partial", default="finish")
    parser.add_argument("--buffer", type=int, default=0)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=8)
    return parser.parse_args()


def of_all_ranks(computed: list[dict[str, float]]) -> list[dict[str, float]]:
    """By step: the largest, the mean (all ranks have as many tokens) or the sum of the ranks. All ranks call it."""
    if not dist.is_initialized():
        return computed
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, computed)
    ways = {"mean": lambda found: sum(found) / len(found), "rows": sum}
    return [
        {key: ways.get(key.split("/")[-1], max)([one[key] for one in step]) for key in step[0]}
        for step in zip(*ranks, strict=True)
    ]


def noted_exchanges() -> list[int]:
    """Grows whenever other weights are loaded into the model that is trained."""
    exchanges, original = [], old_policy.loaded

    def loaded(model: Any, *args: Any, **named: Any) -> Any:
        exchanges.append(1)
        return original(model, *args, **named)

    old_policy.loaded = loaded  # type: ignore[assignment]
    return exchanges


def main() -> None:
    """Train and print what was logged beside what was computed again."""
    options = parse()
    per_generation = 1 if options.ahead or options.buffer else 2
    again, computed, exchanges = Again(options.model, per_generation), [], noted_exchanges()  # no rank shards its model
    fsdp2 = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if fsdp2:
        allow_fsdp2_on_cpu()
    ahead = {"lag": options.lag, "partial": options.partial, "old_logps": options.ahead}
    ahead |= {"ewma_decay": DECAY} if options.ahead == "ewma" else {}
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"),
        use_cpu=True,
        accelerator_config={"use_configured_state": fsdp2},
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=options.url,
        engine={"transfer": options.transfer, "retries": 1, "timeout": 300.0},
        async_rollouts=ahead if options.ahead else None,
        routing_replay=options.replay,
        top_p=options.top_p,
        beta=options.beta,
        generation_kwargs={"ignore_eos": True},
        offpolicy=WIDE if options.wide else "paper/tis",
        learning_rate=options.rate,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        steps_per_generation=per_generation,
        num_generations=4,
        max_completion_length=options.length,
        logging_steps=1,
        save_strategy="no",
        write_report=False,
        noise_floor_steps=0,
        disable_tqdm=True,
        control=None,
    )
    kind, more = OffPolicyGRPOTrainer, {}
    if options.buffer:
        buffer = ReplayBuffer(options.folder / "buffer", max_rows=1000)
        kind, more = ReplayGRPOTrainer, {"replay": buffer, "replay_groups": options.buffer}
    trainer = kind(options.model, spread, args, train_dataset=tiny_prompts(), **more)
    original = trainer._compute_loss

    def noted(model: Any, inputs: dict[str, Any]) -> Any:
        found = again(inputs, trainer.state.global_step, trainer.accelerator.unwrap_model(model))
        computed.append(found | {"exchanges": len(exchanges), "sharded": is_sharded(trainer.model)})
        return original(model, inputs)

    trainer._compute_loss = noted
    trainer.train()
    everything = of_all_ranks(computed)
    if not trainer.accelerator.is_main_process:
        return
    lines = (options.folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    logged = [{name: row.get(key) for name, key in SHOWN.items()} for row in rows]
    print(json.dumps({"logged": logged, "computed": everything}))


if __name__ == "__main__":
    main()
