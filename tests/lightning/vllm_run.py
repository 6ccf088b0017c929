"""Train a tiny model for three steps under Lightning with a real vLLM engine in this process; prints one JSON line.

    python tests/lightning/vllm_run.py FOLDER [--lora] [--no-sync] [--rounding int8]
    ... [--server URL --model FOLDER] [--devices 2]     # with a server in place of the engine in this process

A process of its own: an engine cannot be built twice in one. ``--no-sync`` leaves the engine at its first weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lightning_runs import Watch, data, module, trainer
from tiny_models import save_tiny_model, spread, tiny_prompts

from lightning_module import engines
from trl_offpolicy.engines.engine import SyncError, SyncReport


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--rounding")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--server")
    parser.add_argument("--model")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    if options.no_sync:

        def stay(self: Any, version: int) -> SyncReport:
            self.version = version
            return SyncReport(version=version, kind="memory", bytes=0, seconds=0.0)

        engines.ColocateEngine.sync_weights = stay  # type: ignore[method-assign, attr-defined]
    engine = {"type": "vllm", "max_model_len": 64, "seed": 3, "weight_rounding": options.rounding}
    engine |= {"exact": True} if options.exact else {}
    if options.server:
        engine = {"type": "server", "base_url": options.server, "patience": {"timeout": 60.0, "retries": 1}}
    ours = module(
        engine,
        model=options.model or str(save_tiny_model(options.folder / "model")),
        tokenizer=None,
        reward_funcs=spread,
        correction="paper/tis",
        optimizer=partial(torch.optim.SGD, lr=5.0) if options.lora else partial(torch.optim.AdamW, lr=0.01),
        adapter={"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} if options.lora else None,
        sync_check=True,
        sampling={"max_tokens": 8},
    )
    watch = Watch()
    held_out = {"val_dataset": tiny_prompts(2), "val_batch_size": 2}
    ranks = {"devices": options.devices, "strategy": "ddp"} if options.devices > 1 else {}
    owner = trainer(
        options.folder, callbacks=[watch], max_steps=3, val_check_interval=3, num_sanity_val_steps=1, **ranks
    )
    stopped = ""
    try:
        owner.fit(ours, data(micro_batch_size=8, **held_out))
    except SyncError as error:
        stopped = str(error)
    if not owner.is_global_zero:
        return
    logs = watch.logs
    print(
        json.dumps(
            {
                "mismatch": [row["offpolicy/mismatch/logp_diff_max"] for row in logs],
                "agreement": [row.get("offpolicy/rollout/sync_agreement") for row in logs],
                "bytes": [row.get("offpolicy/rollout/sync_bytes") for row in logs],
                "moved": [row["grad_norm"] for row in logs],
                "eval_reward": float(owner.callback_metrics.get("eval_reward", torch.nan)),
                "ranks": owner.world_size,
                "stopped": stopped,
                "exact": None if ours.exact.found is None else ours.exact.found.as_dict(),
                "trl": "trl" in sys.modules,
            }
        )
    )


if __name__ == "__main__":
    main()
