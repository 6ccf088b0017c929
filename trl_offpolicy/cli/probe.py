"""``trl-offpolicy probe``: options, progress, the table on the terminal, the exit status."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_offpolicy.cli.commands import FOUND

if TYPE_CHECKING:
    from rich.console import Console

    from trl_offpolicy.diagnosis.probe.probe import ProbeResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of the command."""
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--model", required=True, help="folder or Hub name, for both sides")
    parser.add_argument("--adapter", metavar="DIR", help="LoRA adapter, for both sides")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=".txt (one a line) or .jsonl (default: built in)")
    parser.add_argument("--engine", default="vllm", help="vllm, hf, or the URL of a server (default: vllm)")
    parser.add_argument("--engine-dtype", choices=dtypes, default="float32", help="default: float32")
    parser.add_argument("--trainer-dtype", choices=dtypes, default="float32", help="default: float32")
    parser.add_argument("--quantization", metavar="NAME", help="vLLM's option of that name")
    parser.add_argument(
        "--weight-rounding", metavar="TYPE", help="round the engine's weights: int8, int4, fp8, bf16, ..."
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the engine (default: 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the engine (default: 1, off)")
    parser.add_argument("--top-k", type=int, default=0, help="of the engine (default: 0, off)")
    parser.add_argument("--min-p", type=float, default=0.0, help="of the engine (default: 0, off)")
    parser.add_argument(
        "--mirror", action="store_true", help="the trainer scores at the same temperature and truncation"
    )
    parser.add_argument("--samples", type=int, default=4, help="completions a prompt (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest completion (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the engine (default: 0)")
    parser.add_argument("--no-hypotheses", action="store_true", help="do not test causes with the model (faster)")
    parser.add_argument("--output", type=Path, default=Path("probe"), metavar="DIR", help="default: probe")
    parser.add_argument("--max-kl", type=float, metavar="NATS", help=f"exit with {FOUND} if KL k3 is above")
    parser.add_argument("--min-pearson", type=float, metavar="R", help=f"exit with {FOUND} if Pearson is below")


def run(args: argparse.Namespace) -> int:
    """Probe, print, write; ``FOUND`` where a limit is broken."""
    from rich.console import Console

    from trl_offpolicy.diagnosis.probe.page import write_probe
    from trl_offpolicy.diagnosis.probe.probe import exceeded, run_probe

    options = _options(args)
    _quiet()
    console = Console()
    with console.status("starting") as status:
        result = run_probe(options, note=lambda text: status.update(text))
    print_probe(result, console)
    for path in write_probe(result, args.output):
        console.print(f"[dim]{path}[/]", soft_wrap=True)
    broken = exceeded(result, max_kl=args.max_kl, min_pearson=args.min_pearson)
    for text in broken:
        console.print(f"[bold red]{text}[/]")
    return FOUND if broken else 0


def _options(args: argparse.Namespace) -> Any:
    from trl_offpolicy.diagnosis.probe.probe import ProbeOptions
    from trl_offpolicy.diagnosis.probe.sides import read_prompts
    from trl_offpolicy.engines.rounding import parse_rounding

    names = ("model", "adapter", "engine", "engine_dtype", "trainer_dtype", "quantization", "weight_rounding",
             "temperature", "top_p", "top_k", "min_p", "mirror", "samples", "max_tokens", "seed")  # fmt: skip
    if args.weight_rounding is not None:
        parse_rounding(args.weight_rounding, where="--weight-rounding")
    for name in ("max_kl", "min_pearson"):
        value = getattr(args, name)
        if value is not None and not -1 <= value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be a finite number, but got {value}.")
    prompts = () if args.prompts is None else read_prompts(args.prompts)
    given = {name: getattr(args, name) for name in names}
    return ProbeOptions(**given, prompts=prompts, explain=not args.no_hypotheses)


def _quiet() -> None:
    """Engines and loaders talk a lot; warnings and errors still show."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as loading

    loading.disable_progress_bar()


def print_probe(result: ProbeResult, console: Console) -> None:
    """Numbers, where they sit, verdict, cause, fix and YAML."""
    from rich.markup import escape

    from trl_offpolicy.diagnosis.probe import page as text

    evidence = result.evidence
    console.print(f"[bold]{escape(Path(result.options.model).name)}[/]: {int(evidence.observed.sum())} tokens in "
                  f"{len(result.completions)} completions, {sum(result.seconds.values()):.0f} s")  # fmt: skip
    console.print(_table(("mismatch", "engine / trainer", "trainer / itself"), text.metric_rows(result)))
    for one in result.breakdowns:
        console.print(_table((f"by {one.title}", *text.BREAKDOWN_TITLES), text.breakdown_rows(one)))
    colour = "green" if result.attribution.cause == "none" else "yellow"
    console.print(f"[bold {colour}]{escape(text.headline(result))}[/]")
    for reason in result.attribution.reasons:
        console.print(f"  - {escape(reason)}", highlight=False)
    if text.confirmation(result.attribution.cause):
        console.print(f"[bold]To make sure:[/] {escape(text.confirmation(result.attribution.cause))}", highlight=False)
    for why in result.recommendation.why:
        console.print(f"[bold]What to do:[/] {escape(why)}", highlight=False)
    if result.recommendation.yaml:
        console.print(escape(result.recommendation.yaml.rstrip()), style="cyan", highlight=False)


def _table(titles: tuple[str, ...], rows: Any) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, title in enumerate(titles):
        table.add_column(escape(title), justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
