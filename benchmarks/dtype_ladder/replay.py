"""Routing replay by the number of optimizer steps a generation: none, R2 or R3 with a small mixture of experts.

    python benchmarks/dtype_ladder/replay.py            # 1, 2, 4, 8 steps x 3 kinds of replay, 3 seeds
    python benchmarks/dtype_ladder/replay.py --short    # 1 and 8 steps, one seed, a tenth of the generations
    python benchmarks/dtype_ladder/replay.py --report   # the table from the results file alone

The sampler's routers differ from the learner's by noise, so some tokens go to other experts. R2 sends the learner's
tokens to the experts that the learner itself chose when the generation came in; R3 to those that the sampler chose.
Runs are written as they are done, and a call makes only those that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each run has one thread
import torch
from torch import Tensor, nn
from torch.nn import functional

import trl_offpolicy as op
from benchmarks.lab.experts import EXPERTS, ExpertBlock, with_other_routers
from benchmarks.lab.intervals import interval
from benchmarks.lab.jobs import Experiment, outcome_of, run_all, write_outcome
from benchmarks.lab.loop import Rollouts, group_advantages, learn, policy_batch
from benchmarks.lab.measure import evaluate, warm_model
from benchmarks.lab.provenance import made_here
from benchmarks.lab.sorting import Answers, Sorter, prompts, reward, sample, token_logps

HERE = Path(__file__).resolve().parent
Replay = Literal["none", "R2", "R3"]
STEPS = (1, 2, 4, 8)


class ReplayBlock(ExpertBlock):
    """Top 1 of 8 experts; ``routes`` (B, L) sends tokens to given ones, weighed by the router's own probability."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.routes: Tensor | None = None
        self.chosen: Tensor = torch.empty(0, dtype=torch.long)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, L, width) of (B, L, width)."""
        probabilities = self.router(x).softmax(-1)
        self.chosen = probabilities.argmax(-1) if self.routes is None else self.routes
        hidden = functional.gelu(torch.einsum("blw,ewh->bleh", x, self.first))
        answers = torch.einsum("bleh,ehw->blew", hidden, self.second)
        # (B, L, 8): the probability of the chosen expert at its place
        share = probabilities * functional.one_hot(self.chosen, EXPERTS)
        return torch.einsum("ble,blew->blw", share, answers)


class ReplaySorter(Sorter):
    """The lab's model with experts, whose routing can be replayed."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__(width, layers, heads)
        self.blocks = nn.ModuleList([ReplayBlock(width, heads) for _ in range(layers)])


@contextmanager
def sent_to(model: ReplaySorter, routes: Tensor | None) -> Iterator[None]:
    """A context in which tokens go to ``routes`` (layers, B, L); None = where the model's own routers send them."""
    try:
        for place, block in enumerate(model.blocks):
            block.routes = None if routes is None else routes[place]  # type: ignore[assignment]
        yield
    finally:
        for block in model.blocks:
            block.routes = None  # type: ignore[assignment]


@torch.no_grad()
def routes_of(model: ReplaySorter, ids: Tensor) -> Tensor:
    """(layers, B, L - 1): the expert of every token that ``token_logps`` reads."""
    model(ids[:, :-1])
    return torch.stack([block.chosen for block in model.blocks])  # type: ignore[misc]


@dataclass(frozen=True)
class Settings:
    """What all runs share; the fields are those of ``benchmarks/corrections``.

    Args:
        start_accuracy: sampled accuracy at which the supervised warm start ends.
        warm_up_steps: its steps at most.
        generations: rollout batches.
        groups: prompts a generation.
        group_size: answers a prompt.
        learning_rate: of Adam.
        noise: on the routers' weights of the sampler, in their standard deviations.
        questions: held-out prompts.
        answers: sampled answers to each of them.
    """

    start_accuracy: float = 0.25
    warm_up_steps: int = 400
    generations: int = 60
    groups: int = 16
    group_size: int = 8
    learning_rate: float = 3e-4
    noise: float = 0.3
    questions: int = 512
    answers: int = 4


@dataclass(frozen=True)
class Job:
    """One run."""

    replay: Replay
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"{self.replay}-{self.steps}-{self.seed}"


def start_of(settings: Settings, seed: int, folder: Path) -> Sorter:
    """The warm start of a seed."""
    return warm_model(settings, seed, folder, build=ReplaySorter)


def run(job: Job, settings: Settings, folder: Path) -> dict[str, Any]:
    """Train and evaluate; the outcome as written. A finished run is read."""
    if (done := outcome_of(job, settings, folder)) is not None:
        return done
    model = start_of(settings, job.seed, folder / "warm_starts")
    assert isinstance(model, ReplaySorter)
    began = time.process_time()
    start = evaluate(model, settings, answers=settings.answers)
    curve = train(model, job, settings)
    end = evaluate(model, settings, answers=settings.answers)
    outcome = {**asdict(job), "settings": asdict(settings), "start": start, "end": end, "curve": curve}
    outcome["cpu_seconds"] = time.process_time() - began
    write_outcome(job, outcome, folder)
    return outcome


OBJECTIVE = op.Objective(
    policy_loss=op.losses.PPOClip(low=0.2, high=0.2),
    correction=op.Correction(weight=op.TruncateWeight(level="token", max_weight=2.0), measure=("mismatch",)),
)


