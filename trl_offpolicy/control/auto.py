"""``offpolicy: auto``: the least biased correction whose variance holds, estimated from the batches themselves.

The candidates are measured on the same responses (:mod:`trl_offpolicy.functional.estimator`): the share of the target's
mass that each *misses* (its bias), and the effective sample size that it leaves (its variance). Then

    holds(c)    ESS_c >= floor; one that is not in use must reach it a standard error (by prompt group) below ESS_c
    best        of those that hold, the least missed mass M_c; what misses no more than ``tolerance`` is equal in bias,
                and then the largest ESS counts. Where even the best misses more, all within ``tolerance`` of it are
                equal, and the missed mass of single tokens decides.

The first generation batch decides at once, before its loss. Later a candidate takes over only if it has been better
than the one in use in ``patience`` generations in a row, each time by ``margin``; at once only if the ESS of the one in
use falls below half of the floor. Of several such candidates the best takes over. A correction that has become idle,
because engine and trainer agree again, stays: there is nothing to gain by a change. The numbers of all ranks are
gathered and evaluated on the CPU, so that every rank decides the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trl_offpolicy import presets
from trl_offpolicy.control.actions import Action, append_actions
from trl_offpolicy.correction.comparing import compare, packed, unpacked
from trl_offpolicy.correction.correction import Correction
from trl_offpolicy.functional.collective import gather_rows
from trl_offpolicy.functional.intervals import t_quantile_975
from trl_offpolicy.presets.auto import AUTO, AutoOptions
from trl_offpolicy.presets.parsing import parse_correction
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.run_folder.layout import ACTIONS_FILE
from trl_offpolicy.stats import PREFIX, Stats
from trl_offpolicy.types import PolicyBatch

CORRECTION_CHOICE = "correction_choice"
"""The setting that the choice changes, as it is called in ``actions.jsonl``: the number of the candidate."""
CHOSEN_BY_AUTO = "a configured correction (offpolicy: auto changes it already)"
"""What escalation would need."""
AUTO_METRICS = ("choice", "revisions")
CANDIDATE_METRICS = ("missed", "missed_token", "cut_mass", "second_moment", "ess", "missed_ci95", "ess_ci95", "chosen")
"""``offpolicy/auto/<name>``, and ``offpolicy/auto/<candidate>/<name>`` of each candidate."""


@dataclass(frozen=True)
class Candidate:
    """A correction to choose from; ``yaml`` is the ``offpolicy`` option that makes it the only one."""

    name: str
    correction: Correction
    yaml: str


def candidates_of(preset: Preset) -> tuple[Candidate, ...]:
    """The candidates of ``offpolicy: auto``, each with the keep terms and settings that the configuration shares.

    Raises:
        ValueError: a candidate changes more than weight and keep terms, reads another ratio than old/sampling, or needs
            more than a row; or none of them is without weight and mask.
    """
    assert preset.auto is not None
    base = preset.correction or Correction()
    if base.weights:
        raise ValueError(f"offpolicy.correction.weight must be None with {AUTO}, which chooses it, but got a weight.")
    made = tuple(_candidate(one, base, preset) for one in preset.auto.candidates)
    if not any(not one.correction.weights and one.correction.keep == base.keep for one in made):
        raise ValueError(f"candidates must hold one without weight and mask, but got {[one.name for one in made]}.")
    return made


def starting_preset(preset: Preset) -> Preset:
    """The preset with a correction that reads the engine's log-probs, which holds until the first generation is judged.

    It is the last candidate with a weight; a preset without ``auto`` stays as it is.
    """
    if preset.auto is None:
        return preset
    weighted = [one.correction for one in candidates_of(preset) if one.correction.weights]
    if not weighted:
        raise ValueError("candidates must hold one with a weight, but got none.")
    return replace(preset, objective=replace(preset.objective, correction=weighted[-1]))


def _candidate(spec: Mapping[str, Any], base: Correction, preset: Preset) -> Candidate:
    where = f"candidates.{spec['name']}"
    method = {key: spec[key] for key in ("preset", "options", "correction") if key in spec}
    chosen = presets.from_mapping(method, where=where)
    own = parse_correction(spec.get("correction") or {}, where=f"{where}.correction", base=chosen.correction)
    plain = Correction(weight=own.weight, keep=own.keep)
    if chosen.objective_changes or own != plain or chosen.auto is not None:
        raise ValueError(f"{where} must set a weight and keep terms only, but got {method}.")
    merged = replace(base, weight=own.weight, keep=(*base.keep, *own.keep))
    if other := sorted(plain.required_ratios - {"old/sampling"}):
        raise ValueError(f"{where} must read 'old/sampling' only, but got {other}.")
    scope = replace(preset.objective, correction=merged).scope
    if scope not in ("row", "micro_batch"):
        raise ValueError(f"{where} must be of row scope, to be replaced while training, but got {scope!r}.")
    return Candidate(spec["name"], merged, json.dumps(method if len(method) > 1 else method.get("preset", method)))


# ------------------------------------------------------------------------------------------------------ the decision


@dataclass(frozen=True)
class Estimate:
    """What a generation says about a candidate: the numbers of :mod:`trl_offpolicy.correction.comparing`.

    ``missed_ci95`` and ``ess_ci95`` are half widths of 95 % intervals by prompt group, and ``ess_error`` is the ESS's
    standard error. All are 0 with fewer than two groups.
    """

    name: str
    missed: float
    missed_token: float
    cut_mass: float
    second_moment: float
    ess: float
    missed_ci95: float = 0.0
    ess_ci95: float = 0.0
    ess_error: float = 0.0

    def text(self) -> str:
        """The numbers in words."""
        missed, ess = f"{self.missed:.3f} +- {self.missed_ci95:.3f}", f"{self.ess:.3f} +- {self.ess_ci95:.3f}"
        return f"{self.name}: missed {missed}, ESS {ess}"


@dataclass(frozen=True)
class AutoState:
    """What is remembered between generations.

    ``choice`` is the number of the candidate in use (None before the first generation), ``revisions`` how often it
    changed, and ``better`` for each candidate the generations in a row in which it was better than the one in use.
    """

    choice: int | None = None
    revisions: int = 0
    better: tuple[int, ...] = ()


@dataclass(frozen=True)
class AutoRule:
    """The rule of ``offpolicy: auto`` as pure functions of numbers; see the module."""

    options: AutoOptions

    def holds(self, one: Estimate, *, in_use: bool) -> bool:
        """True if the variance of a candidate is low enough; one that is not in use must show it beyond its error."""
        limit = self.options.max_second_moment
        sure = one.ess if in_use else one.ess - one.ess_error
        return sure >= self.options.ess_floor and (limit is None or one.second_moment <= limit)

    def best(self, found: Sequence[Estimate], among: Sequence[int] | None = None) -> int:
        """The number of the candidate that the estimates favour; ``among`` None = of all."""
        numbers = range(len(found)) if among is None else among
        usable = [i for i in numbers if self.holds(found[i], in_use=False)]
        if not usable:
            return max(numbers, key=lambda i: (found[i].ess, -i))
        least = min(found[i].missed for i in usable)
        tolerance = self.options.tolerance
        if least <= tolerance:  # no bias to speak of: the least variance
            return max((i for i in usable if found[i].missed <= tolerance), key=lambda i: (found[i].ess, -i))
        near = [i for i in usable if found[i].missed <= least + tolerance]
        return min(near, key=lambda i: (self._token(found[i]), i))

    def is_better(self, new: Estimate, old: Estimate) -> bool:
        """True if ``new`` is better than ``old``, which is in use, by the margin."""
        if not self.holds(new, in_use=False):
            return False
        if not self.holds(old, in_use=True):
            return True
        tolerance, share = self.options.tolerance, 1 - self.options.margin
        missed, before = max(new.missed, tolerance), max(old.missed, tolerance)
        if before > tolerance and abs(new.missed - old.missed) <= tolerance:
            return self._token(new) <= share * self._token(old)
        if missed == before:  # neither misses anything
            return old.ess <= share * new.ess
        return missed <= share * before

    def _token(self, one: Estimate) -> float:
        return max(one.missed_token, self.options.token_tolerance)

    def step(self, state: AutoState, found: Sequence[Estimate]) -> tuple[AutoState, str]:
        """The state after a generation, and why it changed; empty if the choice stays."""
        if state.choice is None:
            first = self.best(found)
            return AutoState(first, 0, (0,) * len(found)), f"first generation: {self._why(found[first])}"
        old = found[state.choice]
        streaks = state.better if len(state.better) == len(found) else (0,) * len(found)
        better = tuple(count + 1 if self.is_better(one, old) else 0 for one, count in zip(found, streaks, strict=True))
        urgent = old.ess < self.options.ess_floor / 2
        needed = 1 if urgent else self.options.patience
        lasting = [i for i, count in enumerate(better) if count >= needed]
        if not lasting:
            return replace(state, better=better), ""
        wanted = self.best(found, lasting)
        why = f"better in {better[wanted]} generations in a row: {self._why(found[wanted])}; before {old.text()}"
        return AutoState(wanted, state.revisions + 1, (0,) * len(found)), why

    def _why(self, one: Estimate) -> str:
        floor = "" if self.holds(one, in_use=True) else f" (none holds the ESS floor {self.options.ess_floor:g})"
        return f"{one.text()}{floor}"


# ------------------------------------------------------------------------------------------------------- in a trainer


class AutoSession:
    """Chooses the correction of one run. It is the same for every trainer; all ranks make the same calls.

    Args:
        preset: a preset with ``auto``.
        correct: puts a correction into use; None = the owner reads :attr:`correction` itself.
        say: prints a line; None on ranks that do not print.
        records: the run folder, in which ``actions.jsonl`` lists the choices; None = nowhere.

    Raises:
        ValueError: the candidates do not fit, see :func:`candidates_of`.
    """

    def __init__(
        self,
        preset: Preset,
        *,
        correct: Callable[[Correction], None] | None = None,
        say: Callable[[str], object] | None = None,
        records: Path | None = None,
    ) -> None:
        assert preset.auto is not None
        self.candidates = candidates_of(preset)
        self._start = starting_preset(preset).correction or Correction()
        self.rule = AutoRule(preset.auto)
        self.state = AutoState()
        self.estimates: tuple[Estimate, ...] = ()
        self._correct, self._say, self._records = correct, say, records
        self._corrections = {one.name: one.correction for one in self.candidates}
        self._pending: Stats | None = None
        self._skip = False  # the rows of the first generation have decided already

    @property
    def correction(self) -> Correction:
        """The correction in use; before the first generation that of :func:`starting_preset`."""
        return self._start if self.state.choice is None else self.candidates[self.state.choice].correction

    @property
    def undecided(self) -> bool:
        """True until the first generation has been judged."""
        return self.state.choice is None

    def decide_first(self, batch: PolicyBatch, step: int) -> None:
        """Choose by the first generation batch, before its loss. All ranks call it, each with its rows."""
        self._pending = None
        self._add(batch)
        self._judge(step)
        self._skip = True

    def observe(self, batch: PolicyBatch) -> None:
        """Add a micro-batch of the present generation, on the first pass over it; nothing waits for the device."""
        if not self._skip and not self.undecided:
            self._add(batch)

    def end_generation(self, step: int) -> None:
        """Judge the generation that is over. All ranks call it before the next one is sampled."""
        self._skip = False
        if self._pending is not None:
            self._judge(step)

    def _add(self, batch: PolicyBatch) -> None:
        stats = compare(self._corrections, batch, prefix=AUTO)
        self._pending = stats if self._pending is None else self._pending.merge(stats)

    def _judge(self, step: int) -> None:
        assert self._pending is not None
        stats, self._pending = on_cpu(self._pending.all_reduce(gather_rows)), None
        values, groups = stats.compute(), _group_count(stats)
        self.estimates = tuple(_estimate(one.name, values, groups) for one in self.candidates)
        before = self.state.choice
        self.state, why = self.rule.step(self.state, self.estimates)
        if why:
            self._announce(step, before, why)
        self._put_in_use()

    def _put_in_use(self) -> None:
        if self._correct is not None and not self.undecided:
            self._correct(self.correction)

    def _announce(self, step: int, before: int | None, why: str) -> None:
        assert self.state.choice is not None
        chosen = self.candidates[self.state.choice]
        why = f"{why}. As the only one: offpolicy: {chosen.yaml}"
        action = Action(step, AUTO, CORRECTION_CHOICE, -1 if before is None else before, self.state.choice, why)
        if self._say is not None:
            self._say(f"[auto] step {step}: {chosen.name}. {why}")
        if self._records is not None:
            self._records.mkdir(parents=True, exist_ok=True)
            append_actions(self._records / ACTIONS_FILE, (action,))

    # ------------------------------------------------------------------------------------ what is logged and saved

    def metrics(self) -> dict[str, float]:
        """The choice and the numbers of the last judged generation, to log; empty before the first."""
        if self.state.choice is None:
            return {}
        logged = {f"{PREFIX}{AUTO}/choice": float(self.state.choice)}
        logged[f"{PREFIX}{AUTO}/revisions"] = float(self.state.revisions)
        for number, one in enumerate(self.estimates):
            numbers = {**asdict(one), "chosen": float(number == self.state.choice)}
            numbers = {name: numbers[name] for name in CANDIDATE_METRICS}
            logged |= {f"{PREFIX}{AUTO}/{one.name}/{name}": value for name, value in numbers.items()}
        return logged

    def state_dict(self) -> dict[str, Any]:
        """Choice and streaks as plain values, for a checkpoint; the choice by name."""
        if self.state.choice is None:
            return {}
        names = [one.name for one in self.candidates]
        return {
            "choice": names[self.state.choice],
            "revisions": self.state.revisions,
            "better": dict(zip(names, self.state.better, strict=True)),
            "estimates": [asdict(one) for one in self.estimates],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`. A choice that is no candidate any more is made anew."""
        self.state, self.estimates, self._pending, self._skip = AutoState(), (), None, False
        names = [one.name for one in self.candidates]
        if not state or state["choice"] not in names:
            return
        better = tuple(int(state["better"].get(name, 0)) for name in names)
        self.state = AutoState(names.index(state["choice"]), int(state["revisions"]), better)
        known = {one["name"]: Estimate(**one) for one in state["estimates"]}
        self.estimates = tuple(known[name] for name in names if name in known)
        self._put_in_use()

    def pending(self) -> dict[str, Any]:
        """What this rank has added up of a generation that is not over, for a checkpoint that keeps its rollouts."""
        return {"skip": self._skip, "rows": {} if self._pending is None else packed(self._pending)}

    def load_pending(self, pending: Mapping[str, Any], device: torch.device) -> None:
        """Continue within a generation, from :meth:`pending`."""
        self._skip = bool(pending["skip"])
        self._pending = unpacked(pending["rows"], device) if pending["rows"] else None


