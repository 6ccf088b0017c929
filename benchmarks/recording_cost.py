"""What recording the rollouts of a step costs: ``rollouts.parquet`` and the worst responses.

    python benchmarks/recording_cost.py [--rows 64] [--length 4096] [--micro-batches 4] [--steps 7] [--tokenizer FOLDER]

CPU time of one process by step, medians: handing the tensors over (``add``, in the loss step) and writing them
(``flush``, at the logging step), the decoding of prompts and responses apart. Without ``--tokenizer`` it is that of
``.cache/SmolLM2-135M-Instruct``; where that is absent, or with ``--tokenizer none``, a word stands for each id.
Responses are a quarter to the whole of ``--length`` long. The last line says how long a step must take for recording to
be 1 % of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trl_offpolicy.run_folder.writer import RolloutRecorder

PROMPT, VOCABULARY = 128, 40_000
TOKENIZER = Path(__file__).resolve().parents[1] / ".cache" / "SmolLM2-135M-Instruct"
NONE = "none"


def micro_batch(rows: int, length: int, generator: torch.Generator) -> dict[str, Tensor | None]:
    """What a trainer hands over: log-probs with a mismatch of 0.02 nats."""

    def normal() -> Tensor:
        return torch.randn(rows, length, generator=generator)

    lengths = torch.randint(length // 4, length, (rows, 1), generator=generator)
    mask, old = torch.arange(length) < lengths, -normal().abs()
    return {
        "prompt_ids": torch.randint(VOCABULARY, (rows, PROMPT), generator=generator),
        "prompt_mask": torch.ones(rows, PROMPT, dtype=torch.long),
        "completion_ids": torch.randint(VOCABULARY, (rows, length), generator=generator),
        "attention_mask": mask.long(), "completion_mask": mask, "keep_mask": mask,
        "old_per_token_logps": old, "sampling_per_token_logps": old + 0.02 * normal(),
        "entropies": normal().abs(), "weights": normal().abs(),
        "reward": torch.rand(rows, generator=generator), "advantage": torch.randn(rows, generator=generator),
        "group_id": torch.arange(rows), "policy_version": torch.zeros(rows, dtype=torch.long), "policy_versions": None,
    }  # fmt: skip


def decoder(folder: str) -> Callable[[list[int]], str]:
    """A tokenizer's ``decode``, or for :data:`NONE` a stand-in."""
    if folder == NONE:
        return lambda ids: " word" * len(ids)
    from transformers import AutoTokenizer

    decode: Callable[[list[int]], str] = AutoTokenizer.from_pretrained(folder).decode
    return decode


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rows": 64, "length": 4096, "micro-batches": 4, "steps": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    default = str(TOKENIZER) if TOKENIZER.is_dir() else NONE
    parser.add_argument("--tokenizer", default=default, help=f"folder or name, or {NONE}; here {default}")
    args = parser.parse_args()
    decode, decoding = decoder(args.tokenizer), [0.0]

    def timed(ids: list[int]) -> str:
        started = time.process_time()
        text = decode(ids)
        decoding[0] += time.process_time() - started
        return text

    seconds: dict[str, list[float]] = {"add": [], "flush": [], "of which decode": []}
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        recorder = RolloutRecorder(Path(folder), timed, rank=0)
        for step in range(args.steps + 1):
            parts = [micro_batch(args.rows // args.micro_batches, args.length, generator)
                     for _ in range(args.micro_batches)]  # fmt: skip
            times, decoding[0] = [time.process_time()], 0.0
            for part in parts:
                recorder.add(step, **part)
            times.append(time.process_time())
            recorder.flush()
            times.append(time.process_time())
            if step > 0:  # the first warms up
                for values, value in zip(seconds.values(), (times[1] - times[0], times[2] - times[1], decoding[0]),
                                         strict=True):  # fmt: skip
                    values.append(value)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    parts = ", ".join(f"{name} {value:.3f} s" for name, value in medians.items())
    print(f"{args.rows} x {args.length}, tokenizer {args.tokenizer}: {parts}")
    print(f"1 % of a step of {100 * (medians['add'] + medians['flush']):.0f} s")


if __name__ == "__main__":
    main()
