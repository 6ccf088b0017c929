"""From the pieces' gradients to the results file: a JSON line for each estimator and for each comparison of kinds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.frontier.estimates import Moments, moments, progress, resamples, scaled_progress, spread
from benchmarks.frontier.experiment import SAMPLERS, Settings
from benchmarks.frontier.families import FAMILIES, KINDS

Line = dict[str, Any]
BATCHES = (1, 8, 64)
"""Sizes of an optimizer step, in batches, at which P is reported."""
MEASURES = {"P": progress, "P_scaled": scaled_progress}
RESAMPLES = 400


class Table:
    """Moments of every estimator for one sampler and length: one for each seed, in units of that seed's |J|^2."""

    def __init__(self, by_seed: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """``by_seed``: {seed: (estimates (n, F, P), oracle (n, P))}."""
        self.seeds = sorted(by_seed)
        self.batches = min(len(oracle) for _, oracle in by_seed.values())
        self.moments: dict[int, dict[str, Moments]] = {}
        self.oracle_norm: dict[int, float] = {}
        self.oracle_error: dict[int, float] = {}
        for seed, (estimates, oracle) in by_seed.items():
            counts = resamples(len(oracle), RESAMPLES, seed)
            own = moments(oracle, oracle, counts)
            size = own.oracle_sq[0].clamp(min=1e-12)  # an estimate below 0 means that the oracle is all noise
            self.oracle_norm[seed] = float(size.sqrt())
            self.oracle_error[seed] = float(((own.variance[0] / len(oracle)) / size).clamp(min=0).sqrt())
            self.moments[seed] = {
                name: Moments(*(part / size for part in moments(estimates[:, place], oracle, counts)))
                for place, name in enumerate(FAMILIES)
            }

    def pooled(self, names: Mapping[int, str]) -> Moments:
        """The mean over seeds, with the family ``names[seed]`` in each."""
        chosen = [self.moments[seed][name] for seed, name in names.items()]
        return Moments(*(torch.stack(parts).mean(0) for parts in zip(*chosen, strict=True)))

    def of(self, name: str) -> Moments:
        """One family over all seeds."""
        return self.pooled(dict.fromkeys(self.seeds, name))

    def best(self, kind: str, measure: str, batches: int, without: int | None = None) -> str:
        """The family of a kind with the largest progress, on all seeds but one."""
        seeds = [seed for seed in self.seeds if seed != without] or self.seeds
        names = [name for name, family in FAMILIES.items() if family.kind == kind]
        return max(
            names, key=lambda name: float(MEASURES[measure](self.pooled(dict.fromkeys(seeds, name)), batches)[0])
        )

    def held_out(self, kind: str, measure: str, batches: int) -> Tensor:
        """(1 + R,): progress of a kind, its family chosen for each seed by the other seeds."""
        names = {seed: self.best(kind, measure, batches, without=seed) for seed in self.seeds}
        return MEASURES[measure](self.pooled(names), batches)


def tables(outcomes: Iterable[Mapping[str, Any]], folder: Path) -> dict[tuple[str, int], Table]:
    """{(sampler, length): table} of finished pieces."""
    stacks: dict[tuple[str, int], dict[int, list[tuple[Tensor, Tensor]]]] = {}
    for outcome in outcomes:
        gradients = torch.load(folder / outcome["gradients"], weights_only=True)
        for sampler in SAMPLERS:
            for length, estimates in gradients[sampler].items():
                pair = (estimates, gradients["oracle"][length][0])
                stacks.setdefault((sampler, length), {}).setdefault(outcome["seed"], []).append(pair)
    found = {}
    for key, by_seed in sorted(stacks.items(), key=lambda item: (list(SAMPLERS).index(item[0][0]), item[0][1])):
        columns = {seed: tuple(zip(*pairs, strict=True)) for seed, pairs in by_seed.items() if len(pairs) > 2}
        if columns:
            found[key] = Table({seed: (torch.stack(a), torch.stack(o)) for seed, (a, o) in columns.items()})
    return found


def lines(outcomes: Sequence[Mapping[str, Any]], folder: Path, settings: Settings) -> list[Line]:
    """All lines but the first, which says where they come from."""
    found = tables(outcomes, folder)
    result = [_mismatch(key, outcomes) | _oracle(table) for key, table in found.items()]
    per_batch = settings.groups * settings.group_size
    for (sampler, length), table in found.items():
        place = {"sampler": sampler, "length": length, "batches": table.batches, "seeds": table.seeds}
        result += [{"line": "family", **place, **_family(table, name, per_batch)} for name in FAMILIES]
        for measure in MEASURES:
            for batches in BATCHES:
                chosen = {"measure": measure, "responses": batches * per_batch}
                result.append({"line": "kinds", **place, **chosen, **_kinds(table, measure, batches)})
    return result


def _mismatch(key: tuple[str, int], outcomes: Sequence[Mapping[str, Any]]) -> Line:
    """How far sampler and policy are apart, and how hard the task is for both."""
    sampler, length = key
    rows = [row for outcome in outcomes for row in outcome["measured"] if row["length"] == length]
    mine = [row for row in rows if row["sampler"] == sampler]
    ratios = torch.tensor([value for row in mine for value in row["sequence_log_ratio"]], dtype=torch.float64)
    weights = ratios.exp()
    return {
        "line": "mismatch",
        "sampler": sampler,
        "length": length,
        "kl_k3": _mean([row["kl_k3"] for row in mine]),
        "sequence_log_ratio_sd": float(ratios.std()),
        "sequence_weight_mean": float(weights.mean()),
        "ess_sequence": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "reward_policy": _mean([row["reward"] for row in rows if row["sampler"] == "oracle"]),
        "reward_sampler": _mean([row["reward"] for row in mine]),
        "responses": len(ratios),
    }


def _oracle(table: Table) -> Line:
    """The size of the true gradient, and the standard error of its estimate relative to it, for each seed."""
    norms, errors = (list(found.values()) for found in (table.oracle_norm, table.oracle_error))
    return {"oracle_norm": norms, "oracle_relative_error": errors}


def _family(table: Table, name: str, per_batch: int) -> Line:
    """Bias, variance and progress of one family in units of |J|^2, pooled over seeds."""
    pooled = table.of(name)
    line: Line = {"family": name, "kind": FAMILIES[name].kind, "mean_inner": float(pooled.inner[0])}
    parts = {"bias_sq": pooled.bias_sq, "variance": pooled.variance}
    for measure, of in MEASURES.items():
        parts |= {f"{measure}_{batches * per_batch}": of(pooled, batches) for batches in BATCHES}
    for key, values in parts.items():
        found = spread(values)
        line |= {key: found.value, f"{key}_low": found.low, f"{key}_high": found.high}
    return line


def _kinds(table: Table, measure: str, batches: int) -> Line:
    """The best family of each kind, and how the intermediate kind compares with each other kind."""
    line: Line = {}
    held = {kind: table.held_out(kind, measure, batches) for kind in KINDS}
    for kind in KINDS:
        line[f"best {kind}"] = table.best(kind, measure, batches)
        if kind != "intermediate":
            # a progress of 0 would make the ratio infinite
            found = spread(held["intermediate"] / held[kind].clamp(min=1e-9))
            line |= {f"over {kind}": found.value, f"over {kind} low": found.low, f"over {kind} high": found.high}
    return line


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def shortened(value: Any) -> Any:
    """Five significant digits."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write(path: Path, first: Line, rest: Sequence[Line]) -> None:
    """One JSON object a line, which pandas reads with ``read_json(path, lines=True)``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{key: shortened(value) for key, value in line.items()} for line in (first, *rest)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[Line]:
    """The lines of a results file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
