"""The command ``trl-offpolicy presets``: the list with its legend, one preset with its YAML, the diff of two."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable

LEGEND = """\
mu = the engine that sampled, pi_old = the trainer at the weights that sampled, pi = the trainer now
rho_t = pi_old / mu at a token, or the ratio that the line names ("rho = pi / mu"); p and q are its two probabilities
rho_seq = product of rho_t over the response, rho_geo = its geometric mean, rho_1:t = product up to the token,
rho_turn and rho_turn_geo = both over a turn; k3 = rho - log rho - 1; A = advantage
w = weight of a token's loss, C = max_weight; "keep if" and "drop if" say which tokens stay in the loss
"paper/" and names of models: the publication's values; names of frameworks: their semantics and defaults
"auto" is no preset: it chooses among these by the batches (offpolicy: auto)
trl-offpolicy presets NAME explains one and prints its YAML; --diff A B compares two"""


def presets(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """List the correction presets, explain some with the YAML to paste, or show in what two differ."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="presets to explain (default: list all)")
    parser.add_argument("--diff", metavar=("A", "B"), nargs=2, help="show in which semantics two presets differ")

    def run(args: argparse.Namespace) -> int:
        from trl_offpolicy.presets import describe

        if args.diff:
            if args.names:
                raise ValueError(f"--diff must stand alone, but got also {' '.join(args.names)}.")
            _print_diff(*args.diff)
        elif "auto" in args.names:
            raise ValueError("auto is no preset: write 'offpolicy: auto', and it chooses among them by the batches.")
        elif args.names:
            print("\n\n".join(f"{describe(name)}\n{_to_paste(name)}" for name in args.names))
        else:
            _print_list()
        return 0

    return run


def _print_list() -> None:
    """All presets with their formulas, under the name of their source."""
    from trl_offpolicy.presets import get, groups, names

    width = max(map(len, names()))
    for group, members in groups().items():
        print(group)
        for name in members:
            print(f"  {name:<{width}}  {get(name).formula}")
    print(f"\n{LEGEND}")


def _to_paste(name: str) -> str:
    """YAML that chooses a preset, and YAML that spells its parts out, for those who change them."""
    from trl_offpolicy.migrate.page import yaml_text
    from trl_offpolicy.presets import get
    from trl_offpolicy.presets.catalog import PRESETS
    from trl_offpolicy.presets.parsing import plain_method

    options = {key: value for key, value in PRESETS[name].defaults.items() if value is not None}
    chosen = {"preset": name, "options": options} if options else name
    parts = {key: value for key, value in plain_method(get(name)).items() if value and key != "preset"}
    written = [("# to paste", chosen)]
    if parts:
        written.append(("# or the same by its parts", parts))
    text = "".join(f"{comment}\n{yaml_text({'offpolicy': value}, {})}" for comment, value in written)
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
