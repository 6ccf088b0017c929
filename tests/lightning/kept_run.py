"""Train under Lightning with a real vLLM that truncates its distribution; prints one JSON line.

    python tests/lightning/kept_run.py FOLDER [--lora] [--moe] [--url URL] [--ahead]

Two optimizer steps on each of two generations under top-p 0.9. With ``--moe`` the model is a mixture of experts whose
routing is replayed too. With ``--url`` the engine is a server of FOLDER/model, which then exists, and samples one
generation ahead with ``--ahead``.
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
from lightning_runs import module, two_generations
from tiny_models import save_tiny_model, spread

SHOWN = ("mismatch/logp_diff_max", "rollout/kept_ids_mean", "rollout/recomputed_cut_fraction",
         "rollout/outside_fraction", "rollout/version_lag_max", "routing/agreement")  # fmt: skip


def main() -> None:
    """Train, then print the diagnostics of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--ahead", action="store_true")
    options = parser.parse_args()
    kind = "qwen3_moe" if options.moe else "llama"
    model = options.folder / "model" if options.url else save_tiny_model(options.folder / "model", kind)
    engine: dict[str, Any] = {"type": "vllm", "max_model_len": 64, "seed": 3}
    if options.url:
        engine = {"type": "server", "base_url": options.url, "folder": str(options.folder / "weights")}
    adapter = {"r": 4, "target_modules": ["q_proj", "v_proj"]} if options.lora else None
    ours = module(
        engine,
        model=str(model),
        tokenizer=None,
        reward_funcs=spread,
        correction="paper/tis",
        adapter=adapter,
        routing_replay="r3" if options.moe else "none",
        async_rollouts={"lag": 1, "partial": "finish", "old_logps": "snapshot"} if options.ahead else None,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        sync_check=True,
        sampling={"max_tokens": 8, "top_p": 0.9},
    )
    print(json.dumps(two_generations(ours, options.folder, SHOWN)))


if __name__ == "__main__":
    main()
