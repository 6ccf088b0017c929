"""The pictures of docs/three_policies.md and docs/which_correction.md are the script's and say what the pages say."""

import re
from pathlib import Path

import draw_start
import pytest
from drawing import to_svg

from trl_offpolicy import presets
from trl_offpolicy.presets.parsing import KEEP_TYPES, LOSS_TYPES, WEIGHT_TYPES

DOCS = Path(draw_start.__file__).parent


def words(svg: str) -> list[str]:
    return re.findall(r">([^<>]+)</(?:text|tspan|title)>", svg)


@pytest.mark.parametrize("name", draw_start.PICTURES)
def test_a_picture_is_the_one_the_script_draws(name: str) -> None:
    there = (DOCS / "pictures" / f"{name}.svg").read_text()
    assert words(there) == words(to_svg(*draw_start.PICTURES[name]))
    assert f"pictures/{name}.svg)" in (DOCS / f"{name}.md").read_text()


def test_every_question_of_the_picture_is_a_heading_of_the_page() -> None:
    headings = re.findall(r"^### (\d)\. (.*)$", (DOCS / "which_correction.md").read_text(), flags=re.MULTILINE)
    assert headings == [(str(number), question) for number, (question, _) in enumerate(draw_start.QUESTIONS, 1)]


def test_every_configuration_of_the_table_has_its_block() -> None:
    page = (DOCS / "which_correction.md").read_text()
    linked = re.findall(r"^\| .* \| \[([A-Z])\]\(#", page, flags=re.MULTILINE)
    blocks = re.findall(r"^### ([A-Z])\. .*?(?=^##)", page, flags=re.MULTILINE | re.DOTALL)
    assert linked == blocks == list("ABCDEFG")
    for letter in linked:
        assert "```yaml" in re.search(rf"^### {letter}\. .*?(?=^##)", page, flags=re.MULTILINE | re.DOTALL)[0]


COUNTS = {
    r"\[(\d+) weights, \d+ masks\]": len(WEIGHT_TYPES),
    r"\[\d+ weights, (\d+) masks\]": len(KEEP_TYPES),
    r"\[(\d+) losses\]": len(LOSS_TYPES),
    r"; (\d+) presets, verl's among them": len(presets.names()),
    r"; (\d+) presets \| no \|": sum(name.startswith("verl/") for name in presets.names()),
}
"""What the table counts of this kit, and of verl's presets here, against the code."""


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.parametrize("pattern", COUNTS)
def test_the_table_counts_what_the_code_has(page: str, pattern: str) -> None:
    (said,) = re.findall(pattern, "\n".join(feature_table(page)))
    assert int(said) == COUNTS[pattern]


def feature_table(page: str) -> list[str]:
    """The table that compares with other kits, with its links from the folder docs/."""
    text = (DOCS.parent / page).read_text()
    rows = text[text.index("| | TRL 1.16 |") :].split("\n\n")[0]
    return rows.replace("](docs/", "](").splitlines()


def test_readme_and_first_page_compare_the_same() -> None:
    rows = feature_table("README.md")
    assert len(rows) > 8 and feature_table("docs/index.md") == rows
