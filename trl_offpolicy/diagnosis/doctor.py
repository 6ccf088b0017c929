"""The doctor: judges from the files of a finished or running run how off-policy it is, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_offpolicy.diagnosis.attribution.attribute import Attribution
from trl_offpolicy.diagnosis.attribution.evidence import OBSERVED
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.fixes import fix_of
from trl_offpolicy.diagnosis.lags import LAG_TITLES, LagTable, lag_table
from trl_offpolicy.diagnosis.numbers import format_number, listed
from trl_offpolicy.diagnosis.other_doctors import OTHER_DOCTORS, Opinion
from trl_offpolicy.diagnosis.rescoring.rescore import OpenBench, attribute_run_rescored, sources_of
from trl_offpolicy.diagnosis.sync_record import describe_syncs, seen_in_syncs
from trl_offpolicy.diagnosis.thresholds import Thresholds
from trl_offpolicy.diagnosis.turns import TURN_TITLES, TurnTable, turn_table
from trl_offpolicy.diagnosis.verdict.advice import (
    ROUNDED_CORRELATE,
    ROUNDING_EXPLAINS,
    TO_LOG,
    Advice,
    advise,
    advise_after,
)
from trl_offpolicy.diagnosis.verdict.antipatterns import AntiPattern, LengthShares, find_antipatterns, length_shares
from trl_offpolicy.diagnosis.verdict.judge import AGREEMENT, WINDOW, Diagnosis, Finding, diagnose
from trl_offpolicy.diagnosis.verdict.sga import Cell
from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.run_folder.layout import PROMPT_IDS
from trl_offpolicy.run_folder.rollouts import RecordedRollouts, fetch_rows, read_rollouts
from trl_offpolicy.run_folder.run_data import MetricsLog, metrics_file, read_metrics, read_run_info
from trl_offpolicy.run_folder.syncs import read_syncs
from trl_offpolicy.stats import PREFIX

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 100
COLOURS = {"not judged": "magenta", "ok": "green", "notice": "cyan", "warning": "yellow", "critical": "red"}


@dataclass(frozen=True)
class Examination:
    """What :func:`examine` found.

    Args:
        metrics: the file that was read.
        frameworks: the frameworks whose metric names it holds.
        diagnosis: the result of the decision tree.
        antipatterns: habits that hide the fault.
        lengths: share of responses dropped by length; None without enough recorded rollouts.
        opinions: opinions of other packages.
        attribution: likely cause of an engine mismatch, from the recorded tokens; None if there is no mismatch or no
            token was recorded.
        info: ``run.json``.
        remarks: sentences on other frameworks' metric names that differ slightly from this kit's.
        by_lag: log-ratios, ESS and clips of the judged steps by version lag; None = none were logged.
        by_turn: the recorded tokens by turn; None = every response is one turn.
        advice: one configuration for all findings, in the keys of the framework that logged them; None = no finding.
        syncs: what the recorded weight syncs show, in a sentence; may be empty.
        hint: how to have causes tested with the model, or why they were not; may be empty.
    """

    metrics: Path
    frameworks: tuple[str, ...]
    diagnosis: Diagnosis
    antipatterns: tuple[AntiPattern, ...]
    lengths: LengthShares | None
    opinions: tuple[Opinion, ...]
    attribution: Attribution | None
    remarks: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    by_lag: LagTable | None = None
    by_turn: TurnTable | None = None
    advice: Advice | None = None
    syncs: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Everything that was found as plain values, for JSON."""
        lengths = None if self.lengths is None else asdict(self.lengths)
        attribution = None if self.attribution is None else asdict(self.attribution)
        return {
            "metrics": str(self.metrics),
            "frameworks": list(self.frameworks),
            "remarks": list(self.remarks),
            **self.diagnosis.as_dict(),
            "antipatterns": [asdict(one) for one in self.antipatterns],
            "dropped_by_length": lengths,
            "opinions": [asdict(one) for one in self.opinions],
            "attribution": attribution,
            "by_lag": None if self.by_lag is None else self.by_lag.as_dict(),
            "by_turn": None if self.by_turn is None else self.by_turn.as_dict(),
            "advice": None if self.advice is None else asdict(self.advice),
            "syncs": self.syncs,
            "hint": self.hint,
        }


