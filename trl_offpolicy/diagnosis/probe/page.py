"""Shows what a probe found: on the terminal, as ``probe.json`` for scripts, as ``probe.html`` for people."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_offpolicy.diagnosis.attribution.breakdown import Breakdown, as_rollouts
from trl_offpolicy.diagnosis.attribution.evidence import OBSERVED
from trl_offpolicy.diagnosis.causes import CAUSES
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.probe.against import Against
from trl_offpolicy.diagnosis.probe.asked import Outcome
from trl_offpolicy.diagnosis.probe.exactness import Exactness
from trl_offpolicy.diagnosis.probe.probe import ProbeResult
from trl_offpolicy.diagnosis.report.page import flat_texts, render_page
from trl_offpolicy.run_folder.layout import PROBE_FILE, PROBE_PAGE
from trl_offpolicy.run_folder.strict import dump_json

if TYPE_CHECKING:
    from rich.console import Console

ROWS = (
    ("KL k3", "nats per token", "kl_k3"),
    ("KL k1", "nats per token", "kl_k1"),
    ("total variation", "", "tv"),
    ("chi2 (token)", "", "chi2_token"),
    ("chi2 (sequence)", "", "chi2_sequence"),
    ("PPL ratio", "", "ppl_ratio"),
    ("Pearson", "", "prob_pearson"),
    ("mean |log-ratio|", "nats", "logp_diff_mean"),
    ("largest |log-ratio|", "nats", "logp_diff_max"),
    ("largest probability difference", "", "prob_diff_max"),
)
"""Label, unit and name of the quantities shown."""
EXAMPLES = 3


def headline(result: ProbeResult) -> str:
    """One sentence with the cause, the KL in nats per token, its multiple of the noise floor, and the confidence."""
    found = result.attribution
    kl, floor = result.metrics["mismatch/kl_k3"], result.metrics["noise_level"]
    size = f"KL {format_number(kl)} nats per token, {format_number(kl / floor)} times the noise floor"
    if found.cause == "none":
        return f"No mismatch above the noise floor ({size})."
    if found.cause == "unknown":
        closest = "" if found.runner_up is None else f"; closest: {title_of(found.runner_up)}"
        return f"Mismatch of unknown cause ({size}{closest})."
    title = title_of(found.cause)
    detail = f", {found.detail}" if found.detail else ""
    shares = ", ".join(f"{title_of(cause)} {share:.0%}" for cause, share in found.parts)
    explained = f"; shares: {shares}" if shares else ""
    return f"Mismatch: {title}{detail} ({size}{explained}; {found.basis}, confidence {found.confidence:.2f})."


def title_of(cause: str) -> str:
    """The title of a cause, for people; the cause itself if the table has none."""
    if cause == "other_weights":
        return "other weights (stale, another adapter, or a policy that moved on)"
    return CAUSES[cause].title if cause in CAUSES else cause


def metric_rows(result: ProbeResult) -> list[tuple[str, str, str]]:
    """(label with unit, value with interval, noise floor) of :data:`ROWS`."""
    rows = []
    for label, unit, name in ROWS:
        value = format_number(result.metrics[f"mismatch/{name}"])
        width, floor = result.metrics.get(f"mismatch/{name}_ci95"), result.metrics.get(f"noise_floor/{name}")
        if width is not None:
            value += f" ± {format_number(width)}"
        label_with_unit = f"{label}, {unit}" if unit else label
        rows.append((label_with_unit, value, "" if floor is None else format_number(floor)))
    ess = result.metrics["weight_applied/ess_token"]
    return [*rows, ("ESS (token), raw weights", format_number(ess), "")]


ASKED_TITLES = ("what", "engine", "trainer", "equal?")
_OUTCOMES: dict[Outcome, str] = {
    "different": "NO",
    "not compared": "not compared",
    "no effect": "no, without effect here",
    "equal": "yes",
    "for information": "",
}
"""How the outcomes of :class:`~trl_offpolicy.diagnosis.probe.asked.Asked` are shown, in this order."""


def asked_rows(result: ProbeResult) -> list[tuple[str, str, str, str]]:
    """(what, engine, trainer, equal?) of what both sides were asked; differences first."""
    rows = sorted(result.proof.rows, key=lambda one: list(_OUTCOMES).index(one.outcome))
    return [(one.what, one.engine, one.trainer, _OUTCOMES[one.outcome]) for one in rows]


AGAINST_TITLES = ("log-probs of the same tokens", "KL k3, nats per token", "largest |d|", "tokens that differ")
SETTING_TITLES = ("setting", "first", "second")


def against_rows(found: Against) -> list[tuple[str, str, str, str]]:
    """(what is compared, KL k3 with interval, largest difference, share of tokens that differ at all)."""
    return [
        (one.label, f"{format_number(one.kl_k3)} ± {format_number(one.kl_k3_ci95)}", format_number(one.largest),
         f"{one.differ:.1%}")
        for one in found.pairs
    ]  # fmt: skip


def breakdown_rows(breakdown: Breakdown) -> list[tuple[str, str, str, str, str]]:
    """(bin, tokens, KL k3, mean |log-ratio|, share of the KL) as text."""
    return [
        (one.label, str(one.tokens), format_number(one.k3), format_number(one.logp_diff), f"{one.share:.0%}")
        for one in breakdown.bins
    ]


BREAKDOWN_TITLES = ("tokens", "KL k3", "mean |log-ratio|", "share of KL")


def write_probe(result: ProbeResult, folder: Path) -> tuple[Path, Path]:
    """Write ``probe.json`` and ``probe.html`` into ``folder``; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / PROBE_FILE, folder / PROBE_PAGE
    json_path.write_text(dump_json(as_dict(result), indent=2) + "\n", encoding="utf-8")
    html_path.write_text(render_probe(result), encoding="utf-8")
    return json_path, html_path


