"""Train a tiny mixture of experts under Lightning with a real vLLM in this process; prints one JSON line.

    python tests/lightning/moe_run.py FOLDER [--replay none|r2|r3] [--rounding int4] [--url URL]

Two optimizer steps on each of two generations, as tests/engines/routing/moe_run.py does with TRL. The engine reports
its routing except with r2. With ``--url`` it is a server of FOLDER/model, which then exists.
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

SHOWN = ("routing/agreement", "routing/flip_fraction", "mismatch/logp_diff_mean", "mismatch/kl_k3",
         "staleness/logp_diff_max", "rollout/sync_agreement")  # fmt: skip


def main() -> None:
    """Train, then print the diagnostics of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replay", default="none")
    parser.add_argument("--rounding")
    parser.add_argument("--url")
    parser.add_argument("--transfer", default="folder")
    options = parser.parse_args()
    model = options.folder / "model" if options.url else save_tiny_model(options.folder / "model", "qwen3_moe")
    engine: dict[str, Any] = {"type": "vllm", "max_model_len": 64, "seed": 3, "weight_rounding": options.rounding}
    if options.url:
        engine = {"type": "server", "base_url": options.url, "transfer": options.transfer}
    if options.replay == "none":
        engine["return_routing"] = True  # r3 sets it by itself
    ours = module(
        engine,
        model=str(model),
        tokenizer=None,
        reward_funcs=spread,
        correction="paper/tis",
        routing_replay=options.replay,
        gradient_checkpointing=True,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        sync_check=options.rounding is None,
        sampling={"max_tokens": 8},
    )
    print(json.dumps(two_generations(ours, options.folder, SHOWN)))


if __name__ == "__main__":
    main()
