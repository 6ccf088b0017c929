"""Cases that a real vLLM engine samples. One engine a process.

for dtype in float32 bfloat16 float16; do     # tune: clean seeds, and other precisions
  python benchmarks/faults/vllm_cases.py --split tune --dtype $dtype --out runs/faults; done
python benchmarks/faults/vllm_cases.py --split report --out runs/faults     # float32: weights, prompts, the trainer
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kinds import CLEANS, KINDS, kind_of
from run import SEEDS, marker_of
from sources import MODEL, Sources
from worlds import COMPLETIONS, LENGTH, Batch, Inside, Made, Rows, World

from trl_offpolicy.diagnosis.attribution.evidence import padded
from trl_offpolicy.engines.colocate import ColocateEngine
from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.weights import ModelWeights

ROUNDINGS = {
    "float32": {"clean": None, "int8_weights": "int8", "fp8_weights": "fp8", "int4_weights": "int4"},
    "bfloat16": {"bf16_engine": None},
    "float16": {"fp16_engine": None},
}
"""Data type of the engine -> kinds that it has, and the rounding of its weights."""
INJECTED = (
    "clean", "thinking_of_the_last_turn_removed", "tool_result_as_python", "special_tokens_as_text",
    "first_shard_alone", "ema_weights", "transposed_weight", "gate_and_up_swapped", "adapter_of_two_versions",
    "int4_in_the_mlps", "mxfp4_weights", "embedding_dropout", "rows_tiled", "logps_in_bf16",
)  # fmt: skip
"""Kinds of the second round that a real engine has: in the prompts, in the weights, or behind the engine."""


@dataclass
class RealWorld(World):
    """A world whose samples a real vLLM engine makes, with the weights that the model has in the given context."""

    engine: Any = None

    def sample(self, drawing: Any = None, *, inside: Inside = nullcontext, seen: Rows | None = None,
               order: Any = None, length: int = LENGTH) -> Batch:  # fmt: skip
        if drawing is not None or order is not None:
            raise ValueError("drawing and order must be None, since vLLM draws as it does.")
        with inside():
            self.engine.sync_weights((self.engine.version or 0) + 1)
        prompts = self.prompts if seen is None else seen[::COMPLETIONS]
        rollouts = self.engine.generate(prompts, Sampling(max_tokens=length), n=COMPLETIONS)
        return Batch(self.repeated(), rollouts.completion_ids, padded(rollouts.sampling_per_token_logps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=ROUNDINGS, default="float32")
    parser.add_argument("--split", choices=SEEDS, default="report")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--clean-seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    args = parser.parse_args()
    folder = args.out / args.split
    (folder / "done").mkdir(parents=True, exist_ok=True)
    known = dict.fromkeys([*ROUNDINGS[args.dtype], *(INJECTED if args.dtype == "float32" else ())])
    names = [name for name in known if name in CLEANS or kind_of(name).split == args.split]
    cases = list(todo(folder, [name for name in names if args.kinds is None or name in args.kinds], args))
    if not cases:
        return
    sources = Sources(args.out / "models", args.model)
    engine = ColocateEngine(args.model, dtype=args.dtype, max_model_len=512)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    engine.bind(ModelWeights(sources.world("smollm2", SEEDS[args.split]).model))
    for name, seed in cases:
        world = real_world(sources.world("smollm2", seed), engine)
        world.begin(name)
        world.case(name, made(world, name, args.dtype)).save(folder)
        marker_of(folder, "vllm", seed, kind_of(name)).write_text("{}")
        print(f"made {name}, seed {seed}", flush=True)


def todo(folder: Path, names: Iterable[str], args: Any) -> Iterable[tuple[str, int]]:
    """Kinds and seeds without a finished case."""
    for name in names:
        for number in range(args.clean_seeds if name in CLEANS else 1):
            seed = SEEDS[args.split] + number
            if not marker_of(folder, "vllm", seed, kind_of(name)).exists():
                yield name, seed


def real_world(world: World, engine: ColocateEngine) -> RealWorld:
    """The same prompts and weights, sampled by vLLM."""
    return RealWorld(
        "vllm", world.seed, world.weights, world.prompts, world.stop, world.bos, world.task, world.questions,
        engine=engine,
    )  # fmt: skip


def made(world: RealWorld, name: str, dtype: str) -> Made:
    """What came of a kind: its own injection, or another precision of the engine."""
    inject = kind_of(name).inject
    if name in INJECTED and name in KINDS:
        assert inject is not None
        return inject(world)
    rounding = ROUNDINGS[dtype][name]
    world.engine.weight_rounding = rounding
    sides = {"dtype": dtype, "quantization": rounding or "none"}
    return Made(f"vLLM, {dtype}, {rounding}", world.sample(), engine=sides)


if __name__ == "__main__":
    main()
