"""Where the time of a training step goes: stock TRL, stock with its correction, and this kit, part by part.

    python benchmarks/step_profile.py --prompt 512 --completion 64 [--model FOLDER] [--device cuda]
    python benchmarks/step_profile.py --prompt 64 --completion 256 --lengths tail    # a Llama of 3 M parameters
    python benchmarks/step_profile.py --all --model .cache/SmolLM2-135M-Instruct     # three shapes, for the record

All trainers replay the same rollouts (token ids and sampling log-probs), so generation, which is the same for all, is
outside. One step is one generation batch of ``--micro-batches`` micro-batches with all their losses and gradients, all
weights learning, float32 (bfloat16 autocast on a GPU), no gradient checkpointing. The candidates are interleaved in
every round; printed are medians and, for each candidate, stock TRL's median over its own. ``--lengths tail`` draws
lengths with a long tail (log-normal, median a quarter of ``--completion``), ``full`` gives every row the same length.
Parts: scoring = forwards of the loss; old = forward for old log-probs; backward; loss = correction, objective and
measuring without the forward; record = keeping rows for rollouts.parquet; the rest is TRL's own work on the batch.

Last come the differences of loss and gradient between the kit with TRL's padding and with each setting.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from correction_cost import clock_of
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from trl_offpolicy import presets
from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.trainer import OffPolicyGRPOTrainer

SHAPES = ((64, 64, 8), (512, 128, 8), (1024, 512, 8))
"""Prompt, longest completion, group."""
KIT: dict[str, dict[str, Any]] = {
    "kit, TRL's padding": {"trim_padding": False, "share_prefix": False},
    "kit, trim_padding": {"trim_padding": True, "share_prefix": False},
    "kit, both (auto)": {"trim_padding": True, "share_prefix": "auto"},
}
PARTS = ("scoring", "old", "backward", "loss", "record", "rest")


def small_model() -> tuple[Any, Any]:
    """A Llama of 3.2 M parameters with random weights, and a tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 2048)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, initializer_range=0.05,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def rollouts(args: argparse.Namespace, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and completions, one for each row of a generation batch."""
    dice, rows = random.Random(0), args.rows * args.micro_batches
    prompts: list[list[int]] = []
    for _ in range(rows // args.group):
        length = args.prompt if args.lengths == "full" else dice.randint(args.prompt // 2, args.prompt)
        prompts += [[dice.randrange(3, vocabulary) for _ in range(length)]] * args.group
    lengths = [args.completion] * rows
    if args.lengths == "tail":
        drawn = (dice.lognormvariate(0.0, 0.9) * args.completion / 4 for _ in range(rows))
        lengths = [max(2, min(args.completion, int(value))) for value in drawn]
        lengths[dice.randrange(rows)] = args.completion
    return prompts, [[dice.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


class Timed:
    """A trainer whose generation replays rollouts, with a clock in each part."""

    def __init__(self, kind: Any, config: Any, args: argparse.Namespace, model: Any, tokenizer: Any, **options: Any):
        self.device = args.device
        on_gpu = args.device != "cpu"
        settings = config(
            output_dir=tempfile.mkdtemp(), use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=False,
            report_to="none", per_device_train_batch_size=args.rows, gradient_accumulation_steps=args.micro_batches,
            num_generations=args.group, max_completion_length=args.completion, disable_dropout=True, **options,
        )  # fmt: skip
        prompts, completions = rollouts(args, len(tokenizer))
        self.inputs = [{"prompt": f"p{i // args.group}"} for i in range(len(prompts))]
        data = Dataset.from_list(self.inputs)
        self.trainer = kind(model, _reward, settings, train_dataset=data, processing_class=tokenizer)
        self.trainer.model.train()
        self.trainer._tokenize_prompts = lambda _: (prompts, None, {})
        noise = random.Random(1)
        sampled = [[-2.0 + noise.gauss(0.0, 0.5) for _ in row] for row in completions]
        self.trainer._generate_single_turn = lambda *_, **__: (completions, sampled)
        self.trainer.use_vllm = True
        self.trainer.current_gradient_accumulation_steps = args.micro_batches
        self.count = args.micro_batches
        self.clock = clock_of(args.device)
        self.spent: dict[str, float] = defaultdict(float)
        self._where = "old"
        watched = {"_get_per_token_logps_and_entropies": None, "_record": "record", "_compute_loss": "loss"}
        for name, part in watched.items():
            if hasattr(self.trainer, name):
                setattr(self.trainer, name, partial(self._timed, getattr(self.trainer, name), part))

    def _timed(self, original: Callable[..., Any], part: str | None, *given: Any, **named: Any) -> Any:
        if part == "loss":
            self._where = "scoring"
        started = self.clock()
        try:
            return original(*given, **named)
        finally:
            self.spent[self._where if part is None else part] += self.clock() - started
            if part == "loss":
                self._where = "old"

    def step(self, seed: int) -> tuple[dict[str, float], float, Tensor]:
        """Seconds by part (and in all), loss, and the gradient in one vector."""
        self.spent.clear()
        self.trainer.model.zero_grad()
        torch.manual_seed(seed)  # all candidates shuffle alike
        self.trainer._step, self.trainer._buffered_inputs = 0, None
        total, started = 0.0, self.clock()
        for _ in range(self.count):
            inputs = self.trainer._prepare_inputs(self.inputs)
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer.compute_loss(self.trainer.model, inputs)
            before = self.clock()
            self.trainer.accelerator.backward(loss)
            self.spent["backward"] += self.clock() - before
            self.trainer._step += 1
            total += float(loss.detach())
        self.spent["all"] = self.clock() - started
        self.spent["loss"] -= self.spent["scoring"] + self.spent["record"]
        self.spent["rest"] = self.spent["all"] - sum(self.spent[part] for part in PARTS[:-1])
        gradients = [p.grad.flatten().float() for p in self.trainer.model.parameters() if p.grad is not None]
        return dict(self.spent), total, torch.cat(gradients).cpu()


def _reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def profile(args: argparse.Namespace) -> None:
    """Print the table of one shape."""
    if args.model is None:
        model, tokenizer = small_model()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    sides: dict[str, Timed] = {}
    for name, corrected in (("stock TRL", False), ("stock TRL, corrected", True)):
        options = {"vllm_importance_sampling_correction": corrected}
        sides[name] = Timed(GRPOTrainer, GRPOConfig, args, deepcopy(model), tokenizer, **options)
    for name, options in KIT.items():
        given = {**options, "offpolicy": "measure", "write_report": False, "noise_floor_steps": 0, "control": "off"}
        side = Timed(OffPolicyGRPOTrainer, OffPolicyGRPOConfig, args, deepcopy(model), tokenizer, **given)
        correction = presets.get("paper/tis").correction  # set here, because without an engine it is refused
        side.trainer.objective = replace(side.trainer.objective, correction=correction)
        sides[name] = side
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    memory: dict[str, float] = {}
    for number in range(args.rounds + 1):
        results = {}
        for name, side in sides.items():
            if args.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            seconds, *results[name] = side.step(seed=number)
            side.trainer.model.zero_grad()
            memory[name] = torch.cuda.max_memory_allocated() / 2**30 if args.device != "cpu" else 0.0
            if number > 0:  # the first warms up, and compares the shared path with the plain one
                found[name].append(seconds)
    tokens = sum(map(len, rollouts(args, len(tokenizer))[1]))
    shape = f"{args.prompt}/{args.completion}/{args.group}, {args.rows} x {args.micro_batches} rows, {args.lengths}"
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"\n{shape}: {tokens} completion tokens, {count:.1f} M parameters, {args.device}, {args.rounds} rounds")
    print(f"{'':22s}" + "".join(f"{part:>10s}" for part in (*PARTS, "all", "tokens/s", "faster")))
    stock = statistics.median(one["all"] for one in found["stock TRL"])
    for name, rounds in found.items():
        medians = [statistics.median(one.get(part, 0.0) for one in rounds) for part in (*PARTS, "all")]
        peak = f"   peak {memory[name]:.2f} GiB" if args.device != "cpu" else ""
        numbers = "".join(f"{value:10.3f}" for value in medians) + f"{tokens / medians[-1]:10.0f}"
        print(f"{name:22s}{numbers}{stock / medians[-1]:9.2f}x{peak}")
    loss, gradient = results["kit, TRL's padding"]
    for name in list(KIT)[1:]:
        other_loss, other = results[name]
        relative = float((other - gradient).norm() / gradient.norm())
        print(f"{name}: loss differs by {abs(other_loss - loss):.1e}, gradient by {relative:.1e} of its norm")


def main() -> None:
    """Profile one shape, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name; without it a Llama of 3 M parameters")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=int, default=64, help="longest")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lengths", choices=("full", "tail"), default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--all", action="store_true", help="the three shapes of docs/speed.md, with a long tail")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for prompt, completion, group in SHAPES if args.all else ((args.prompt, args.completion, args.group),):
        sizes = {"prompt": prompt, "completion": completion, "group": group}
        profile(argparse.Namespace(**{**vars(args), **sizes, **({"lengths": "tail"} if args.all else {})}))


if __name__ == "__main__":
    main()
