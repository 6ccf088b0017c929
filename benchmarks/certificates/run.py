"""Exact bias and variance of every weight, keep term, loss and normaliser, on token processes that can be summed over.

    python benchmarks/certificates/run.py [--seeds 20] [--processes 1]    # results.json, table.md, README, picture
    python benchmarks/certificates/run.py --short                         # 2 seeds, 3 kinds, printed only
    python benchmarks/certificates/run.py --missing                       # only rows without numbers, merged

A seed that is finished in ``--folder`` is not repeated; take a new folder after a change of the code.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.certificates import figure, table  # noqa: E402
from benchmarks.certificates.certificates import Certificate, case_of, certificate  # noqa: E402
from benchmarks.certificates.claims import CLAIMS  # noqa: E402
from benchmarks.certificates.mismatch import KINDS, World, world  # noqa: E402
from benchmarks.certificates.terms import rows  # noqa: E402
from benchmarks.lab.jobs import Experiment, cost_text, outcome_of, run_and_time, write_outcome  # noqa: E402

HERE = Path(__file__).resolve().parent
SHORT_KINDS = ("none", "lag 4", "large")


@dataclass(frozen=True)
class Settings:
    """What every seed has in common.

    Args:
        kinds: names of ``KINDS``.
        batches: drawn for a row that depends on its batch.
    """

    kinds: list[str]
    batches: int


@dataclass(frozen=True)
class Seed:
    """One random task with all its certificates."""

    seed: int

    @property
    def name(self) -> str:
        """Its file's name."""
        return f"seed-{self.seed}"


def certify(job: Seed, settings: Settings, folder: Path) -> dict[str, Any]:
    """Every row under every kind, and every claim, for one seed."""
    if (finished := outcome_of(job, settings, folder)) is not None:
        return finished
    started = time.process_time()
    made = world(job.seed)
    outcome = {
        "settings": asdict(settings),
        "seed": job.seed,
        "size": [made.space.vocabulary, made.space.horizon],
        "certificates": {kind: by_row(kind, made, settings, job.seed) for kind in settings.kinds},
        "claims": {name: asdict(claim.check(made)) for name, claim in CLAIMS.items()},
    }
    outcome["cpu_seconds"] = time.process_time() - started
    write_outcome(job, outcome, folder)
    return outcome


def by_row(kind: str, made: World, settings: Settings, seed: int) -> dict[str, Any]:
    """The certificate of every row under one kind of mismatch."""
    found = {}
    for name, row in rows().items():
        found[name] = asdict(certificate(row, case_of(row, kind, made), batches=settings.batches, seed=seed))
    return found


def of_seed(seed: int, names: list[str], batches: int) -> dict[str, dict[str, Certificate]]:
    """The certificates of the rows ``names`` under every kind, for one seed."""
    torch.set_num_threads(1)
    made = world(seed)
    return {
        kind: {
            name: certificate(rows()[name], case_of(rows()[name], kind, made), batches=batches, seed=seed)
            for name in names
        }
        for kind in KINDS
    }


def add_missing(seeds: list[Seed], processes: int = 1) -> list[str]:
    """Compute the rows that ``results.json`` lacks, with its own numbers of seeds and batches, and merge them.

    The other rows stay as they are; rows that the kit no longer has go. Claims are not checked again.
    """
    path = HERE / "results.json"
    results = json.loads(path.read_text())
    new = [name for name in rows() if name not in results["rows"]]
    one = partial(of_seed, names=new, batches=results["batches"])
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        by_seed = list(pool.map(one, [job.seed for job in seeds[: results["seeds"]]]))
    found = {kind: {name: [one[kind][name] for one in by_seed] for name in new} for kind in KINDS}
    for kind in KINDS:
        old = results["cells"][kind]
        cells = {name: [table.rounded(value) for value in table.cell(found[kind][name])] for name in new}
        results["cells"][kind] = {name: cells[name] if name in cells else old[name] for name in rows()}
    results["rows"] = {name: {"group": r.group, "part": r.part, "exact": r.exact} for name, r in rows().items()}
    write_all(results)
    return new


def write_all(results: dict[str, Any]) -> None:
    """Write the results, the tables and the picture."""
    table.write_results(results, HERE / "results.json")
    (HERE / "table.md").write_text(table.full_table(results))
    (HERE / "certificates.svg").write_text(figure.svg(results))
    page = HERE / "README.md"
    page.write_text(table.short_tables(results, page.read_text()))


def no_warm_start(settings: Settings, seed: int, folder: Path) -> None:
    """Nothing is trained before."""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1] for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    )
    return names[0].strip() if names else platform.processor() or platform.machine()


def main() -> None:
    """Read the arguments, run what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--batches", type=int, default=32)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/certificates"))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--missing", action="store_true", help="only the rows that results.json lacks, merged into it")
    args = parser.parse_args()
    if args.missing:
        print("\n".join(add_missing([Seed(seed) for seed in range(args.seeds)], args.processes)))
        return
    settings = Settings(kinds=list(SHORT_KINDS if args.short else KINDS), batches=8 if args.short else args.batches)
    seeds = [Seed(seed) for seed in range(min(args.seeds, 2) if args.short else args.seeds)]
    folder = args.folder / "short" if args.short else args.folder
    outcomes, cost = run_and_time(seeds, settings, folder, args.processes, Experiment(no_warm_start, certify))
    results = table.results_of(outcomes)
    if args.short:
        print("\n".join([*table.table_of(results, table.HIGHLIGHTS, what="bias"), "", *table.claims_table(results)]))
    else:
        about = {
            "command": " ".join(["python", "benchmarks/certificates/run.py", *sys.argv[1:]]),
            "commit": _git("rev-parse", "--short", "HEAD"),
            "date": date.today().isoformat(),
            "processor": _processor(),
            "cost": cost,
            "batches": settings.batches,
        }
        results = {**about, **results}
        write_all(results)
    print(cost_text(cost))


if __name__ == "__main__":
    main()
