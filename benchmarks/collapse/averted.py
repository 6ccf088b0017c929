"""Do the controllers avert a collapse, and do they leave healthy runs alone?

    python benchmarks/collapse/averted.py RUNS [--seeds 11 12 13 14 15] [--only ess_step ...]
    python benchmarks/collapse/averted.py RUNS --report      # writes results.json and averted.svg

The runs take a quarter of an hour on an idle core. Every case is a pair of runs from one seed, without and with a
controller. Before its first action both are the same, number by number. ``healthy`` runs have all controllers at once.
Each run ends as ``RUNS/<case>/<setting>-<seed>``; a run that is there is not repeated.
``--report`` computes everything from what the runs logged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from collapse_step import collapse_step
from train import SETTINGS, train, warmed_up

from trl_offpolicy.control import Action, Supervisor, parse_control, read_actions
from trl_offpolicy.diagnosis import MetricsLog, read_metrics
from trl_offpolicy.run_folder.layout import ACTIONS_FILE, METRICS_FILE

HERE = Path(__file__).resolve().parent
REWARD = "learner_reward"
LAST = 5
"""Logged rows at the end of a run whose mean is its reward."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t, two-sided 95 %, by number of pairs."""
GENERATIONS, HEALTHY_GENERATIONS = 60, 40
SIGNALS = {
    "chi2_token": {"pearson": -1.0, "ess_low": 1e-300},
    "ess": {"pearson": -1.0, "chi2": [1e9, 2e9, 3e9]},
    "pearson": {"chi2": [1e9, 2e9, 3e9], "ess_low": 1e-300},
}
"""An escalation that listens to one signal only."""


@dataclass(frozen=True)
class Case:
    """A setting of ``train.py`` that collapses, and the ``control`` option that is to avert it."""

    setting: str
    control: Any


CASES = {
    "ess_step": Case("queue_grows", {"controllers": {"ess_step": {}}}),
    "risk": Case("queue_grows", "stop"),
    # the band of the source, 0.99 to 1.01, is for long responses: of 11 tokens it drops most in a healthy run
    "escalation": Case("late_weights", {"controllers": {"escalation": {"low": 0.9, "high": 1.1, "systems": "warn"}}}),
}
HEALTHY = ("float", "gpg", "int4", "int4_tis", "lag2_tis")
VCPO = {"metric": "offpolicy/total/ess_sequence", "base": 1.0}
"""``ess_step`` as it was before: it follows the ESS of the products over whole responses."""
WATCHED = {"controllers": ["length_guard", "ess_step", "escalation"]}
"""``control`` of the healthy runs. Not ``resync``: here nothing is sent, so there is nothing to send again."""


def run(
    folder: Path, setting: str, seed: int, start: Any, control: Any = None, *, generations: int = GENERATIONS
) -> None:
    """One run, unless its folder has a finished one."""
    done = folder / "seconds"
    if done.is_file():
        return
    began = time.monotonic()
    train(SETTINGS[setting], seed, steps=generations, start=start, folder=folder, control=control)
    done.write_text(f"{time.monotonic() - began:.1f}\n")
    print(f"{folder.parent.name}/{folder.name}: {time.monotonic() - began:.0f} s", flush=True)


def run_all(out: Path, seeds: Sequence[int], only: Sequence[str]) -> None:
    """Every run of the cases in ``only`` that is not there yet, seed by seed."""
    torch.set_num_threads(1)
    start = warmed_up()
    for seed in seeds:
        for name, case in CASES.items():
            if name in only:
                run(out / "without" / f"{case.setting}-{seed}", case.setting, seed, start)
                run(out / name / f"{case.setting}-{seed}", case.setting, seed, start, case.control)
        for setting in HEALTHY if "healthy" in only else ():
            folder = out / "healthy" / f"{setting}-{seed}"
            run(folder, setting, seed, start, WATCHED, generations=HEALTHY_GENERATIONS)


# -------------------------------------------------------------------------------------------------------- the report


