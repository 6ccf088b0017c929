"""The command ``trl-offpolicy recipes``: lists the recipes, and copies one so that its command runs from there.

In a checkout the recipes lie beside the package. A wheel puts them in the same place, so the path is the same.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from trl_offpolicy.packages import PREPARE_SCRIPT

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
INDEX = FOLDER / "index.yaml"
SHARED = ("grpo.py", "record.py", "tasks.py", "agent_calculator", "accelerate", PREPARE_SCRIPT.removeprefix("recipes/"))
"""What the commands of the recipes read besides a recipe's own folder."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A row of recipes/index.yaml.

    Attributes:
        name: its folder in recipes/, or folder and file.
        what: what it shows.
        model: the policy.
        hardware: what it needs; for a recipe that never ran, an estimate.
        time: duration of the last run, on that hardware; "" without one.
        expect: the number to see at the end; "" without a run.
        command: how it is started, from the folder that holds recipes/.
        before: commands that come first, in this order, each with a remark: the model is made, a server is started.
        ran: day and commit of the runs that the numbers are from, and what has changed since; "" = none to its end yet.
        checkout: it needs more of the checkout than recipes/, so it cannot be copied.
    """

    name: str
    what: str
    model: str
    hardware: str
    command: str
    before: tuple[str, ...] = ()
    time: str = ""
    expect: str = ""
    ran: str = ""
    checkout: bool = False

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return self.name.split("/")[0]

    @property
    def lines(self) -> tuple[str, ...]:
        """What is typed, in order; a remark stands after ``#``."""
        return (*self.before, self.command)


def all_recipes() -> tuple[Recipe, ...]:
    """Every recipe, in the order of the index.

    Raises:
        FileNotFoundError: without recipes beside the package.
    """
    if not INDEX.exists():
        raise FileNotFoundError("the recipes were expected beside the package trl_offpolicy, but there are none.")
    import yaml

    rows = yaml.safe_load(INDEX.read_text(encoding="utf-8"))
    return tuple(Recipe(**row | {"before": tuple(row.get("before", ()))}) for row in rows)


def find(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ValueError: no recipe has it; says which are near.
    """
    by_name = {recipe.name: recipe for recipe in all_recipes()}
    if name not in by_name:
        near = get_close_matches(name, by_name, n=3, cutoff=0.4)
        meant = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"NAME must be a recipe, but got {name!r}{meant} 'trl-offpolicy recipes' lists them.")
    return by_name[name]


def copy(recipe: Recipe, target: Path) -> list[Path]:
    """Copy a recipe and what it needs into ``target/recipes``, where its command finds them.

    Returns:
        The new files. What is there already, perhaps with changes, stays as it is.

    Raises:
        ValueError: the recipe needs more of the checkout than recipes/.
    """
    if recipe.checkout:
        raise ValueError(
            f"NAME must be a recipe that runs from a copy, but {recipe.name} also needs benchmarks/: "
            f"run it in a checkout: {'; '.join(recipe.lines)}"
        )
    made: list[Path] = []
    for name in (recipe.folder, *SHARED):
        source = FOLDER / name
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for path in files:
            new = target / "recipes" / path.relative_to(FOLDER)
            if "__pycache__" in path.parts or new.exists():
                continue
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, new)
            made.append(new)
    return made


def recipes(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """List the recipes, or copy one into a folder of yours."""
    parser.add_argument("action", nargs="?", choices=("list", "show", "copy"), default="list", help="(default: list)")
    parser.add_argument("name", metavar="NAME", nargs="?", help="recipe to show or to copy")
    parser.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="where to (default: here)")

    def run(args: argparse.Namespace) -> int:
        if args.action == "list":
            _print_list()
            return 0
        if args.name is None:
            raise ValueError(f"recipes {args.action} needs NAME, but got none; 'trl-offpolicy recipes' lists them.")
        recipe = find(args.name)
        if args.action == "show":
            _print_one(recipe)
            return 0
        made = copy(recipe, args.folder)
        kept = "" if made else " (all files were there already and stay as they are)"
        print(f"{len(made)} files copied to {args.folder / 'recipes'}{kept}. Start it in {args.folder.resolve()}:")
        print("\n".join(f"  {line}" for line in recipe.lines))
        return 0

    return run


def _print_list() -> None:
    """Two lines a recipe, so that it can be read at any width."""
    for one in all_recipes():
        print(f"{one.name}: {one.what}")
        print(
            f"    {one.model}, {one.hardware}; {f'{one.time}: {one.expect}' if one.ran else 'not run to its end yet'}"
        )
    print("trl-offpolicy recipes show NAME prints its commands; recipes copy NAME DIR copies the files.")


def _print_one(recipe: Recipe) -> None:
    """Everything the index says of a recipe."""
    print(recipe.name)
    for label in ("what", "model", "hardware", "time", "expect", "ran"):
        print(f"  {label + ':':<10}{getattr(recipe, label) or '-'}")
    for line in recipe.before:
        print(f"  {'before:':<10}{line}")
    print(f"  {'command:':<10}{recipe.command}")
    print(f"  {'files:':<10}{FOLDER / recipe.folder}")
