"""Forward and backward of a generation batch without padding and without a prompt twice, against TRL's padding.

    python benchmarks/scoring_speed.py [--model FOLDER] [--prompt 512] [--completion 64] [--group 8] [--lengths full]
    python benchmarks/scoring_speed.py --prompt 64 --completion 512 --lengths tail

Scoring alone, with the kit's own scorer and no trainer around it (``step_profile.py`` measures whole steps): log-probs
and entropies of ``--micro-batches`` micro-batches of ``--rows`` rows, and the gradient of all weights. The candidates
are interleaved in every round. The clock is CPU time of the process on a CPU, so that other processes count little
(``OMP_NUM_THREADS=1``), and wall time on a GPU. ``--lengths tail`` draws log-normal lengths (median a quarter of
``--completion``) and prompts of half to the whole of ``--prompt``; ``full`` gives all rows one length. Printed:
medians, how many times faster than with TRL's padding, and the difference of the gradients.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.rollouts.compact import CompactScoring
from trl_offpolicy.rollouts.micro_batches import Splitting, split_rows
from trl_offpolicy.rollouts.scoring import Scorer
from trl_offpolicy.rollouts.shared_prefix import SharedPrefix

PLAIN = "TRL's padding"
CANDIDATES: dict[str, tuple[bool, Any]] = {
    PLAIN: (False, False), "trim_padding": (True, False), "share_prefix": (False, True), "both (auto)": (True, "auto"),
}  # fmt: skip


def small_model() -> Any:
    """A Llama of a million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def generation_batch(args: argparse.Namespace, vocabulary: int) -> dict[str, Tensor]:
    """Rows in random order, padded as TRL pads them."""
    dice, count = random.Random(0), args.rows * args.micro_batches
    prompts, completions = [], []
    for _ in range(count // args.group):
        wide = args.prompt if args.lengths == "full" else dice.randint(args.prompt // 2, args.prompt)
        prompts += [[dice.randrange(3, vocabulary) for _ in range(wide)]] * args.group
    for _ in range(count):
        drawn = int(dice.lognormvariate(0.0, 0.9) * args.completion / 4)
        length = args.completion if args.lengths == "full" else max(2, min(args.completion, drawn))
        completions.append([dice.randrange(3, vocabulary) for _ in range(length)])
    order = dice.sample(range(count), count)
    left, right = max(map(len, prompts)), max(map(len, completions))
    before = [[0] * (left - len(prompts[i])) + prompts[i] for i in order]
    after = [completions[i] + [0] * (right - len(completions[i])) for i in order]
    ids = {"prompt_ids": torch.tensor(before), "completion_ids": torch.tensor(after)}
    masks = {"prompt_mask": (ids["prompt_ids"] > 0).long(), "completion_mask": (ids["completion_ids"] > 0).long()}
    return {**ids, **masks, "advantages": torch.tensor([dice.gauss(0, 1) for _ in order])}


def run(model: Any, rows: dict[str, Tensor], args: argparse.Namespace, trim: bool, share: Any) -> Tensor:
    """Forward and backward over all rows; the gradient in one vector."""
    model.zero_grad()
    compact = CompactScoring(trim=trim, shared=SHARED[trim, share])
    scorer = Scorer(Sampling(max_tokens=args.completion), compact=compact)
    how = Splitting(args.micro_batches, trim=trim, sort=trim or share is True, whole_groups=share)
    for part in split_rows(rows, args.micro_batches, how):
        scores, mask = scorer(model, part), part["completion_mask"].bool()
        per_token = part["advantages"].unsqueeze(1) * scores.logps - 0.01 * scores.entropies
        (torch.where(mask, per_token, 0.0).sum() / rows["completion_mask"].sum()).backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


SHARED = {(trim, share): SharedPrefix(share, counted=True, drop_padding=trim) for trim, share in CANDIDATES.values()}
"""Kept, so that the first batch is checked once and not in every round."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name; without it a Llama of a million parameters")
    for name, value in {
        "prompt": 512,
        "completion": 64,
        "group": 8,
        "rows": 8,
        "micro-batches": 4,
        "rounds": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lengths", choices=("full", "tail"), default="full")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    model = small_model() if args.model is None else AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    model.to(args.device).train()
    rows = {name: value.to(args.device) for name, value in generation_batch(args, model.config.vocab_size).items()}
    clock = time.process_time if on_cpu else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    gradients = {}
    for number in range(args.rounds + 1):
        for name, how in CANDIDATES.items():
            if not on_cpu:
                torch.cuda.synchronize()
            started = clock()
            gradients[name] = run(model, rows, args, *how)
            if not on_cpu:
                torch.cuda.synchronize()
            if number > 0:  # the first warms up, and checks the shared path
                seconds[name].append(clock() - started)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {size:.1f} M parameters")
    print(f"{args.prompt}/{args.completion}/{args.group}, {args.rows} x {args.micro_batches} rows, {args.lengths}")
    plain = statistics.median(seconds[PLAIN])
    for name, values in seconds.items():
        median, spread = statistics.median(values), f"{min(values):.2f}-{max(values):.2f}"
        far = float((gradients[name] - gradients[PLAIN]).norm() / gradients[PLAIN].norm())
        print(f"{name:14s} {median:7.2f} s ({spread})  {plain / median:5.2f}x faster  gradient differs by {far:.1e}")


if __name__ == "__main__":
    main()
