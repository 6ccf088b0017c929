"""Peak memory and time of log-probs, entropies and sums of p^2, with gradient: three heads, the same inputs.

    python benchmarks/head_memory.py --tokens 512 1024 --heads logits trl kit [--vocabulary 150000] [--hidden 64]
    python benchmarks/head_memory.py --layers 8 --hidden 512 --tokens 2048 --heads trl kit
    python benchmarks/head_memory.py --time --rounds 3
    python benchmarks/head_memory.py --short

``logits`` makes the (N, V) logits and takes log_softmax; ``trl`` is TRL 1.16's fused head (on a CPU without its Triton
kernels), ``kit`` is :func:`~trl_offpolicy.functional.truncated_head.truncated_log_probs`. Each runs once, forward and
backward, in a process of its own, forked from one that has computed nothing; the number is the peak of its resident
size above that before the forward, in MB. "inputs alone" is the backward of a plain sum: the gradients of hidden states
and weight, which every head has to make. With ``--layers`` hidden states come from a Llama of so many layers, and
"inputs alone" is that model's own forward and backward, without a head. ``--time`` compares CPU time in interleaved
rounds in one process, and the gradients. With ``--device cuda`` memory is what PyTorch allocated there, all in one
process, and TRL's head has its kernels.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy.functional.truncated_head import TILE, truncated_log_probs

NOTHING = "inputs alone"
MEGABYTE = 1e6


def by_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from the full logits."""
    log_p = (hidden @ weight.t()).log_softmax(-1)
    probs = log_p.exp()
    _ = probs.detach().square().sum(-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), -(probs * log_p).sum(-1)


def by_trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from TRL's fused head, in tiles of its own size."""
    from trl.trainer import utils

    chunk, wanted = utils._CHUNKED_LOGPROB_CHUNK_SIZE, ("log_probs", "entropy", "log_sum_sq_probs")
    return utils._ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, chunk, None, 1.0, wanted)[:2]


def by_kit(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from this kit's head."""
    return truncated_log_probs(hidden, weight, targets)[:2]


def by_nothing(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """No head: a sum of each input."""
    return hidden.sum(), weight.sum()


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    NOTHING: by_nothing, "logits": by_logits, "trl": by_trl, "kit": by_kit,
}  # fmt: skip


def inputs(tokens: int, args: argparse.Namespace) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
    """How to get the (N, H) hidden states; the (V, H) head; (N,) targets."""
    torch.manual_seed(0)
    targets = torch.randint(args.vocabulary, (tokens,)).to(args.device)
    if args.layers == 0:
        hidden = torch.randn(tokens, args.hidden).to(args.device).requires_grad_()
        weight = (0.3 * torch.randn(args.vocabulary, args.hidden)).to(args.device).requires_grad_()
        return lambda: hidden, weight, targets
    from transformers import LlamaConfig, LlamaModel

    shape = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 64}
    model = LlamaModel(LlamaConfig(vocab_size=args.vocabulary, **shape, **heads)).to(args.device)
    ids = targets.view(-1, min(tokens, 256))  # rows of 256 tokens; embedding and head are tied
    return lambda: model(input_ids=ids).last_hidden_state.flatten(0, 1), model.embed_tokens.weight, targets


def step(head: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Forward and backward."""
    log_probs, entropies = HEADS[head](hidden, weight, targets)
    (log_probs.sum() + 0.01 * entropies.sum()).backward()


def resident(field: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (the most since it was reset) of this process, bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def peak_of(head: str, tokens: int, args: argparse.Namespace) -> float:
    """Peak of one step above what was held before it, bytes; on a CPU for a fresh process."""
    states, weight, targets = inputs(tokens, args)
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        step(head, states(), weight, targets)
        return float(torch.cuda.max_memory_allocated() - allocated)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    step(head, states(), weight, targets)
    return resident("VmHWM") - before


def print_peaks(args: argparse.Namespace) -> None:
    """The table of peaks; on a CPU each number comes from a process of its own."""
    heads = [NOTHING, *args.heads]
    if "trl" in heads:
        import trl.trainer.utils  # noqa: F401 - loaded before any measurement
    print(f"| tokens | {' | '.join(heads)} | kit / {NOTHING} |")
    for tokens in args.tokens:
        found = {}
        for head in heads:
            if args.device != "cpu":
                found[head] = peak_of(head, tokens, args) / MEGABYTE
                continue
            with multiprocessing.get_context("fork").Pool(1) as alone:
                found[head] = alone.apply(peak_of, (head, tokens, args)) / MEGABYTE
        ratio = f"{found['kit'] / found[NOTHING]:.2f}" if "kit" in found else "-"
        print(f"| {tokens} | {' | '.join(f'{found[head]:.0f} MB' for head in heads)} | {ratio} |", flush=True)


def print_times(args: argparse.Namespace) -> None:
    """CPU seconds of forward and backward, and how far the gradients differ from the first head's."""
    for tokens in args.tokens:
        states, weight, targets = inputs(tokens, args)
        hidden = states().detach().requires_grad_()
        seconds: dict[str, list[float]] = {head: [] for head in args.heads}
        gradients: dict[str, Tensor] = {}
        for number in range(args.rounds + 1):
            for head in args.heads:
                hidden.grad = weight.grad = None
                started = time.process_time()
                step(head, hidden, weight, targets)
                if number > 0:  # the first warms up
                    seconds[head].append(time.process_time() - started)
                assert hidden.grad is not None and weight.grad is not None
                gradients.setdefault(head, torch.cat([hidden.grad.flatten(), weight.grad.flatten()]))
        first = args.heads[0]
        for head, values in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(values, seconds[first], strict=True))
            far = float((gradients[head] - gradients[first]).norm() / gradients[first].norm())
            print(f"{tokens} tokens, {head:7s} {statistics.median(values):7.2f} s, {ratio:.2f} of {first}'s, "
                  f"gradient differs by {far:.1e} of its norm", flush=True)  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=0, help="of the model before the head; 0 = random hidden states")
    parser.add_argument("--heads", nargs="+", choices=list(HEADS)[1:], default=["trl", "kit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--time", action="store_true", help="CPU time instead of memory")
    parser.add_argument("--short", action="store_true", help="sizes of a second")
    args = parser.parse_args()
    if args.time and args.device != "cpu":
        parser.error(f"--device must be cpu with --time, which measures CPU time, but got {args.device}.")
    if args.short:
        args.tokens, args.vocabulary, args.hidden, args.rounds = [256], 20_000, 64, 1
    shape: dict[str, Any] = {name: getattr(args, name) for name in ("vocabulary", "hidden", "layers")}
    where = f"{args.device}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, float32, {shape}, kit's tile {TILE}")
    (print_times if args.time else print_peaks)(args)


if __name__ == "__main__":
    main()