def train(model: ReplaySorter, job: Job, settings: Settings) -> list[dict[str, float]]:
    """GRPO with token TIS; one row a generation: KL of the mismatch, and the shares of tokens routed differently."""
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    questions, chance = (torch.Generator().manual_seed(2 * job.seed + part) for part in (0, 1))
    rows = []
    for _ in range(settings.generations):
        sampler = with_other_routers(model, settings.noise, chance)
        assert isinstance(sampler, ReplaySorter)
        asked = prompts(settings.groups, questions).repeat_interleave(settings.group_size, 0)
        answers = sample(sampler, asked, chance)
        rollouts, routes = prepared(model, sampler, answers, job.replay, settings.group_size)

        def batch_of(policy: nn.Module, of: Rollouts, index: Tensor, routes: Tensor | None = routes) -> op.PolicyBatch:
            assert isinstance(policy, ReplaySorter)
            with sent_to(policy, None if routes is None else routes[:, index]):
                return policy_batch(policy, of, index)

        before, theirs = routes_of(model, answers.ids), routes_of(sampler, answers.ids)
        stats, _ = learn(model, optimizer, OBJECTIVE, rollouts, job.steps, chance, batch_of)
        mask = answers.mask
        rows.append(
            {
                "mismatch_k3": stats.compute()["offpolicy/mismatch/kl_k3"],
                "flipped_sampler": _differ(before, theirs, mask),
                "flipped_steps": _differ(before, routes_of(model, answers.ids), mask),
                "sampler_reward": float(rollouts.rewards.mean()),
            }
        )
    return rows


def prepared(
    model: ReplaySorter, sampler: ReplaySorter, answers: Answers, replay: Replay, group_size: int
) -> tuple[Rollouts, Tensor | None]:
    """The rollouts with the learner's log-probs (pi_old), and the routes of all optimizer steps; None = free."""
    routes = None
    if replay != "none":
        routes = routes_of(model if replay == "R2" else sampler, answers.ids)
    with torch.no_grad(), sent_to(model, routes):
        old = token_logps(model, answers.ids)
    rewards = reward(answers)
    return Rollouts(answers, old, rewards, group_advantages(rewards, group_size), group_size), routes


def _differ(one: Tensor, other: Tensor, mask: Tensor) -> float:
    """The share of (layer, answer token) with other experts; ``mask`` (B, T) covers the last T positions."""
    return float((one != other)[..., -mask.shape[1] :][:, mask].float().mean())


def lines(outcomes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each run."""
    return [
        {
            "line": "replay",
            **{key: outcome[key] for key in ("replay", "steps", "seed", "cpu_seconds")},
            "start_accuracy": outcome["start"]["accuracy"],
            **{key: outcome["end"][key] for key in ("accuracy", "greedy_accuracy", "reward", "entropy")},
            **{key: sum(row[key] for row in outcome["curve"]) / len(outcome["curve"]) for key in outcome["curve"][0]},
        }
        for outcome in outcomes
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: accuracy of the learner for each number of steps and kind of replay, and paired differences."""
    runs = [row for row in rows if row["line"] == "replay"]
    head = (
        "| steps | replay | accuracy | minus no replay | KL, engine to trainer | routed differently: sampler, steps |"
    )
    body = []
    for steps in sorted({row["steps"] for row in runs}):
        base = {row["seed"]: row["accuracy"] for row in runs if row["steps"] == steps and row["replay"] == "none"}
        for replay in get_args(Replay):
            mine = [row for row in runs if (row["steps"], row["replay"]) == (steps, replay)]
            if not mine:
                continue
            pairs = [row["accuracy"] - base[row["seed"]] for row in mine if row["seed"] in base]
            other = "-" if replay == "none" or not pairs else interval(pairs).text(sign=True)
            kl, sampler, own = (
                sum(row[key] for row in mine) / len(mine) for key in ("mismatch_k3", "flipped_sampler", "flipped_steps")
            )
            body.append(
                f"| {steps} | {replay} | {interval([row['accuracy'] for row in mine]).text()} | {other} | {kl:.4f} | "
                f"{100 * sampler:.1f} %, {100 * own:.1f} % |"
            )
    return "\n".join([head, "|---" * 6 + "|", *body])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the results, print the table."""
    args = parse(arguments)
    if not args.report:
        jobs = [Job(replay, steps, seed) for seed in args.seeds for steps in args.steps for replay in get_args(Replay)]
        outcomes = run_all(jobs, args.settings, args.out, args.jobs, Experiment(start_of, run))
        found = lines(outcomes)
        command = f"python benchmarks/dtype_ladder/replay.py {shlex.join(arguments or sys.argv[1:])}".strip()
        first = {"line": "run", "command": command, **made_here(), "seeds": args.seeds}
        first |= {"cpu_seconds": sum(row["cpu_seconds"] for row in found), "settings": asdict(args.settings)}
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text("".join(json.dumps(row) + "\n" for row in (first, *found)))
    print(table([json.loads(line) for line in args.results.read_text().splitlines()]))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="1 and 8 steps, one seed, 6 generations")
    parser.add_argument("--report", action="store_true", help="run nothing, read the results file")
    parser.add_argument("--results", type=Path, help="default: replay.jsonl beside this file (--short: in --out)")
    parser.add_argument("--out", type=Path, help="runs and warm starts; default: runs/replay (--short: ..._short)")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--steps", type=int, nargs="+", help="optimizer steps a generation (default: 1 2 4 8)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each (default: 1)")
    args = parser.parse_args(arguments)
    args.settings = replace(Settings(), generations=6, answers=1) if args.short else Settings()
    args.seeds = args.seeds or ([0] if args.short else [0, 1, 2])
    args.steps = args.steps or ([1, 8] if args.short else list(STEPS))
    args.out = args.out or Path("runs/replay_short" if args.short else "runs/replay")
    args.results = args.results or (args.out / "replay.jsonl" if args.short else HERE / "replay.jsonl")
    return args


if __name__ == "__main__":
    sys.exit(main())
