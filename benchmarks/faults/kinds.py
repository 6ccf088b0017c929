"""The table of all kinds of fault, and of the clean variants.

python benchmarks/faults/kinds.py      # writes the table of README.md
"""

from __future__ import annotations

from pathlib import Path

import engine_kinds as engine
import fifth_kinds as fifth
import fourth_kinds as fourth
import other_kinds as other
import second_kinds as second
import sixth_kinds as sixth
import third_kinds as third
from kind import Kind
from wall import SEEN_CLEAN

FAMILIES = (
    engine.prompts,
    engine.sampling,
    engine.architecture,
    engine.precision,
    other.bookkeeping,
    engine.weights,
    other.trainer,
    engine.routing,
    engine.mixtures,
    other.over_time,
    second.prompts,
    second.sampling,
    second.architecture,
    second.precision,
    second.bookkeeping,
    second.weights,
    second.trainer,
    second.routing,
    second.mixtures,
    second.over_time,
    third.prompts,
    third.sampling,
    third.architecture,
    third.precision,
    third.bookkeeping,
    third.weights,
    third.trainer,
    third.routing,
    third.mixtures,
    third.over_time,
    fourth.prompts,
    fourth.sampling,
    fourth.architecture,
    fourth.precision,
    fourth.bookkeeping,
    fourth.weights,
    fourth.trainer,
    fourth.routing,
    fourth.mixtures,
    fourth.over_time,
    fifth.prompts,
    fifth.sampling,
    fifth.architecture,
    fifth.precision,
    fifth.bookkeeping,
    fifth.weights,
    fifth.trainer,
    fifth.routing,
    fifth.mixtures,
    fifth.over_time,
    sixth.prompts,
    sixth.sampling,
    sixth.architecture,
    sixth.precision,
    sixth.bookkeeping,
    sixth.weights,
    sixth.trainer,
    sixth.routing,
    sixth.mixtures,
    sixth.over_time,
)
KINDS: dict[str, Kind] = {kind.name: kind for family in FAMILIES for kind in family()}
CLEANS: dict[str, Kind] = {
    kind.name: kind for round_ in (other, second, third, fourth, fifth, sixth) for kind in round_.clean()
}


def kind_of(name: str) -> Kind:
    """The kind of a case."""
    return CLEANS[name] if name in CLEANS else KINDS[name]


MARKER = "<!-- table of kinds.py -->"


def table() -> str:
    """The kinds as Markdown: family, name, side, right and sane answers, models."""
    titles = ("family", "kind", "side", "right", "also sane", "models")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for kind in (*KINDS.values(), *CLEANS.values()):
        side = kind.split if kind.name in KINDS else ("both" if kind.name in SEEN_CLEAN else "report")
        cells = (kind.family, kind.name, side, ", ".join(kind.right), ", ".join(kind.sane), ", ".join(kind.models))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    readme = Path(__file__).with_name("README.md")
    before, _, rest = readme.read_text().partition(MARKER)
    _, _, after = rest.partition(MARKER)
    readme.write_text(f"{before}{MARKER}\n{table()}\n{MARKER}{after}")


if __name__ == "__main__":
    main()
