"""How far an engine in each number format is from a float32 trainer: weights, activations, KV cache apart.

    python benchmarks/dtype_ladder/run.py --llm FOLDER   # 8 formats x 4 parts, 3 seeds, and a language model
    python benchmarks/dtype_ladder/run.py --short        # one seed, answers of 64 tokens: under 3 minutes
    python benchmarks/dtype_ladder/run.py --report       # the tables and the figure from the results file alone

FOLDER holds SmolLM2-135M-Instruct, or another Llama of transformers. Pieces are written as they are done, and a call
runs only those that are missing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each piece has one thread
from benchmarks.dtype_ladder import llm
from benchmarks.dtype_ladder.experiment import Job, Settings, run, warm_model
from benchmarks.dtype_ladder.figure import draw
from benchmarks.dtype_ladder.formats import FORMATS, WHERE
from benchmarks.dtype_ladder.results import Line, lines, ratios, read, write
from benchmarks.dtype_ladder.tables import report
from benchmarks.lab.jobs import Experiment, run_all
from benchmarks.lab.provenance import made_here

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the results, report."""
    args = parse(arguments)
    if not args.report:
        found, spent = measure(args)
        given = sys.argv[1:] if arguments is None else list(arguments)
        command = f"python benchmarks/dtype_ladder/run.py {shlex.join(given)}".strip()
        first: Line = {"line": "run", "command": command, **made_here(), "seeds": args.seeds, "cpu_seconds": spent}
        write(args.results, {**first, "settings": asdict(args.settings)}, [*found, *ratios(found)])
    found_lines = read(args.results)
    args.figure.write_text(draw(found_lines))
    print(report(found_lines))
    return 0


def measure(args: argparse.Namespace) -> tuple[list[Line], float]:
    """The lines of the small model, then those of the language model; and the CPU seconds of all pieces."""
    jobs = [Job(form, where, seed) for seed in args.seeds for form in FORMATS for where in WHERE]
    outcomes = run_all(jobs, args.settings, args.out, args.jobs, Experiment(warm_model, run))
    found = lines(outcomes, "walk")
    if args.llm is not None:
        settings = llm.LlmSettings(str(args.llm), answers=args.llm_answers)
        more = run_all(llm.plan(), settings, args.out, 1, Experiment(_nothing, llm.run))
        found += lines(more, args.llm.name)
        outcomes = [*outcomes, *more]
    return found, sum(outcome["cpu_seconds"] for outcome in outcomes)


def _nothing(_settings: Any, _seed: int, _folder: Path) -> None:
    """A language model has no warm start."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one seed, 64 answers of 64 tokens")
    parser.add_argument("--report", action="store_true", help="run nothing, read the results file")
    parser.add_argument("--results", type=Path, help="default: results.jsonl beside this file (--short: in --out)")
    parser.add_argument("--figure", type=Path, help="default: ladder.svg beside the results")
    parser.add_argument("--out", type=Path, help="pieces; default: runs/dtype_ladder (--short: ..._short)")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each (default: 1)")
    parser.add_argument("--llm", type=Path, help="folder of a Llama of transformers, in float32")
    parser.add_argument("--llm_answers", type=int, default=4, help="to each of 8 prompts (default: 4)")
    args = parser.parse_args(arguments)
    small = replace(Settings(), longest=64, answers=64, warm_steps=200, settle_steps=20)
    args.settings = small if args.short else Settings()
    args.seeds = args.seeds or ([0] if args.short else [0, 1, 2])
    args.out = args.out or Path("runs/dtype_ladder_short" if args.short else "runs/dtype_ladder")
    args.results = args.results or (args.out / "results.jsonl" if args.short else HERE / "results.jsonl")
    args.figure = args.figure or args.results.with_name("ladder.svg")
    return args


if __name__ == "__main__":
    sys.exit(main())
