"""Where the time of a training step goes: stock TRL, stock with its correction, and this kit, part by part.

    python benchmarks/step_profile.py --quick                      # small sizes: does it run?
    python benchmarks/step_profile.py --prompt 512 --completion 64 [--model FOLDER] [--device cuda]
    python benchmarks/step_profile.py --all --model .cache/SmolLM2-135M-Instruct --out profile.jsonl

One step is one generation batch of ``--micro-batches`` micro-batches, with all their losses and gradients: float32
(bfloat16 autocast on a GPU), no gradient checkpointing, all weights learning, or with ``--lora R`` an adapter that is
merged for the engine. Each round vLLM, in this process, samples the batch once; all trainers learn from that first
round's tokens and log-probs, each with a model of its own, and each sends the engine its weights. The candidates are
interleaved in every round, in an order that turns; the first round warms up. Printed are medians and, for each
candidate, stock TRL's median over its own. ``--lengths tail`` draws lengths with a long tail (log-normal, median a
quarter of ``--completion``), ``full`` gives every row the same length. ``--no-engine`` leaves vLLM out and takes random
tokens.

Parts: generate = vLLM samples (the same for all); wait = waiting for it (none here: it samples between two steps);
reward; scoring = forwards of the loss; old = forward for old log-probs; backward; correct = correction, loss and their
diagnostics; record = keeping rows for rollouts.parquet; sync = sending the weights (and proving them, in the kit with
``sync``, which sends what changed); the rest is TRL's own work on the batch. peak is the most memory above what was
resident before the step (of the whole process, with all candidates' models), on a GPU the most that was allocated.

``--out`` keeps each shape's numbers as a line of JSON; a shape that is there already is only printed again. Last come
the differences of loss and gradient between the kit with TRL's padding and with each setting.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from correction_cost import clock_of
from datasets import Dataset
from head_memory import resident
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from trl_offpolicy import presets
from trl_offpolicy.config import OffPolicyGRPOConfig
from trl_offpolicy.engines.sync import WeightSync, probe_of
from trl_offpolicy.engines.weights import ModelWeights
from trl_offpolicy.engines.weights.changed import ChangedWeights
from trl_offpolicy.rollouts.scoring import sequence_logps
from trl_offpolicy.trainer import OffPolicyGRPOTrainer

SHAPES = ((64, 64, 8), (512, 128, 8), (1024, 512, 8))
"""Prompt, longest completion, group."""
QUICK = {"prompt": 24, "completion": 12, "group": 4, "rows": 4, "micro_batches": 2, "rounds": 1, "lengths": "tail"}
STOCK, CORRECTED, PLAIN = "stock TRL", "stock TRL, corrected", "kit, TRL's padding"
ALL = "kit, both and sync"
KIT: dict[str, dict[str, Any]] = {
    PLAIN: {"trim_padding": False, "share_prefix": False},
    "kit, trim_padding": {"trim_padding": True, "share_prefix": False},
    ALL: {"trim_padding": True, "share_prefix": "auto"},
}
PARTS = ("generate", "wait", "reward", "scoring", "old", "backward", "correct", "record", "sync", "rest")
_WATCHED = {
    "_get_per_token_logps_and_entropies": None,  # of the loss, or of the old policy
    "_calculate_rewards": "reward",
    "_record": "record",
    "_compute_loss": "correct",
}


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


@dataclass(frozen=True)
class Batch:
    """Token ids of prompts and completions and the sampled tokens' log-probs, one for each row."""

    prompts: list[list[int]]
    completions: list[list[int]]
    logps: list[list[float]]


