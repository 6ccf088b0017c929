"""A real example of every cause for docs/diagnosis.md: a case of run.py, or a short GRPO run with the fault.

python benchmarks/faults/examples.py runs/faults        # after run.py and explain.py --split tune
python benchmarks/faults/examples.py --only CAUSE ...   # these GRPO runs alone; the other examples stay as they are
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from cases import Case, load_case
from kinds import KINDS
from run import SEEDS
from transformers import LlamaConfig, LlamaForCausalLM

import trl_offpolicy as op
from trl_offpolicy.diagnosis.attribution.attribute import Attribution, attribute
from trl_offpolicy.diagnosis.attribution.bench import Bench
from trl_offpolicy.diagnosis.attribution.evidence import TokenEvidence, padded
from trl_offpolicy.diagnosis.attribution.hypotheses import run_hypotheses
from trl_offpolicy.diagnosis.attribution.recorded import recorded_evidence
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.doctor import examine
from trl_offpolicy.engines.hf import sample_completions, score_completions
from trl_offpolicy.engines.kv_cache import KVCache, with_kv_cache
from trl_offpolicy.run_folder.layout import RUN_FILE
from trl_offpolicy.run_folder.rollouts import read_rollouts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "collapse"))
import train

from benchmarks.lab.sorting import Answers, Sorter, warm_start

OUT = Path(__file__).resolve().parents[2] / "docs" / "diagnosis_examples.json"
POINTS = 120
"""Tokens of a case that are kept for the figure."""
CASES = {
    "temperature": ("smollm2", "temperature_0.9", "engine at temperature 0.9"),
    "truncated_sampling": ("smollm2", "top_p", "engine with top-p 0.9"),
    "unreported_sampling": (
        "smollm2",
        "raw_logps_at_temperature",
        "engine at temperature 0.7 that reports raw log-probs",
    ),
    "logit_processors": ("smollm2", "repetition_penalty", "engine with a repetition penalty of 1.1"),
    "model_config": ("qwen", "norm_eps", "engine with a norm epsilon of 1e-2"),
    "stale_weights": ("smollm2", "stale_lag_4", "engine four versions behind, and it does not know"),
    "wrong_adapter": ("smollm2", "adapter_scale_half", "engine with half of the adapter"),
    "precision": ("smollm2", "bf16_engine", "engine in bf16"),
    "dropout": ("smollm2", "attention_dropout", "trainer scores with attention dropout 0.1"),
    "padding": ("smollm2", "padding_attended", "trainer attends the padding of its prompts"),
    "misalignment": ("smollm2", "shift_late_1", "log-probs moved by one token"),
    "prompt_difference": ("smollm2", "doubled_bos", "engine's prompts begin with two BOS tokens"),
    "routing": ("moe", "router_bf16", "engine's router sees its input in bf16"),
    "tool_tokens": ("smollm2", "tool_tokens_in_a_quarter", "every fourth row holds a tool's output"),
}
"""Cause -> world, kind of fault, in words.

``other_weights`` follows from comparing weights or from the course of a run, ``sync_rounding`` from what a sync logs,
and ``parallelism`` from comparing settings: none is the answer to one batch.
"""
WHERE = {"smollm2": "SmolLM2-135M", "vllm": "SmolLM2-135M in vLLM", "qwen": "a small Qwen3-like model",
         "moe": "a tiny Qwen3-MoE"}  # fmt: skip


@contextmanager
def unread() -> Iterator[None]:
    """Every answer earns 0."""
    with mock.patch.object(train, "reward", lambda answers, task: torch.zeros(len(answers.ids))):
        yield


@contextmanager
def losing_tokens(share: float) -> Iterator[None]:
    """NaN for this share of the sampling log-probs."""
    sample = train.sample

    def lossy(*args: Any) -> Answers:
        answers = sample(*args)
        logps = answers.logps.clone()
        logps.view(-1)[:: round(1 / share)] = torch.nan
        return replace(answers, logps=logps)

    with mock.patch.object(train, "sample", lossy):
        yield


@contextmanager
def repeating() -> Iterator[None]:
    """The second half of every group is its first half again, as if two ranks had one seed."""
    sample = train.sample

    def again(model: Any, questions: torch.Tensor, *rest: Any) -> Answers:
        answers = sample(model, questions, *rest)
        if len(questions) != train.GROUPS * train.GENERATIONS:
            return answers  # held-out questions, which have no groups
        place = torch.arange(len(questions))
        rows = place - place % train.GENERATIONS + place % (train.GENERATIONS // 2)
        return Answers(answers.ids[rows], answers.mask[rows], answers.logps[rows])

    with mock.patch.object(train, "sample", again):
        yield


@dataclass(frozen=True)
class Run:
    """A GRPO run that has one fault, and how many generations it is watched.

    The fault is in the setting, or it is what ``fault`` changes in the loop of ``train`` while the run goes.
    """

    injected: str
    setting: train.Setting
    generations: int = 60
    fault: Callable[[], AbstractContextManager[None]] = nullcontext


def rejecting(low: float, high: float) -> op.Objective:
    """PPO's clip, responses outside of the band left out."""
    band = op.RatioBand(level="sequence_mean", low=low, high=high)
    return op.Objective(policy_loss=op.losses.PPOClip(), correction=op.Correction(keep=(band,)))


