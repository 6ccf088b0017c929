"""Cases that a real vLLM engine samples: clean seeds, and other precisions. One engine a process.

for dtype in float32 bfloat16 float16; do python benchmarks/faults/vllm_cases.py --dtype $dtype --out runs/faults; done
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from policies import Policy
from run import MODEL, SPLITS
from tasks import Task
from worlds import COMPLETIONS, LENGTH, PROMPTS, Batch, World

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.weights import ModelWeights

ROUNDINGS = {"float32": (None, "int8", "fp8"), "bfloat16": (None,), "float16": (None,)}


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=ROUNDINGS, default="float32")
    parser.add_argument("--split", default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    args = parser.parse_args()
    folder = args.out / args.split
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    task = Task(tokenizer)
    policy = Policy(args.model)
    policy.set_weights(torch.load(folder / "updates.pt")[0][-1])
    engine = ColocateEngine(args.model, dtype=args.dtype, max_model_len=512)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    engine.bind(ModelWeights(policy.model))
    for version, rounding in enumerate(ROUNDINGS[args.dtype]):
        engine.weight_rounding = rounding
        engine.sync_weights(version)
        for seed in args.seeds or SPLITS[args.split][0]:
            sample_case(engine, policy, task, seed, args.dtype, rounding, folder)


def sample_case(
    engine: ColocateEngine, policy: Policy, task: Task, seed: int, dtype: str, rounding: str | None, folder: Path
) -> None:
    prompts = [row.prompt_ids for row in task.rows(PROMPTS, seed=seed)]
    world = World("smollm2-vllm", seed, policy.model, prompts, [task.tokenizer.eos_token_id], {"adapter": "policy"})
    rollouts = engine.generate(prompts, Sampling(max_tokens=LENGTH), n=COMPLETIONS)
    batch = Batch(rollouts.prompt_ids, rollouts.completion_ids, padded(rollouts.sampling_per_token_logps))
    clean = dtype == "float32" and rounding is None
    fault = "clean" if clean else rounding or dtype
    sides = {"dtype": dtype, "quantization": rounding or "none"}
    world.case("none" if clean else "precision", fault, 0 if clean else 3, batch, engine=sides).save(folder)


if __name__ == "__main__":
    main()