def on_cpu(stats: Stats) -> Stats:
    """The stats with their moments on the CPU, where sums do not depend on the order of threads."""

    def moved(part: Tensor) -> Tensor:
        return part.detach().cpu()

    groups = {}
    for name, group in stats.groups.items():
        moments = replace(group.moments, sums=moved(group.moments.sums), maxima=moved(group.moments.maxima))
        rows = group.rows
        if rows is not None:
            rows = replace(rows, values=moved(rows.values), ids=None if rows.ids is None else moved(rows.ids))
        groups[name] = group._replace(moments=moments, rows=rows)
    return Stats(groups)


def _group_count(stats: Stats) -> int:
    rows = next(iter(stats.groups.values())).rows
    return 0 if rows is None else len(rows.group_totals())


def _estimate(name: str, values: Mapping[str, float], groups: int) -> Estimate:
    def value(quantity: str) -> float:
        return values.get(f"{PREFIX}{AUTO}/{name}/{quantity}", 0.0)

    return Estimate(
        name=name,
        missed=value("missed"),
        missed_token=value("missed_token"),
        cut_mass=value("cut_mass"),
        second_moment=value("second_moment"),
        ess=value("ess"),
        missed_ci95=value("unmatched_ci95"),
        ess_ci95=value("ess_ci95"),
        ess_error=value("ess_ci95") / t_quantile_975(groups - 1) if groups > 1 else 0.0,
    )