def ending(log: MetricsLog, generations: int = GENERATIONS) -> float:
    """Mean reward of the learner itself over the last rows; of a run that control ended, that of its checkpoint."""
    rewards = log.series(REWARD).values
    return mean(rewards[-LAST:]) if len(rewards) == generations else rewards[-1]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences and half the width of its 95 % interval (Student's t)."""
    count = len(differences)
    return mean(differences), T_95[count] * stdev(differences) / count**0.5


def pair(out: Path, name: str, case: Case, seed: int) -> dict[str, Any]:
    """What became of a seed without and with the controller."""
    folders = [out / place / f"{case.setting}-{seed}" for place in ("without", name)]
    without, watched = (read_metrics(folder) for folder in folders)
    actions = read_actions(folders[1] / ACTIONS_FILE)
    first = actions[0].step if actions else None
    shared = [row for row in watched.rows if first is None or row["step"] <= first]
    same = all(row[REWARD] == other[REWARD] for row, other in zip(shared, without.rows, strict=False))
    return {
        "seed": seed,
        "collapse_without": collapse_step(without, REWARD),
        "collapse_with": collapse_step(watched, REWARD),
        "reward_without": ending(without),
        "reward_with": ending(watched),
        "first_action": first,
        "actions": len(actions),
        "last_step": watched.steps[-1],
        "same_before_first_action": same,
        "first_line": actions[0].line() if actions else "",
    }


def replayed(log: MetricsLog, control: Any) -> list[Action]:
    """What controllers would do on the rows of a run in which they did nothing."""
    spec = parse_control(control)
    assert spec is not None
    watcher = Supervisor(spec)
    state, actions = watcher.start(), []
    for row in log.rows:
        state, outcome = watcher.observe(state, int(row["step"]), row)
        actions += outcome.actions
    return actions


def asks_first(log: MetricsLog) -> dict[str, int | None]:
    """The step at which an escalation would act on the rows of an uncontrolled run, by the signal it listens to."""
    asked = {name: replayed(log, {"controllers": {"escalation": options}}) for name, options in SIGNALS.items()}
    return {name: min((action.step for action in actions), default=None) for name, actions in asked.items()}


def healthy_run(folder: Path) -> dict[str, Any]:
    """A healthy run: actions of the controllers, whether policy ``stop`` would have ended it, its largest risk."""
    log = read_metrics(folder)
    return {
        "run": folder.name,
        "actions": [action.line() for action in read_actions(folder / ACTIONS_FILE)],
        "stops": len(replayed(log, "stop")),
        "largest_risk": max(log.series("offpolicy/control/collapse_risk").values),
        "actions_of_vcpo": len(replayed(log, {"controllers": {"ess_step": VCPO}})),
        "collapse": collapse_step(log, REWARD),
        "reward": ending(log, HEALTHY_GENERATIONS),
    }


def report(out: Path) -> dict[str, Any]:
    """All results, from the folders of the runs."""
    cases = {}
    for name, case in CASES.items():
        seeds = sorted(
            int(path.parent.name.rpartition("-")[2]) for path in out.glob(f"{name}/{case.setting}-*/seconds")
        )
        if len(seeds) < 2:
            continue
        pairs = [pair(out, name, case, seed) for seed in seeds]
        gain, half = interval([one["reward_with"] - one["reward_without"] for one in pairs])
        cases[name] = {
            "setting": case.setting,
            "control": case.control,
            "gain": gain,
            "gain_ci95": half,
            "collapsed_without": sum(one["collapse_without"] is not None for one in pairs),
            "collapsed_with": sum(one["collapse_with"] is not None for one in pairs),
            "pairs": pairs,
        }
        if name == "escalation":
            logs = {seed: read_metrics(out / "without" / f"{case.setting}-{seed}") for seed in seeds}
            cases[name]["asks_first"] = {str(seed): asks_first(log) for seed, log in logs.items()}
    healthy = [healthy_run(path.parent) for path in sorted(out.glob("healthy/*/seconds"))]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=HERE
    )
    return {
        "command": "python benchmarks/collapse/averted.py RUNS && python benchmarks/collapse/averted.py RUNS --report",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "generations": GENERATIONS,
        "healthy_generations": HEALTHY_GENERATIONS,
        "cases": cases,
        "healthy": healthy,
    }


def draw(out: Path, results: dict[str, Any], target: Path) -> None:
    """The learner's reward of every pair, and the learning rate's factor beside it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "collapse"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results["cases"]), figsize=(4 * len(results["cases"]), 3.2), squeeze=False)
    for axis, (name, case) in zip(axes[0], results["cases"].items(), strict=True):
        for place, colour in (("without", "tab:red"), (name, "tab:blue")):
            for number, one in enumerate(case["pairs"]):
                log = read_metrics(out / place / f"{case['setting']}-{one['seed']}" / METRICS_FILE)
                steps, values, _ = log.series(REWARD)
                label = ("without control" if place == "without" else f"with {name}") if number == 0 else None
                axis.plot(steps, values, color=colour, alpha=0.6, linewidth=1, label=label)
                if place == name:
                    axis.plot(steps[-1:], values[-1:], "o", color=colour, markersize=3)
        onset = 2 * SETTINGS[case["setting"]].onset
        axis.axvline(onset, color="black", linewidth=0.8, linestyle=":", label="the fault begins")
        axis.set(title=f"{name}: {case['setting']}", xlabel="optimizer steps", ylim=(0, 0.65))
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("reward of the learner, held-out prompts")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[11, 12, 13, 14, 15])
    parser.add_argument("--only", nargs="*", default=[*CASES, "healthy"], choices=[*CASES, "healthy"])
    parser.add_argument("--report", action="store_true", help="run nothing; the runs in RUNS become the results")
    args = parser.parse_args()
    if not args.report:
        run_all(args.runs, args.seeds, args.only)
        return
    results = report(args.runs)
    if not results["cases"]:
        parser.error(f"--report needs finished pairs of runs in RUNS, but got {args.runs}, which holds none.")
    draw(args.runs, results, HERE / "averted.svg")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    for name, case in results["cases"].items():
        print(
            f"{name}: gain {case['gain']:+.3f} +- {case['gain_ci95']:.3f}; collapsed {case['collapsed_without']} ->",
            end=" ",
        )
        print(f"{case['collapsed_with']} of {len(case['pairs'])}")
    acted = [one for one in results["healthy"] if one["actions"] or one["stops"]]
    followed = [one for one in results["healthy"] if one["actions_of_vcpo"]]
    print(f"healthy: {len(acted)} of {len(results['healthy'])} runs with an action or a stop;", end=" ")
    print(f"following the ESS of whole products: {len(followed)}")


if __name__ == "__main__":
    main()
