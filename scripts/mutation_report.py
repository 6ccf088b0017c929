"""Share of mutants killed by module, and the survivors as diffs: what ``make mutate`` found. Reads ``mutants/``.

python scripts/mutation_report.py [--survivors]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

TARGET = 0.85
SURVIVED, NO_TESTS, NOT_RUN = 0, 33, None  # exit codes of mutmut; what no test reaches has not been killed


def main() -> int:
    """Print the table; exit status 1 below the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survivors", action="store_true", help="print every survivor's diff")
    args = parser.parse_args()
    survivors: list[str] = []
    killed = total = waiting = 0
    for meta in sorted(Path("mutants").rglob("*.meta")):
        outcome = json.loads(meta.read_text())["exit_code_by_key"]
        run = {name: code for name, code in outcome.items() if code is not NOT_RUN}
        here = [name for name, code in run.items() if code in (SURVIVED, NO_TESTS)]
        waiting += len(outcome) - len(run)
        if run:
            share = 1 - len(here) / len(run)
            print(f"{share:7.1%} of {len(run):4d}  {meta.relative_to('mutants').with_suffix('')}")
        killed, total = killed + len(run) - len(here), total + len(run)
        survivors += here
    share = killed / total if total else 0.0
    print(f"{share:7.1%} of {total} mutants killed ({len(survivors)} survived, {waiting} not run yet)")
    if args.survivors:
        for name in survivors:
            subprocess.run([sys.executable, "-m", "mutmut", "show", name], check=False)
    return 0 if share >= TARGET and not waiting else 1


if __name__ == "__main__":
    sys.exit(main())