def examine(
    run_dir: str | Path,
    thresholds: Thresholds | None = None,
    *,
    window: int = WINDOW,
    others: Sequence[str] = (),
    loss: str | None = None,
    model: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Examination:
    """Read a run and judge it.

    Args:
        run_dir: a run folder, or a metrics file of this kit, TRL, verl, SkyRL or slime
            (:func:`~trl_offpolicy.run_folder.run_data.metrics_file`).
        thresholds: limits of the decision tree; None = the defaults.
        window: number of last logged steps that count.
        others: packages to ask as well, from :data:`~.other_doctors.OTHER_DOCTORS`.
        loss: policy loss of another framework's run (:data:`~trl_offpolicy.run_folder.names.LOSSES`), on which some of
            its metrics depend.
        model: the model that the run began with, to test causes on recorded tokens; "auto" = what ``run.json`` and the
            checkpoints in the folder name, if it is on this machine; None = causes are not tested.
        note: called with the name of what is being tested.

    Raises:
        FileNotFoundError: there are no metrics, or ``model`` is given and not on this machine.
        ValueError: there is no training row, or a name in ``others`` or ``loss`` is unknown.
        ModuleNotFoundError: a package in ``others`` is not installed.
    """
    unknown = [name for name in others if name not in OTHER_DOCTORS]
    if unknown:
        raise ValueError(f"others must be among {', '.join(OTHER_DOCTORS)}, but got {', '.join(unknown)}.")
    path = metrics_file(run_dir)
    log, rollouts = read_metrics(path, loss), read_rollouts(path.parent)
    info = read_run_info(path.parent)
    opinions = tuple(OTHER_DOCTORS[name](path) for name in others)
    sources = None if model is None else sources_of(path.parent, info, model)
    return judge(
        log, rollouts, info, thresholds or Thresholds(), path=path, window=window, opinions=opinions,
        syncs=read_syncs(path.parent), sources=sources, note=note,
    )  # fmt: skip


def judge(
    log: MetricsLog,
    rollouts: RecordedRollouts | None,
    info: Mapping[str, Any],
    thresholds: Thresholds,
    *,
    path: Path,
    window: int = WINDOW,
    opinions: tuple[Opinion, ...] = (),
    syncs: Sequence[SyncReport] = (),
    sources: Mapping[int, OpenBench] | None = None,
    note: Callable[[str], None] | None = None,
) -> Examination:
    """:func:`examine` on files that were read already.

    ``sources`` opens the models that are at hand, by their step (:func:`.rescoring.rescore.sources_of`); None = none
    was asked for.
    """
    found = diagnose(log, thresholds, window=window)
    info = _in_force(info, log.rows[-window:])
    seen = seen_in_syncs(syncs, rollouts)
    attribution, rescored = None, None
    if rollouts is not None:
        attribution, rescored = attribute_run_rescored(
            rollouts, info, sources or {}, steps=found.steps, seen=seen, note=note
        )
    if attribution is not None and attribution.cause == "none":
        attribution = None  # also where the verdict is "ok": a small mismatch may have a simple cause
    return Examination(
        metrics=path,
        frameworks=log.frameworks,
        diagnosis=found,
        antipatterns=find_antipatterns(found.readings, info, thresholds, rollouts),
        lengths=None if rollouts is None else length_shares(rollouts),
        opinions=opinions,
        attribution=attribution,
        remarks=log.remarks,
        info=info,
        by_lag=lag_table(log, found.steps),
        by_turn=turn_table(rollouts),
        advice=_advice(found, attribution, log, info),
        syncs=describe_syncs(syncs),
        hint="" if attribution is None or rescored is not None else _hint(rollouts, sources, path),
    )


def _in_force(info: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> Mapping[str, Any]:
    """``run.json`` without what makes rollouts off-policy on purpose, if it has faded out in the judged rows."""
    sizes = [row.get(PREFIX + name, 0.0) for row in rows for name in ("rollout/teacher_share", "rollout/norm_noise")]
    effective = info.get("effective") or {}
    if any(size > 0 for size in sizes) or not effective:
        return info
    left = [row for row in effective.get("differences", ()) if row.get("cause") != "on_purpose"]
    return {**info, "effective": {**effective, "differences": left}}


def _hint(rollouts: RecordedRollouts | None, sources: Mapping[int, OpenBench] | None, path: Path) -> str:
    """Why causes were not tested with the model, and what to do about it; empty if nothing can be done."""
    if sources is None and not _has_prompts(rollouts):
        return ""
    if sources is None:
        folder = path.parent if path.is_file() else path
        return (
            "Causes were not tested with the model. With its weights on this machine: "
            f"trl-offpolicy doctor {folder} --model auto (or the model that the run began with)."
        )
    if not sources:
        return "The run's model is not on this machine, so causes were not tested with it: --model FOLDER."
    steps = ", ".join(map(str, sources))
    return f"No recorded prompt was sampled by the weights at hand (those after steps {steps}): nothing was tested."


def _has_prompts(rollouts: RecordedRollouts | None) -> bool:
    """True if the ids of the prompts were recorded (older runs have only their text)."""
    if rollouts is None or not len(rollouts.row):
        return False
    first = int(rollouts.row[0])
    return bool(fetch_rows(rollouts, [first], (PROMPT_IDS,))[first][PROMPT_IDS])


def _advice(
    found: Diagnosis, attribution: Attribution | None, log: MetricsLog, info: Mapping[str, Any]
) -> Advice | None:
    """One configuration for the findings. A cause that the tokens name takes the place of "engine mismatch"."""
    causes = [one.cause for one in found.findings if not one.instead]
    if attribution is not None and attribution.cause in CAUSES:
        return advise_after(attribution.cause, causes, log.frameworks, info, rate=_rate(log))
    if not causes:
        return None
    return advise(causes, log.frameworks, info, by_rounding=_by_rounding(found), rate=_rate(log))


_RATES = ("learning_rate", "actor/lr", "policy/policy_lr", "train/lr-pg_0")
"""The learning rate as TRL and ms-swift, verl, SkyRL and slime log it."""


def _rate(log: MetricsLog) -> float | None:
    """The largest learning rate since it was set, from which its schedule goes; None = not logged, or as 0.000."""
    name = log.first_logged(_RATES)
    if name is None:
        return None
    rates = [rate for rate in log.series(name).values if rate > 0]
    return max(rates[_last_cut(rates) :], default=None)


_CUT, _STEADY = 0.67, 0.95


def _last_cut(rates: Sequence[float]) -> int:
    """Where the rate was lowered at once, by a third or more, as when a run is resumed with another; else 0."""
    for place in range(len(rates) - 2, 1, -1):
        earlier, before, now, after = rates[place - 2 : place + 2]
        if now < _CUT * before and before >= _STEADY * earlier and after >= _STEADY * now:
            return place
    return 0


def _by_rounding(found: Diagnosis) -> bool:
    """True unless the distance of engine and trainer is larger than rounding makes it."""
    distance = found.readings.get("mismatch/kl_k3", found.readings.get("atleast/mismatch/kl_k3", 0.0))
    far_on_average = abs(found.readings.get("mismatch/log_ppl_diff", 0.0)) > ROUNDING_EXPLAINS
    correlation = found.readings.get("mismatch/prob_pearson", 1.0)
    # rounding is there from the first step on
    grows = any("growth/mismatch" in one.evidence for one in found.findings)
    near = distance <= ROUNDING_EXPLAINS and not far_on_average and correlation >= ROUNDED_CORRELATE
    return near and not grows


def print_examination(seen: Examination, console: Console | None = None) -> None:
    """Print the verdict, findings with their fix, one configuration, anti-patterns, and what could not be judged."""
    from rich.console import Console
    from rich.markup import escape

    out = console or Console(highlight=False)
    if console is None and not out.is_terminal:
        out = Console(highlight=False, width=_WIDTH)  # wide, so that a log file has few wrapped lines
    found = seen.diagnosis
    span = "" if found.steps is None else f", steps {found.steps[0]} to {found.steps[1]}"
    out.print(f"[bold]{escape(str(seen.metrics))}[/] ({escape(', '.join(seen.frameworks) or 'no known names')}{span})")
    out.print(f"verdict: [bold {COLOURS[found.verdict]}]{found.verdict}[/]  {escape(_headline(found))}\n")
    for finding in found.findings:
        _print_finding(out, finding)
    if found.cell is not None and found.findings:
        stands = " The findings above stand." if found.cell.remedy == "nothing" else ""
        out.print(f"[bold]bias and variance[/]: {escape(describe_cell(found.cell))}{stands}\n")
    if seen.attribution is not None:
        tested = seen.attribution.level == "logps+model"
        how = "scored again with the model" if tested else "and no test with the model"
        out.print(f"[bold]why engine and trainer differ[/], from the recorded tokens {how}")
        _print_fields(out, describe_attribution(seen.attribution, seen.info))
    if seen.by_lag is not None and seen.by_lag.stale:
        _print_table(
            out,
            "[bold]by version lag[/], current policy against the one that sampled",
            (LAG_TITLES, *(row.cells for row in seen.by_lag.rows)),
            seen.by_lag.text,
        )
    if seen.by_turn is not None:
        rows = (TURN_TITLES, *(row.cells for row in seen.by_turn.rows))
        _print_table(out, "[bold]by turn[/], over all recorded tokens", rows, seen.by_turn.text)
    if seen.advice is not None:
        _print_advice(out, seen.advice)
    for one in seen.antipatterns:
        out.print(f"[yellow]anti-pattern[/] [bold]{escape(one.name)}[/]")
        _print_fields(out, {"seen": one.seen, "instead": one.instead})
    if seen.lengths is not None and any(seen.lengths.dropped) and len(seen.lengths.longest) > 1:
        out.print(f"Dropped responses by length: {escape(str(seen.lengths))} tokens.\n")
    for opinion in seen.opinions:
        out.print(f"[bold]{opinion.package}[/]: {escape(opinion.headline)}")
        for severity, title, advice in opinion.findings:
            _print_fields(out, {severity: title, "advice": advice})
    for remark in seen.remarks:
        out.print(f"[dim]{escape(remark)}[/]")
    for text in (seen.syncs, seen.hint):
        if text:
            out.print(escape(text), soft_wrap=True)
    if found.unknown:
        out.print(f"Not judged, because the log does not hold what it needs: {escape(', '.join(found.unknown))}.")
    if how := how_to_log(seen):
        out.print(escape(how), soft_wrap=True)


def how_to_log(seen: Examination) -> str:
    """The setting with which the distance of engine and trainer would have been logged; empty where it was."""
    framework = next(iter(seen.frameworks), "")
    if AGREEMENT not in seen.diagnosis.unknown or framework not in TO_LOG:
        return ""
    if "atleast/mismatch/kl_k3" in seen.diagnosis.readings:  # the setting is on already, and logs no KL
        return "In a run of TRL, trl_offpolicy.attach logs KL k3 as well." if framework == "TRL" else ""
    return f"{framework} logs how far engine and trainer are apart with {TO_LOG[framework]}."


def print_verdict(seen: Examination, console: Console | None = None) -> None:
    """Print the verdict, the fix in words and its settings: what a person reads first, and all that many need."""
    from rich.console import Console
    from rich.markup import escape

    out = console or Console(highlight=False)
    if console is None and not out.is_terminal:
        out = Console(highlight=False, width=_WIDTH)
    verdict = seen.diagnosis.verdict
    out.print(f"verdict: [bold {COLOURS[verdict]}]{verdict}[/]  {escape(headline(seen))}")
    if fix := what_to_do(seen):
        _print_fields(out, {"fix": fix, "yaml": "" if seen.advice is None else seen.advice.yaml})


def describe_attribution(found: Attribution, info: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The attribution as labels with texts, with the next test and the fix that fits the run.

    Args:
        found: the attribution.
        info: ``run.json``.
    """
    about, fix = CAUSES.get(found.cause), fix_of(found.cause, info)
    name = found.cause.replace("_", " ") if about is None else about.title
    runner = "" if found.runner_up is None else f"; next: {found.runner_up.replace('_', ' ')}"
    detail = f", {found.detail}" if found.detail else ""
    fields = {
        "likely": f"{name}{detail} (from {OBSERVED[found.level]}, confidence {found.confidence:.2f}{runner})",
        "because": "; ".join(found.reasons),
        "check": found.next_test,
    }
    if found.parts:
        shares = (f"{name.replace('_', ' ')} {share:.0%}" for name, share in found.parts)
        fields["parts"] = f"{', '.join(shares)} of the mismatch"
    return fields if fix is None else fields | {"fix": fix.text}


def headline(seen: Examination) -> str:
    """What was found and the likely cause, in a sentence or two; the verdict itself stands before it."""
    found = seen.diagnosis
    if found.broken is not None:
        return f"{found.no_number()}."
    text = listed([one.about.title for one in found.findings]) or found.line().split("  ", 1)[1]
    if seen.attribution is None:
        return text
    about = CAUSES.get(seen.attribution.cause)
    if about is None:
        return f"{text}. Which cause is not known."
    return f"{text}. Likely cause: {about.title} (confidence {seen.attribution.confidence:.2f})."


def what_to_do(seen: Examination) -> str:
    """The fix in words: that of the cause which the tokens name, else that of the first finding; may be empty."""
    first = next(iter(seen.diagnosis.findings), None)
    if seen.attribution is not None and seen.attribution.cause in CAUSES:
        fix = fix_of(seen.attribution.cause, seen.info)
    elif first is None or first.instead:
        return "" if first is None else first.instead
    else:
        fix = fix_of(first.cause, seen.info)
    return "" if fix is None else fix.text


def describe_cell(cell: Cell) -> str:
    """Total variation and chi-square with what they ask for together."""
    sequence = "" if cell.chi2_sequence is None else f", of whole sequences {format_number(cell.chi2_sequence)}"
    return (
        f"total variation {format_number(cell.tv)}, token chi-square {format_number(cell.chi2)}{sequence}. {cell.text}"
    )


def _headline(found: Diagnosis) -> str:
    if found.broken is not None:
        return found.no_number()
    if found.findings:
        return f"{len(found.findings)} finding{'s' if len(found.findings) > 1 else ''}"
    return found.line().split("  ", 1)[1]


def _print_finding(out: Console, finding: Finding) -> None:
    from rich.markup import escape

    about = finding.about
    since = "" if finding.since is None else f", since step {finding.since}"
    out.print(
        f"[{COLOURS[finding.severity]}]{finding.severity}[/] [bold]{escape(about.title)}[/] "
        f"(branch {about.branch}{since})"
    )
    fields = {"seen": finding.symptom, "means": about.meaning, "check": about.confirm, "fix": finding.fix}
    _print_fields(out, fields)


def _print_advice(out: Console, advice: Advice) -> None:
    """Print the settings as YAML, and what comes after them."""
    from rich.markup import escape

    fields = {"yaml": advice.yaml, "later": "\n".join(advice.later), "then": judge_again(advice).removeprefix("Then ")}
    if any(fields.values()):
        out.print(f"[bold]settings[/] ({escape(advice.where)})")
        _print_fields(out, fields)


def judge_again(advice: Advice) -> str:
    """What to do about findings that may follow from the cause, in a sentence; empty if there are none."""
    titles = listed([f'"{title}"' for title in advice.follows])
    return titles and f"Then judge again: {titles} may go away with the cause."


def _print_table(out: Console, title: str, rows: Sequence[tuple[str, ...]], text: str) -> None:
    """Print rows (the first one holds the titles) and what they say."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in rows[0]:
        grid.add_column(justify="right")
    for cells in rows:
        grid.add_row(*cells)
    out.print(title)
    out.print(grid)
    out.print(f"{text}\n")


def _print_fields(out: Console, fields: dict[str, str]) -> None:
    """Print labels with their texts, wrapped beside them; empty texts are left out."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in fields.items():
        if text:
            grid.add_row(f"  {label}", escape(text))
    out.print(grid)
    out.print()