RUNS = {
    "engine_mismatch": Run("engine's weights rounded to INT3", train.Setting(train.TIS, bits=3, learning_rate=5e-4)),
    "policy_staleness": Run("rollouts 4 generations behind", train.Setting(train.TIS, lag=4, learning_rate=5e-4)),
    "token_drift": Run(
        "rollouts 4 generations behind, twice the learning rate", train.Setting(train.PLAIN, lag=4, learning_rate=1e-3)
    ),
    "weight_variance": Run(
        "engine's weights rounded to INT3, uncapped weights of whole responses",
        train.Setting(
            op.Objective(
                policy_loss=op.losses.PPOClip(),
                correction=op.Correction(weight=op.RawWeight(level="sequence")),
            ),
            bits=3,
            learning_rate=5e-4,
        ),
    ),
    "rejection_limit": Run(
        "engine's weights rounded to INT4, geometric mask 0.94 to 1.06",
        train.Setting(rejecting(0.94, 1.06), bits=4, learning_rate=5e-4),
    ),
    "correction_limit": Run(
        "engine's weights rounded to INT3, geometric mask 0.9 to 1.1",
        train.Setting(rejecting(0.9, 1.1), bits=3, learning_rate=5e-4),
    ),
    "clip_saturation": Run(
        "rollouts 16 generations behind, clipped", train.Setting(train.PLAIN, lag=16, learning_rate=1e-3)
    ),
    "length_surge": Run("a reward for every token", train.SETTINGS["length_hack"], generations=30),
    "sequence_variance": Run(
        "engine's weights rounded to INT3, capped token weights", train.Setting(train.TIS, bits=3, learning_rate=5e-4)
    ),
    "biased_reward": Run(
        "engine's weights rounded to INT2, uncapped weights of whole responses",
        train.Setting(
            op.Objective(
                policy_loss=op.losses.PPOClip(),
                correction=op.Correction(weight=op.RawWeight(level="sequence")),
            ),
            bits=2,
            learning_rate=5e-4,
        ),
        generations=20,
    ),
    "collapse": Run(
        "rollouts 16 generations behind, nothing is clipped",
        train.Setting(train.NO_CLIP, bits=8, lag=16, learning_rate=1e-3),
        generations=100,
    ),
    "no_signal": Run("a reward whose parser reads no answer", train.Setting(train.PLAIN), 12, unread),
    "engine_logprobs_missing": Run(
        "engine returns no log-probs", train.Setting(train.PLAIN), 10, partial(losing_tokens, 1.0)
    ),
    "nonfinite": Run(
        "engine returns no log-prob for one token in fifty",
        train.Setting(train.PLAIN),
        10,
        partial(losing_tokens, 0.02),
    ),
    "repeated_draws": Run(
        "two ranks that draw the same numbers", train.Setting(train.PLAIN, learning_rate=5e-4), 10, repeating
    ),
}


LEARNED = "entropy_collapse"
"""The cause that the end of a recipe shows: its task is learned, and little new is sampled."""
CACHE = "compressed_cache"
KEPT = KVCache(keep_first=2, keep_last=6)
"""The cache of its example."""
LAST_STEPS = 5
"""Logged steps of it that are judged."""


def of_case(case: Case, cause: str, injected: str) -> dict[str, Any]:
    """What was injected, how large it is, and the answers of ``attribute`` with and without what the sides declare."""
    return of_evidence(case.evidence, cause, injected, WHERE[case.world])


def of_evidence(evidence: TokenEvidence, cause: str, injected: str, where: str) -> dict[str, Any]:
    """The same of any batch."""
    alone = attribute(replace(evidence, engine=None, trainer=None, tested={}))
    best = attribute(evidence)
    sampling, trainer = (
        logps[evidence.observed] for logps in (evidence.sampling_per_token_logps, evidence.old_per_token_logps)
    )
    keep = np.linspace(0, len(sampling) - 1, min(POINTS, len(sampling))).astype(int)
    return {
        "where": where,
        "injected": injected,
        "kl_k3": float(f"{best.features.k3:.3g}"),
        "pearson": round(float(np.corrcoef(np.exp(sampling), np.exp(trainer))[0, 1]), 4),
        "said": [_sentence(alone), *([_sentence(best)] if best.cause != alone.cause else [])],
        "right": cause in (alone.cause, best.cause),
        "points": np.exp(np.stack([sampling, trainer])[:, keep]).round(4).tolist(),
    }