def planned(args: argparse.Namespace, vocabulary: int) -> Batch:
    """Random prompts, and completions of the lengths that are to be sampled."""
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
    completions = [[dice.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
    return Batch(prompts, completions, [[-2.0 + dice.gauss(0.0, 0.5) for _ in row] for row in completions])


class Sampler:
    """vLLM in this process, which samples a batch with the planned lengths.

    Args:
        folder: of the model.
        args: the command line.
    """

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        from trl_offpolicy.engines.colocate import ColocateEngine

        self.engine = ColocateEngine(
            folder,
            dtype="float32" if args.device == "cpu" else "bfloat16",
            max_model_len=args.prompt + args.completion + 1,
            max_num_seqs=args.rows * args.micro_batches,
        )
        self.clock = clock_of(args.device)

    def sample(self, plan: Batch) -> tuple[Batch, float]:
        """The batch, and seconds; all rows run at the same time, each to its own length."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(max_tokens=len(row), ignore_eos=True, logprobs=0, temperature=1.0)
            for row in plan.completions
        ]
        started = self.clock()
        prompts = [{"prompt_token_ids": ids} for ids in plan.prompts]
        answers = self.engine.llm.generate(prompts, parameters, use_tqdm=False)
        seconds = self.clock() - started
        outputs = [answer.outputs[0] for answer in answers]
        completions = [list(one.token_ids) for one in outputs]
        logps = [
            [float(place[token].logprob) for token, place in zip(one.token_ids, one.logprobs, strict=True)]
            for one in outputs
        ]
        return Batch(plan.prompts, completions, logps), seconds


class Timed:
    """A trainer whose generation replays a batch, with a clock in each part."""

    def __init__(
        self, kind: Any, config: Any, args: argparse.Namespace, model: Any, tokenizer: Any, batch: Batch, **options: Any
    ) -> None:
        self.device = args.device
        on_gpu = args.device != "cpu"
        settings = config(
            output_dir=tempfile.mkdtemp(), use_cpu=not on_gpu, bf16=on_gpu, gradient_checkpointing=False,
            report_to="none", per_device_train_batch_size=args.rows, gradient_accumulation_steps=args.micro_batches,
            num_generations=args.group, max_completion_length=args.completion, disable_dropout=True, **options,
        )  # fmt: skip
        self.inputs = [{"prompt": f"p{i // args.group}"} for i in range(len(batch.prompts))]
        data = Dataset.from_list(self.inputs)
        if args.lora:
            model = get_peft_model(model, LoraConfig(r=args.lora, target_modules=["q_proj", "v_proj"]))
        self.trainer = kind(model, _reward, settings, train_dataset=data, processing_class=tokenizer)
        self.trainer.model.train()
        self.trainer._tokenize_prompts = lambda _: (batch.prompts, None, {})
        self.trainer._generate_single_turn = lambda *_, **__: (batch.completions, batch.logps)
        self.trainer.use_vllm = True
        self.trainer.current_gradient_accumulation_steps = args.micro_batches
        self.count = args.micro_batches
        self.clock = clock_of(args.device)
        self.spent: dict[str, float] = defaultdict(float)
        self._where = "old"
        for name, part in _WATCHED.items():
            if hasattr(self.trainer, name):
                setattr(self.trainer, name, partial(self._timed, getattr(self.trainer, name), part))
        probe = probe_of([row[:32] for row in batch.prompts[:: args.group]])
        self.sync = WeightSync(probe, lambda ids: sequence_logps(self.trainer.model, ids, pad=0))

    def _timed(self, original: Callable[..., Any], part: str | None, *given: Any, **named: Any) -> Any:
        if part == "correct":
            self._where = "scoring"
        started = self.clock()
        try:
            return original(*given, **named)
        finally:
            self.spent[self._where if part is None else part] += self.clock() - started
            if part == "correct":
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
        self.spent["correct"] -= self.spent["scoring"] + self.spent["record"]
        self.spent["rest"] = self.spent["all"] - sum(self.spent[part] for part in PARTS[:-1])
        gradients = [p.grad.flatten().float() for p in self.trainer.model.parameters() if p.grad is not None]
        return dict(self.spent), total, torch.cat(gradients).cpu()

    def learn(self) -> None:
        """Move the weights a little against their gradient, so that there is something to send."""
        with torch.no_grad():
            for parameter in self.trainer.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=1e-3)


def _reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def sides_of(args: argparse.Namespace, model: Any, tokenizer: Any, batch: Batch) -> dict[str, Timed]:
    """All candidates, each with a copy of the model."""
    sides: dict[str, Timed] = {}
    for name, corrected in ((STOCK, False), (CORRECTED, True)):
        options = {"vllm_importance_sampling_correction": corrected}
        sides[name] = Timed(GRPOTrainer, GRPOConfig, args, deepcopy(model), tokenizer, batch, **options)
    for name, options in KIT.items():
        given = {**options, "offpolicy": "measure", "write_report": False, "noise_floor_steps": 0, "control": "off"}
        side = Timed(OffPolicyGRPOTrainer, OffPolicyGRPOConfig, args, deepcopy(model), tokenizer, batch, **given)
        correction = presets.get("paper/tis").correction  # set here, because without an engine it is refused
        side.trainer.objective = replace(side.trainer.objective, correction=correction)
        sides[name] = side
    return sides


def peak_of(device: str, step: Callable[[], Any]) -> tuple[Any, float]:
    """What the step returns, and its peak memory in GiB."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        found = step()
        return found, torch.cuda.max_memory_allocated() / 2**30
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what others have freed is not this step's
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    found = step()
    return found, (resident("VmHWM") - before) / 2**30


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one shape, as plain JSON values."""
    if args.model is None:
        model, tokenizer = small_model()
        folder = tempfile.mkdtemp()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        folder = args.model
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = planned(args, len(tokenizer))
    sampler = None if args.no_engine else Sampler(folder, args)
    if sampler is not None:
        batch, _ = sampler.sample(batch)
    sides = sides_of(args, model, tokenizer, batch)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    memory: dict[str, list[float]] = {name: [] for name in sides}
    sent: dict[str, int] = {}
    first: dict[str, Any] = {}  # loss and gradient of each candidate, at the same weights
    for number in range(args.rounds + 1):
        generation = 0.0 if sampler is None else sampler.sample(batch)[1]
        names = list(sides)
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned:
            side = sides[name]
            found, peak = peak_of(args.device, partial(side.step, number))
            spent, *result = found
            first.setdefault(name, result)
            if sampler is not None:
                side.learn()
                spent["sync"], sent[name] = synced(sampler, side, number, changed=name == ALL)
            side.trainer.model.zero_grad()
            spent["generate"] = generation
            spent["all"] += generation + spent.get("sync", 0.0)
            if number > 0:  # the first warms up
                seconds[name].append(spent)
                memory[name].append(peak)
    return summary(args, model, batch, seconds, memory, sent, differences(first))


def synced(sampler: Sampler, side: Timed, number: int, *, changed: bool) -> tuple[float, int]:
    """Seconds and bytes of a sync; ``changed``: of what one step changed, with a proof, else of everything."""
    engine = sampler.engine
    engine.bind(ModelWeights(side.trainer.accelerator.unwrap_model(side.trainer.model)))
    engine._changed = ChangedWeights(whole_only=not changed)  # what it has is another trainer's
    if not changed:
        started = sampler.clock()
        report = engine.sync_weights(number)
        return sampler.clock() - started, report.bytes
    ways = {"send": engine.sync_weights, "answer": engine.score, "confirm": engine.confirm}
    side.sync(2 * number, **ways)
    side.learn()
    started = sampler.clock()
    report = side.sync(2 * number + 1, **ways)
    return sampler.clock() - started, report.bytes


def differences(results: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of each setting of the kit: how far loss and gradient (share of its norm) are from those with TRL's padding."""
    loss, gradient = results[PLAIN]
    found = {}
    for name in list(KIT)[1:]:
        other_loss, other = results[name]
        found[name] = abs(other_loss - loss), float((other - gradient).norm() / gradient.norm())
    return found


def summary(
    args: argparse.Namespace,
    model: Any,
    batch: Batch,
    seconds: dict[str, list[dict[str, float]]],
    memory: dict[str, list[float]],
    sent: dict[str, int],
    apart: dict[str, tuple[float, float]],
) -> dict[str, Any]:
    """Medians over the rounds."""
    return {
        "shape": shape_of(args),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "tokens": sum(map(len, batch.completions)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": {
            name: {part: statistics.median(one.get(part, 0.0) for one in rounds) for part in (*PARTS, "all")}
            for name, rounds in seconds.items()
        },
        "peak_gib": {name: statistics.median(values) for name, values in memory.items()},
        "sync_bytes": sent,
        "apart": apart,
    }


def shape_of(args: argparse.Namespace) -> str:
    """What was measured, in words; equal words mean the same measurement."""
    rows = f"{args.prompt}/{args.completion}/{args.group}, {args.rows} x {args.micro_batches} rows, {args.lengths}"
    what = "a Llama of 3 M" if args.model is None else Path(args.model).name
    engine = "no engine" if args.no_engine else "vLLM"
    learns = f"LoRA r {args.lora}" if args.lora else "all weights"
    return f"{rows}, {what}, {learns}, {engine}, {args.device}, {args.rounds} rounds"


def show(found: dict[str, Any]) -> None:
    """Print the table of one shape."""
    count = found["parameters"] / 1e6
    print(f"\n{found['shape']}: {found['tokens']} completion tokens, {count:.1f} M parameters")
    print(f"{'':22s}" + "".join(f"{part:>9s}" for part in (*PARTS, "all", "tokens/s", "faster", "peak GiB", "sync MB")))
    stock = found["seconds"][STOCK]["all"]
    for name, parts in found["seconds"].items():
        numbers = "".join(f"{parts[part]:9.3f}" for part in (*PARTS, "all")) + f"{found['tokens'] / parts['all']:9.0f}"
        sent = found["sync_bytes"].get(name, 0) / 1e6
        print(f"{name:22s}{numbers}{stock / parts['all']:8.2f}x{found['peak_gib'][name]:9.2f}{sent:9.1f}")
    for name, (loss, gradient) in found["apart"].items():
        print(f"{name}: loss differs by {loss:.1e}, gradient by {gradient:.1e} of its norm", flush=True)


def known_shapes(out: Path | None) -> dict[str, dict[str, Any]]:
    """What was measured before, by shape; a line cut short by a kill is left out."""
    found = {}
    for line in out.read_text().splitlines() if out is not None and out.is_file() else ():
        try:
            row = json.loads(line)
            found[row["shape"]] = row
        except (json.JSONDecodeError, KeyError):
            continue
    return found


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder; without it a Llama of 3 M parameters")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completion", type=int, default=64, help="longest")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lengths", choices=("full", "tail"), default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lora", type=int, default=0, metavar="R", help="an adapter of rank R on q_proj and v_proj")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--no-engine", action="store_true", help="without vLLM: no generation and no sync")
    parser.add_argument("--out", type=Path, help="JSON lines, to which each shape is added")
    parser.add_argument("--all", action="store_true", help="the three shapes of docs/speed.md, with a long tail")
    parser.add_argument("--only", type=int, choices=range(len(SHAPES)), help="only this shape of --all")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    args = parser.parse_args()
    if args.only is not None:
        args.prompt, args.completion, args.group = SHAPES[args.only]
        args.lengths = "tail"
    if args.quick:
        vars(args).update(QUICK)
    return args


def main() -> None:
    """Profile one shape, or all, each in a process of its own: an engine cannot be built twice in one."""
    args = parsed()
    if args.all:
        with tempfile.TemporaryDirectory() as folder:
            out = args.out or Path(folder) / "shapes.jsonl"
            given = [word for word in sys.argv[1:] if word != "--all"]
            for number in range(1 if args.quick else len(SHAPES)):  # with --quick all have the same small sizes
                command = [sys.executable, __file__, *given, "--out", str(out), "--only", str(number)]
                subprocess.run(command, check=True)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    found = known_shapes(args.out).get(shape_of(args))
    if found is None:
        found = profile(args)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
    show(found)


if __name__ == "__main__":
    main()