def as_dict(result: ProbeResult) -> dict[str, Any]:
    """Everything that the probe found except the tokens, for JSON."""
    found = result.attribution
    about = {"meaning": "", "confirm": "", "fix": ""}
    if found.cause in CAUSES:
        about = {name: getattr(CAUSES[found.cause], name) for name in about}
    return {
        "options": asdict(result.options),
        "verdict": headline(result),
        "metrics": dict(result.metrics),
        "attribution": {**asdict(found), **about},
        "recommendation": asdict(result.recommendation),
        "asked": [asdict(one) for one in result.proof.rows],
        "not_compared": list(result.proof.not_compared),
        "exact": None if result.exact is None else result.exact.as_dict(),
        "against": None if result.against is None else asdict(result.against),
        "breakdowns": [asdict(one) for one in result.breakdowns],
        "completions": len(result.completions),
        "tokens": int(result.evidence.observed.sum()),
        "seconds": dict(result.seconds),
    }  # fmt: skip


def render_probe(result: ProbeResult) -> str:
    """The page ``probe.html`` as text."""
    from trl_offpolicy.diagnosis.report.rollout_plots import draw_rollout_figures

    found = result.attribution
    runner_up = None if found.runner_up is None or found.cause == "none" else title_of(found.runner_up)
    return render_page(
        "probe.html",
        title=f"Zero-update probe: {Path(result.options.model).name}",
        headline=headline(result),
        found=found,
        about=CAUSES.get(found.cause),
        runner_up=runner_up,
        observed=OBSERVED[found.level],
        advice=result.recommendation,
        asked=asked_rows(result),
        asked_titles=ASKED_TITLES,
        exact=result.exact,
        against=result.against,
        against_titles=AGAINST_TITLES,
        against_rows=[] if result.against is None else against_rows(result.against),
        setting_titles=SETTING_TITLES,
        metrics=metric_rows(result),
        breakdown_titles=("", *BREAKDOWN_TITLES),
        breakdowns=[{"title": one.title, "rows": breakdown_rows(one)} for one in result.breakdowns],
        rollout_figures=draw_rollout_figures(as_rollouts(result.evidence)),
        examples=result.completions[:EXAMPLES],
        settings=flat_texts(_settings(result)),
    )


def _settings(result: ProbeResult) -> dict[str, Any]:
    options = asdict(result.options)
    options["prompts"] = f"{len(result.completions) // result.options.samples} prompts"
    seconds = {name: f"{value:.1f} s" for name, value in result.seconds.items()}
    return {**options, "tokens": int(result.evidence.observed.sum()), "seconds": seconds}


def print_probe(result: ProbeResult, console: Console) -> None:
    """Print the numbers, their breakdowns, verdict, cause, fix and YAML."""
    from rich.markup import escape

    evidence = result.evidence
    console.print(f"[bold]{escape(Path(result.options.model).name)}[/]: {int(evidence.observed.sum())} tokens in "
                  f"{len(result.completions)} completions, {sum(result.seconds.values()):.0f} s")  # fmt: skip
    console.print(_text_table(("mismatch", "engine / trainer", "trainer / itself"), metric_rows(result)))
    for one in result.breakdowns:
        console.print(_text_table((f"by {one.title}", *BREAKDOWN_TITLES), breakdown_rows(one)))
    if result.proof.rows:
        console.print(_text_table(("asked on both sides", *ASKED_TITLES[1:]), asked_rows(result)))
    if result.exact is not None:
        _print_exact(result.exact, console)
    if result.against is not None:
        _print_against(result.against, console)
    colour = "green" if result.attribution.cause == "none" else "yellow"
    console.print(f"[bold {colour}]{escape(headline(result))}[/]")
    for reason in result.attribution.reasons:
        console.print(f"  - {escape(reason)}", highlight=False)
    if result.attribution.next_test:
        console.print(f"[bold]Next test:[/] {escape(result.attribution.next_test)}", highlight=False)
    for why in result.recommendation.why:
        console.print(f"[bold]What to do:[/] {escape(why)}", highlight=False)
    if result.recommendation.yaml:
        console.print(escape(result.recommendation.yaml.rstrip()), style="cyan", highlight=False)


def _print_exact(found: Exactness, console: Console) -> None:
    from rich.markup import escape

    console.print(f"[bold]exact has set:[/] {escape(found.applied)}", highlight=False)
    colour = "green" if found.at_floor else "yellow"
    console.print(f"[bold {colour}]exact: {escape(found.text)}[/]", highlight=False)
    for one in found.keeps if found.at_floor else ():
        console.print(f"  - not to be had, without effect here: {escape(one)}", highlight=False)


def _print_against(found: Against, console: Console) -> None:
    from rich.markup import escape

    console.print(_text_table(AGAINST_TITLES, against_rows(found)))
    if found.settings:
        console.print(_text_table((f"second: {found.second}", *SETTING_TITLES[1:]), found.settings))
    for sentence in found.sentences:
        console.print(f"[bold]{escape(sentence)}[/]", highlight=False)


def _text_table(titles: tuple[str, ...], rows: Any) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(escape(title), justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
