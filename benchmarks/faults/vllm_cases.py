"""Cases that a real vLLM engine samples: clean seeds, and other precisions. One engine a process.

for dtype in float32 bfloat16 float16; do python benchmarks/faults/vllm_cases.py --dtype $dtype --out runs/faults; done
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from kinds import CLEANS, KINDS
from run import SEEDS
from sources import MODEL, Sources
from worlds import COMPLETIONS, LENGTH, Batch, Made, World

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.weights import ModelWeights

ROUNDINGS = {
    "float32": {"clean": None, "int8_weights": "int8", "fp8_weights": "fp8", "int4_weights": "int4"},
    "bfloat16": {"bf16_engine": None},
    "float16": {"fp16_engine": None},
}
"""Data type of the engine -> kinds of fault that it has, and the rounding of its weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=ROUNDINGS, default="float32")
    parser.add_argument("--split", choices=SEEDS, default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--clean-seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    args = parser.parse_args()
    folder = args.out / args.split
    folder.mkdir(parents=True, exist_ok=True)
    sources = Sources(args.out / "models", args.model)
    seed = SEEDS[args.split]
    chosen = {name: how for name, how in ROUNDINGS[args.dtype].items()
              if name in CLEANS or KINDS[name].split == args.split}  # fmt: skip
    if not chosen:
        return
    model = sources.world("smollm2", seed).model
    engine = ColocateEngine(args.model, dtype=args.dtype, max_model_len=512)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    engine.bind(ModelWeights(model))
    for version, (kind, rounding) in enumerate(chosen.items()):
        engine.weight_rounding = rounding
        engine.sync_weights(version)
        for number in range(args.clean_seeds if kind in CLEANS else 1):
            world = sources.world("smollm2", seed + number)
            world.name = "vllm"
            sides = {"dtype": args.dtype, "quantization": rounding or "none"}
            world.case(kind, Made(f"vLLM, {args.dtype}, {rounding}", sampled(engine, world), engine=sides)).save(folder)


def sampled(engine: ColocateEngine, world: World) -> Batch:
    """A batch of the engine."""
    rollouts = engine.generate(world.prompts, Sampling(max_tokens=LENGTH), n=COMPLETIONS)
    return Batch(rollouts.prompt_ids, rollouts.completion_ids, padded(rollouts.sampling_per_token_logps))


if __name__ == "__main__":
    main()
