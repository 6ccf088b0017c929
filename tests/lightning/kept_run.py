"""Train under Lightning with a real vLLM that truncates its distribution; prints one JSON line.

    python tests/lightning/kept_run.py FOLDER [--lora] [--moe] [--url URL] [--ahead] [--transfer T] [--again]

Two optimizer steps on each of two generations under top-p 0.9. With ``--moe`` the model is a mixture of experts whose
routing is replayed too. With ``--url`` the engine is a server of FOLDER/model, which then exists, and samples one
generation ahead with ``--ahead``. With ``--again`` every batch is computed again by
``tests/engines/again.py``, which takes no adapter.
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
from engines.again import Again
from lightning_runs import module, two_generations
from tiny_models import save_tiny_model, spread

from lightning_module.generation import Generation

SHOWN = ("mismatch/logp_diff_max", "total/logp_diff_mean", "rollout/kept_ids_mean", "rollout/recomputed_cut_fraction",
         "rollout/outside_fraction", "rollout/version_lag_max", "routing/agreement")  # fmt: skip


def noted(ours: Any, model: str, *, per_generation: int = 2) -> list[dict[str, float]]:
    """What every batch of the module is if it is computed again; filled while it trains."""
    again, computed, original = Again(model, per_generation), [], Generation.micro_batch

    def micro_batch(self: Any, batch: Any) -> Any:
        inputs = original(self, batch)
        computed.append(again(inputs, ours.trainer.global_step, ours.policy))
        return inputs

    Generation.micro_batch = micro_batch  # type: ignore[method-assign]
    return computed


def main() -> None:
    """Train, then print the diagnostics of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--url")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    kind = "qwen3_moe" if options.moe else "llama"
    model = options.folder / "model" if options.url else save_tiny_model(options.folder / "model", kind)
    engine: dict[str, Any] = {"type": "vllm", "max_model_len": 64, "seed": 3}
    if options.url:
        engine = {"type": "server", "base_url": options.url, "transfer": options.transfer}
        engine["folder"] = str(options.folder / "weights")
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
    computed = noted(ours, str(model)) if options.again else []
    rows: list[dict[str, Any]] = list(two_generations(ours, options.folder, SHOWN))
    for row, found in zip(rows, computed, strict=options.again):
        row["again"] = found
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
