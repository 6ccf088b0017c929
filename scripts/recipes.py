"""Writes the table and the commands of recipes/README.md from recipes/index.yaml.

python scripts/recipes.py    # tests/recipes/test_index.py: the page is current, and every recipe has its row
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trl_offpolicy.cli.recipes import FOLDER, Recipe, all_recipes

PAGE = FOLDER / "README.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
COMMANDS = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
TITLES = ("recipe", "what it shows", "model", "hardware", "time", "number to expect", "last run")


def page(text: str) -> str:
    """The page with its table and its commands written anew."""
    rows = [f"| {' | '.join(cells)} |\n" for cells in (TITLES, ["---"] * len(TITLES), *map(cells_of, all_recipes()))]
    commands = "\n".join("\n".join((f"# {one.name}", *one.lines, "")) for one in all_recipes())
    blocks = {TABLE: "".join(rows), COMMANDS: f"```bash\n{commands}```\n"}
    for block, new in blocks.items():
        text = block.sub(new.replace("\\", r"\\"), text)
    return text


def cells_of(recipe: Recipe) -> tuple[str, ...]:
    """A recipe's row."""
    target = recipe.name if "/" in recipe.name else f"{recipe.name}/README.md"
    ran = recipe.ran or "not run to its end yet"
    return (
        f"[{recipe.name}]({target})", recipe.what, recipe.model, recipe.hardware, recipe.time, recipe.expect, ran
    )  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
