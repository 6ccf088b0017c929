"""Writes the part of a model card on the sampling policy, its correction and the run's numbers.

It reads the run folder only, so it can be written again after training: ``trl-offpolicy card RUN_DIR``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_offpolicy.diagnosis.doctor import Examination, examine
from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.summary import RunSummary, format_with_interval, summarize_run
from trl_offpolicy.run_folder.base_model import base_model_of_run
from trl_offpolicy.run_folder.layout import CARD_FILE, RECIPE_FILE
from trl_offpolicy.run_folder.run_data import read_run_info
from trl_offpolicy.run_folder.strict import without_paths

BEGIN, END = "<!-- trl-offpolicy -->", "<!-- end of trl-offpolicy -->"
PROJECT = "trl-offpolicy"


def card_section(run_dir: str | Path) -> str:
    """Correction with citation, diagnosis table, verdict and recipe, as Markdown.

    Args:
        run_dir: a run folder of either trainer.

    Raises:
        FileNotFoundError: there is no ``metrics.jsonl``.
        ValueError: ``metrics.jsonl`` holds no training row.
    """
    folder = Path(run_dir)
    info = read_run_info(folder)
    parts = [
        _method(info),
        _table(summarize_run(folder)),
        _verdict(examine(folder)),
        _recipe(folder / RECIPE_FILE, info),
    ]
    return without_paths("\n\n".join([BEGIN, *parts, END]), every=True)


def write_card(run_dir: str | Path, card: str | Path | None = None) -> Path:
    """Put the section into a model card: it replaces an older one, else goes before the framework versions, else last.

    Args:
        run_dir: a run folder.
        card: the Markdown file; None = ``README.md`` in the run folder. A new file begins with the metadata that the
            Hub reads.

    Returns:
        The file written.
    """
    path = Path(run_dir) / CARD_FILE if card is None else Path(card)
    section = card_section(run_dir)
    info = read_run_info(run_dir)
    text = _mended(path.read_text(), info, run_dir) if path.exists() else _new_card(info)
    older = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    if older.search(text):
        text = older.sub(lambda _: section, text)
    elif (versions := text.find("### Framework versions")) >= 0:
        text = f"{text[:versions]}{section}\n\n{text[versions:]}"
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    path.write_text(text)
    return path


def _new_card(info: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    base = base_model_of_run(info)
    tags = ["generated_from_trainer", "grpo", PROJECT]
    data = ModelCardData(base_model=base.hub_id or None, library_name="transformers", tags=tags)
    begun = f"\nThis model is a fine-tuned version of {base.markdown()}.\n" if base.markdown() else ""
    return f"---\n{data.to_yaml()}\n---\n\n# A model trained with {PROJECT}\n{begun}"


_BASE = re.compile(
    r"(?<=This model is a fine-tuned version of )\[([^\]\n]*)\]\(https://huggingface\.co/\1\)(?! \(revision)"
)
"""The base model in TRL's card, where it is not followed by a revision yet."""


def _mended(text: str, info: Mapping[str, Any], run_dir: str | Path) -> str:
    """TRL's card without the None of a model that has no name on the Hub, and with what the run began with.

    TRL knows neither revisions nor where a local folder comes from, and takes a path that it does not find for an id.
    """
    from huggingface_hub import ModelCard

    text = text.replace("# Model Card for None", f"# Model Card for {Path(run_dir).resolve().name}")
    text = text.replace('pipeline("text-generation", model="None"', 'pipeline("text-generation", model="."')
    base = base_model_of_run(info)
    if not _BASE.search(text):
        return text
    text = _BASE.sub(lambda _: base.markdown() or "a model whose name was not recorded", text)
    card = ModelCard(text, ignore_metadata_errors=True)
    card.data["base_model"] = base.hub_id or None
    return f"---\n{card.data.to_yaml()}\n---\n{card.text}"


def _method(info: Mapping[str, Any]) -> str:
    shown = (  # label, field of run.json, mark around the value
        ("Rollouts", "engine", ""),
        ("Correction", "preset", "`"),
        ("Formula", "formula", "`"),
        ("Citation", "citation", ""),
        ("Settings", "correction", "`"),
        ("Loss", "objective", "`"),
        ("Advantages", "advantages", ""),
    )
    lines = [f"- **{label}**: {mark}{info[name]}{mark}" for label, name, mark in shown if info.get(name)]
    nothing = ["The run folder says nothing about the method."]
    return "\n".join(["## Which policy sampled, and what was done about it", "", *(lines or nothing)])


def _table(summary: RunSummary) -> str:
    spans = (summary.first_steps, summary.last_steps, summary.all_steps)
    head = ["quantity", "correction", *(f"mean of steps {first} to {last}" for first, last in spans)]
    rows = [
        (
            f"{row.label} ({row.unit})" if row.unit else row.label,
            row.side,
            format_number(row.first),
            format_number(row.last),
            format_with_interval(row),
        )
        for row in summary.rows
    ]
    return "\n".join(
        ["### Engine against trainer", "", _line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]
    )


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _verdict(seen: Examination) -> str:
    found = seen.diagnosis
    lines = ["### Diagnosis", "", f"Verdict over the last logged steps: **{found.verdict}**."]
    lines += [f"- {found.no_number()}."] if found.broken is not None else []
    lines += [f"- {one.about.title} ({one.severity}): {one.symptom}" for one in found.findings]
    return "\n".join(lines)


def _recipe(path: Path, info: Mapping[str, Any]) -> str:
    lines = ["### Reproduce", ""]
    versions = ", ".join(f"{name} {version}" for name, version in dict(info.get("versions") or {}).items())
    command = f"`{info['command']}`" if info.get("command") else ""
    known = {
        "Base model": base_model_of_run(info).markdown(),
        "Seed": info.get("seed"),
        "Command": command,
        "Versions": versions,
    }
    lines += [f"- **{name}**: {value}" for name, value in known.items() if value not in (None, "")]
    if path.exists():
        lines += ["", f"`{path.name}`:", "", "```yaml", path.read_text().strip(), "```"]
    return "\n".join(lines)