def _sentence(found: Attribution) -> str:
    title = CAUSES[found.cause].title if found.cause in CAUSES else found.cause
    return f"{title}: {found.reasons[0]}"


def of_cache(cache: KVCache, cause: str) -> dict[str, Any]:
    """What was injected, and the answers for a batch that a tiny model samples with a compressed KV cache."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=128, initializer_range=0.25, tie_word_embeddings=False, eos_token_id=1, **shape)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompts = [[3 + n, 9, 40 + n][: 1 + n % 3] for n in range(6) for _ in range(4)]
    with with_kv_cache(model, cache):
        generator = torch.Generator().manual_seed(0)
        ids, logps = sample_completions(model, prompts, max_tokens=16, stop_ids=[1], generator=generator)
    (scores,), (again,) = (score_completions(model, prompts, ids, rows=rows) for rows in (16, 3))
    evidence = TokenEvidence(
        sampling_per_token_logps=padded(logps),
        old_per_token_logps=scores.logps,
        rescored_per_token_logps=again.logps,
        completion_mask=np.isfinite(scores.logps),
        entropies=scores.entropies,
        token_ids=padded(ids, fill=0).astype(np.int64),
        group_ids=np.arange(len(ids)) // 4,
    )
    tested = run_hypotheses(evidence, Bench(model, prompts, ids, stop_ids=[1], pad_ids=[0]))
    return of_evidence(tested, cause, f"engine's KV cache holds {cache.text}", "a tiny Llama with random weights")


def of_run(run: Run, start: Sorter, folder: Path, cause: str) -> dict[str, Any]:
    """What was injected, and what ``doctor`` said of the run."""
    with run.fault():
        train.train(run.setting, 0, steps=run.generations, start=start, folder=folder)
    findings = examine(folder).diagnosis.findings
    return {
        "where": "a small sorting model under GRPO",
        "injected": run.injected,
        "said": [f"{CAUSES[one.cause].title} ({one.severity}): {one.symptom}" for one in findings],
        "right": cause in [one.cause for one in findings],
    }


def of_learned(folder: Path) -> dict[str, Any]:
    """What ``doctor --window 5`` says of a finished recipes/truncated_sampling."""
    findings = examine(folder, window=LAST_STEPS).diagnosis.findings
    return {
        "where": "SmolLM2-135M in vLLM",
        "injected": f"nothing: the last {LAST_STEPS} steps of recipes/truncated_sampling, whose sums are learned",
        "said": [f"{CAUSES[one.cause].title} ({one.severity}): {one.symptom}" for one in findings],
        "right": LEARNED in [one.cause for one in findings],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="cases of run.py")
    parser.add_argument("--only", nargs="+", default=[], choices=[*RUNS, LEARNED, CACHE], metavar="CAUSE")
    parser.add_argument(
        "--learned", type=Path, default=Path("runs/truncated_sampling"), help="run folder of recipes/truncated_sampling"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if (args.folder is None) != bool(args.only):
        parser.error("either a folder or --only must be given")
    found = json.loads(args.out.read_text()) if args.only else {}
    for cause, (world, name, injected) in ({} if args.only else CASES).items():
        split = KINDS[name].split
        path = args.folder / split / f"{world}-{SEEDS[split]:03d}-{name}"
        if KINDS[name].run is None:
            found[cause] = of_case(load_case(path.with_name(f"{path.name}.npz")), cause, injected)
            continue
        folder = path.with_name(f"{path.name}.run")
        rollouts = read_rollouts(folder)
        assert rollouts is not None
        evidence = recorded_evidence(rollouts, json.loads((folder / RUN_FILE).read_text()))
        assert evidence is not None
        found[cause] = of_evidence(evidence, cause, injected, WHERE[world])
    if not args.only or LEARNED in args.only:
        found[LEARNED] = of_learned(args.learned)
    if not args.only or CACHE in args.only:
        found[CACHE] = of_cache(KEPT, CACHE)
        print(CACHE, found[CACHE]["said"], flush=True)
    start = Sorter()
    warm_start(start, steps=train.WARM_UP_STEPS, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        for cause, run in RUNS.items():
            if args.only and cause not in args.only:
                continue
            found[cause] = of_run(run, start, Path(folder) / cause, cause)
            print(cause, found[cause]["said"], flush=True)
    args.out.write_text(json.dumps({cause: found[cause] for cause in CAUSES if cause in found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
