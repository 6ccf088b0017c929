"""The command ``trl-offpolicy presets``: the list with its legend, one preset with its YAML, the diff of two."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable

LEGEND = """\
mu = the engine that sampled, pi_old = the trainer at the weights that sampled, pi = the trainer now
rho_t = pi_old / mu at a token, or the ratio that the line names ("rho = pi / mu"); p and q are its two probabilities
rho_seq = product of rho_t over the response, rho_geo = its geometric mean, rho_1:t = product up to the token,
rho_turn and rho_turn_geo = both over a turn; k3 = rho - log rho - 1; A = advantage
w = weight of a token's loss, C = max_weight; "keep if" and "drop if" say which tokens stay in the loss
C, low, high, delta: options, with their defaults at the end of the line; KL_binary = KL of a token against all others
r = pi / pi_old, R = reward, ref = reference model, beta = coefficient of the KL with it, f_t = factor of an advantage
paper/cppo: w_t = weight of a position (1 at the first, min_weight at the last), W = sum of w_t over the tokens before,
S = sum of w_t times the divergence over them
"paper/" and names of models: the publication's values; names of frameworks: their semantics and defaults
"auto" is no preset: it chooses among these by the batches (offpolicy: auto)
trl-offpolicy presets NAME explains one and prints its YAML; --diff A B compares two"""


def presets(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """List the correction presets, explain some with the YAML to paste, or show in what two differ."""
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="presets to explain, or families to list (default: all)"
    )
    parser.add_argument("--diff", metavar=("A", "B"), nargs=2, help="show in which semantics two presets differ")

    def run(args: argparse.Namespace) -> int:
        from trl_offpolicy.presets import describe, groups

        if args.diff and args.names:
            raise ValueError(f"--diff must stand alone, but got also {' '.join(args.names)}.")
        if "auto" in [*(args.diff or ()), *args.names]:
            raise ValueError("auto is no preset: write 'offpolicy: auto', and it chooses among them by the batches.")
        families = groups()
        if args.diff:
            _print_diff(*args.diff)
        elif any(name not in families for name in args.names):
            told = [
                _members(name) if name in families else f"{describe(name)}\n{_to_paste(name)}" for name in args.names
            ]
            print("\n\n".join(told))
        else:
            print(*(_members(name) for name in args.names or families), sep="\n")
            print(f"\n{LEGEND}")
        return 0

    return run


def _members(family: str) -> str:
    """The presets of a family with their formulas, under the name of their source."""
    from trl_offpolicy.presets import get, groups, names

    width = max(map(len, names()))
    lines = [f"  {name:<{width}}  {get(name).formula}{_numbers(name)}" for name in groups()[family]]
    return "\n".join([family, *lines])


SYMBOLS = {"max_weight": "C", "min_weight": "low", "max_divergence": "delta"}
"""Options that a formula names by another word than its own."""


def _numbers(name: str) -> str:
    """The defaults of the options whose words stand in a preset's formula, e.g. ``; C = 2``; empty if none does."""
    from trl_offpolicy.presets import get
    from trl_offpolicy.presets.catalog import PRESETS

    found = []
    for option, value in PRESETS[name].defaults.items():
        symbol = SYMBOLS.get(option, option)
        # "alpha=0.1" in a formula has its number already
        named = re.search(rf"\b{symbol}\b(?!=)", get(name).formula) is not None
        if named and isinstance(value, int | float | None) and not isinstance(value, bool):
            found.append(f"{symbol} open" if value is None else f"{symbol} = {value:g}")
    return f"; {', '.join(found)}" if found else ""


def _to_paste(name: str) -> str:
    """YAML that chooses a preset, and YAML that spells its parts out, for those who change them."""
    from trl_offpolicy.migrate.page import yaml_text
    from trl_offpolicy.presets import get
    from trl_offpolicy.presets.catalog import PRESETS
    from trl_offpolicy.presets.parsing import plain_method

    options = {key: value for key, value in PRESETS[name].defaults.items() if value is not None}
    chosen = {"preset": name, "options": options} if options else name
    preset = get(name)
    parts = {key: value for key, value in plain_method(preset).items() if value and key != "preset"}
    written = [("# to paste", {"offpolicy": chosen})]
    if parts or preset.trainer:  # which a preset sets beside offpolicy
        written.append(("# or the same by its parts", {**({"offpolicy": parts} if parts else {}), **preset.trainer}))
    text = "".join(f"{comment}\n{yaml_text(value, {})}" for comment, value in written)
    return textwrap.indent(text.rstrip("\n"), "  ")


def _print_diff(a: str, b: str) -> None:
    """A table with one row for every semantics in which two presets differ."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from trl_offpolicy.presets import diff

    rows = diff(a, b)
    if not rows:
        print(f"{a} and {b} compute the same numbers.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("semantics", a, b):
        table.add_column(escape(title), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
