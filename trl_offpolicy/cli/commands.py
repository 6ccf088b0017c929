"""Command line ``trl-offpolicy``.

A subcommand is one function: it takes its parser, adds its arguments and returns the function to run. Its docstring is
its help text, and ``COMMANDS`` lists it. Heavy packages, torch among them, are imported inside the returned function:
``--help`` takes 0.2 s.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trl_offpolicy import __version__
from trl_offpolicy.checks import check_target, near
from trl_offpolicy.cli.migrate import migrate
from trl_offpolicy.cli.presets import presets
from trl_offpolicy.cli.recipes import recipes
from trl_offpolicy.cli.tokenizers import load_decode
from trl_offpolicy.cli.watch import watch
from trl_offpolicy.packages import MissingPackageError, check_model, how_to_install, require
from trl_offpolicy.run_folder.layout import CARD_FILE, METRICS_FILE, REPORT_FILE, STATE_FILE

if TYPE_CHECKING:
    from trl_offpolicy.diagnosis.probe.options import ProbeOptions
    from trl_offpolicy.diagnosis.probe.probe import ProbeResult
    from trl_offpolicy.diagnosis.thresholds import Thresholds
    from trl_offpolicy.diagnosis.verdict.tree import Severity, Verdict

Runner = Callable[[argparse.Namespace], int]
Command = Callable[[argparse.ArgumentParser], Runner]

BAD_INPUT = 2
MISSING_PACKAGE = 1
FOUND = 3
"""Exit status if a limit of ``--fail-on``, ``--max-kl`` or ``--min-pearson`` is crossed."""
NOT_JUDGED = 4
"""Exit status of ``doctor --fail-on`` if the log holds nothing from which engine and trainer can be compared."""


def report(parser: argparse.ArgumentParser) -> Runner:
    """Print verdict and summary of a run folder and write its report.html."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help=f"folder with {METRICS_FILE}")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"where to write the report (default: RUN_DIR/{REPORT_FILE}; of a log file FILE.html beside it)",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="tokenizer (name or folder) that turns token ids into text")

    def run(args: argparse.Namespace) -> int:
        from trl_offpolicy.diagnosis.report.report import make_report, print_report, save_report

        check_target("--output", args.output)
        made = make_report(args.run_dir, decode=load_decode(args.tokenizer))
        path = save_report(made, args.run_dir, args.output)
        print_report(made)
        print(path)
        return 0

    return run


RUN_OR_LOG = f"run folder, or a log: {METRICS_FILE}, {STATE_FILE}, console text, CSV"


def doctor(parser: argparse.ArgumentParser) -> Runner:
    """Say what is wrong with a run and the smallest change that helps (also verl, TRL, SkyRL and slime logs)."""
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?", help=RUN_OR_LOG)
    parser.add_argument(
        "--window", metavar="N", type=int, default=20, help="judge the last N logged steps (%(default)s)"
    )
    parser.add_argument(
        "--threshold",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="move a limit; --threshold help lists them",
    )
    parser.add_argument(
        "--with", dest="others", metavar="PACKAGE", action="append", default=[], help="ask rldoctor or rlprobe as well"
    )
    parser.add_argument("--export-rlprobe", metavar="DIR", help="also write the metrics as a run folder of rlprobe")
    parser.add_argument(
        "--loss", metavar="NAME", help="policy loss of another framework's run, in its words: some metrics need it"
    )
    parser.add_argument(
        "--model",
        metavar="PATH|auto",
        help="score recorded tokens again and test causes, with the model that the run began with and the checkpoints "
        "in RUN_DIR; auto = the model that run.json names, if it is on this machine (default: no test)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--fail-on",
        choices=("notice", "warning", "critical"),
        help=f"exit with {FOUND} from this severity on, with {NOT_JUDGED} if the verdict is 'not judged'",
    )

    def run(args: argparse.Namespace) -> int:
        if "help" in args.threshold:
            _print_thresholds()
            return 0
        if args.run_dir is None:
            parser.error("the following arguments are required: RUN_DIR")

        from trl_offpolicy.diagnosis.doctor import examine, print_examination
        from trl_offpolicy.run_folder.strict import dump_json

        if args.window < 1:
            raise ValueError(f"--window must be at least 1, but got {args.window}.")
        thresholds = _thresholds(args.threshold)
        if args.model is not None:
            _quiet_loaders()
        with _status_line() as note:
            seen = examine(
                args.run_dir, thresholds, window=args.window, others=args.others, loss=args.loss, model=args.model,
                note=note,
            )  # fmt: skip
        if args.json:
            print(dump_json(seen.as_dict(), indent=2))
        else:
            print_examination(seen)
        if args.export_rlprobe:
            from trl_offpolicy.diagnosis.other_doctors import export_rlprobe

            print(f"for rlprobe: {export_rlprobe(args.run_dir, args.export_rlprobe)}", file=sys.stderr)
        return _status(seen.diagnosis.verdict, args.fail_on)

    return run


@contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, on a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("reading") as status:
        yield status.update


def _status(verdict: Verdict, fail_on: Severity | None) -> int:
    """Exit status of ``doctor``; without ``--fail-on`` always 0."""
    from trl_offpolicy.diagnosis.verdict.tree import SEVERITIES

    if fail_on is None:
        return 0
    if verdict == "not judged":
        return NOT_JUDGED
    return FOUND if SEVERITIES.index(verdict) >= SEVERITIES.index(fail_on) else 0


def demo(parser: argparse.ArgumentParser) -> Runner:
    """Show a diagnosed faulty run: a recorded one, no model needed."""
    parser.add_argument("--output", metavar="FILE", default="offpolicy-demo.html", help="report to write (%(default)s)")

    def run(args: argparse.Namespace) -> int:
        from trl_offpolicy.diagnosis.report.demo import show_demo

        check_target("--output", args.output)
        show_demo(args.output)
        return 0

    return run


def serve(parser: argparse.ArgumentParser) -> Runner:
    """Start a vLLM server that a trainer can sync to, on this machine only unless told otherwise."""
    parser.add_argument("--model", required=True, help="folder or Hub name of the model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000)")
    parser.add_argument("--dtype", default="auto", help="data type of the engine (default: that of the checkpoint)")
    parser.add_argument("--lora-rank", type=int, default=0, help="hot-load adapters up to this rank (default: none)")
    parser.add_argument("--lora-modules", nargs="+", metavar="NAME", help="modules that adapters may touch")
    parser.add_argument("--max-model-len", type=int, help="longest prompt + completion (default: the model's)")
    parser.add_argument(
        "--sampling-mask", action="store_true", help="report which tokens top-k, top-p and min-p kept (vLLM 0.28+)"
    )
    parser.add_argument("--expose", action="store_true", help="allow a --host other than loopback; needs an API key")
    parser.add_argument(
        "--api-key-env", default="VLLM_API_KEY", metavar="NAME", help="variable with the key that callers must send"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be started")
    parser.add_argument(
        "--beside-leftovers", action="store_true", help="start although processes of an earlier server are left"
    )
    parser.add_argument("vllm", nargs="*", default=[], metavar="-- VLLM_FLAG", help="further flags for vLLM, after --")

    def run(args: argparse.Namespace) -> int:
        from trl_offpolicy.engines.server.serve import ServeOptions, announce, start

        plain = ("model", "host", "port", "dtype", "lora_rank", "max_model_len", "sampling_mask", "expose")
        named = {name: getattr(args, name) for name in plain}
        if args.lora_modules:
            named["lora_modules"] = tuple(args.lora_modules)
        options = ServeOptions(**named, api_key=os.environ.get(args.api_key_env), extra=tuple(args.vllm))
        announce(options)
        if not args.dry_run:
            start(options, beside_leftovers=args.beside_leftovers)
        return 0

    return run


def probe(parser: argparse.ArgumentParser) -> Runner:
    """Zero-update test: sample with the engine, score with the trainer, say how far they differ, why, what to do."""
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--model", required=True, help="folder or Hub name, for both sides")
    parser.add_argument("--adapter", metavar="DIR", help="LoRA adapter, for both sides")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=".txt (one per line), .jsonl (default: built in)")
    parser.add_argument("--engine", default="vllm", help="vllm, hf, or the URL of a server (default: vllm)")
    parser.add_argument("--engine-dtype", choices=dtypes, help="default: float32; with --exact the trainer's")
    parser.add_argument("--trainer-dtype", choices=dtypes, default="float32", help="default: float32")
    parser.add_argument(
        "--trainer-device",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N (default: the GPU if there is one)",
    )
    parser.add_argument("--quantization", metavar="NAME", help="vLLM's quantization method")
    parser.add_argument(
        "--weight-rounding", metavar="TYPE", help="round the engine's weights: int8, int4, fp8, bf16, ..."
    )
    _add_sampling(parser)
    parser.add_argument("--no-hypotheses", action="store_true", help="do not test causes with the model (faster)")
    parser.add_argument("--no-ask", action="store_true", help="do not compare weights and settings of both sides")
    parser.add_argument(
        "--engine-settings", metavar="NAME=VALUE,...", help="further arguments of vLLM's LLM, e.g. max_num_seqs=1"
    )
    parser.add_argument(
        "--against",
        metavar="NAME=VALUE,...|URL",
        help="compare with a second setting of the engine on the same tokens: tensor_parallel_size=2, "
        "enforce_eager=true,max_num_seqs=1 (names in capitals are variables: OMP_NUM_THREADS=1), or a second server",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="bring engine and trainer together (equal dtype and batch shape, eager, no prefix cache, batch-invariant "
        "kernels where there are any), and say whether the KL is at the noise floor, or what keeps it above",
    )
    parser.add_argument("--output", type=Path, default=Path("probe"), metavar="DIR", help="default: probe")
    parser.add_argument("--max-kl", type=float, metavar="NATS", help=f"exit with {FOUND} if KL k3 is above")
    parser.add_argument("--min-pearson", type=float, metavar="R", help=f"exit with {FOUND} if Pearson is below")

    def run(args: argparse.Namespace) -> int:
        from rich.console import Console
        from rich.markup import escape

        from trl_offpolicy.diagnosis.probe.page import print_probe, write_probe
        from trl_offpolicy.diagnosis.probe.probe import run_probe

        options = _probe_options(args)
        check_model("--model", args.model)
        if args.engine == "vllm":
            require("vllm", by="--engine vllm")
        _quiet_loaders()
        console = Console()
        with console.status("starting") as status:
            result = run_probe(options, note=lambda text: status.update(text))
        print_probe(result, console)
        for path in write_probe(result, args.output):
            console.print(f"[dim]{escape(str(path))}[/]", soft_wrap=True)
        broken = _broken_limits(result, max_kl=args.max_kl, min_pearson=args.min_pearson)
        for text in broken:
            console.print(f"[bold red]{text}[/]")
        return FOUND if broken else 0

    return run


def card(parser: argparse.ArgumentParser) -> Runner:
    """Write correction, diagnosis and recipe of a run into its model card."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help=f"folder with {METRICS_FILE}")
    parser.add_argument("--card", metavar="FILE", help=f"model card to write into (default: {CARD_FILE} in RUN_DIR)")

    def run(args: argparse.Namespace) -> int:
        from trl_offpolicy.diagnosis.report.model_card import write_card

        print(write_card(args.run_dir, args.card))
        return 0

    return run


COMMANDS: dict[str, Command] = {
    "probe": probe,
    "doctor": doctor,
    "demo": demo,
    "report": report,
    "watch": watch,
    "card": card,
    "presets": presets,
    "migrate": migrate,
    "recipes": recipes,
    "serve": serve,
}


def _thresholds(pairs: Sequence[str]) -> Thresholds:
    """The default thresholds, with those replaced that a ``NAME=VALUE`` pair sets."""
    from trl_offpolicy.diagnosis.thresholds import thresholds_from

    values = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise ValueError(f"--threshold must be NAME=VALUE with a number, but got {pair}.") from None
    return thresholds_from(values)


def _print_thresholds() -> None:
    from dataclasses import fields

    from trl_offpolicy.diagnosis.thresholds import Thresholds

    for one in fields(Thresholds):
        print(f"{one.name:<20} {one.default:<6g} {one.metadata['meaning']} [{one.metadata['source']}]")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """What the engine of a probe samples, and how."""
    parser.add_argument("--temperature", type=float, default=1.0, help="of the engine (default: 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="top-p of the engine (default: 1, off)")
    parser.add_argument("--top-k", type=int, default=0, help="top-k of the engine (default: 0, off)")
    parser.add_argument("--min-p", type=float, default=0.0, help="min-p of the engine (default: 0, off)")
    parser.add_argument(
        "--mirror", action="store_true", help="the trainer scores at the same temperature and truncation"
    )
    parser.add_argument("--samples", type=int, default=4, help="completions per prompt (default: 4)")
    parser.add_argument("--max-tokens", type=int, default=32, help="longest completion (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the engine (default: 0)")


def _probe_options(args: argparse.Namespace) -> ProbeOptions:
    from trl_offpolicy.diagnosis.probe.options import ProbeOptions
    from trl_offpolicy.diagnosis.probe.setting import parse_arguments
    from trl_offpolicy.diagnosis.probe.sides import read_prompts
    from trl_offpolicy.engines.rounding import parse_rounding

    names = ("model", "adapter", "engine", "engine_dtype", "trainer_dtype", "trainer_device", "quantization",
             "weight_rounding", "temperature", "top_p", "top_k", "min_p", "mirror", "samples", "max_tokens", "seed",
             "against", "exact")  # fmt: skip
    if args.weight_rounding is not None:
        parse_rounding(args.weight_rounding, where="--weight-rounding")
    for name in ("max_kl", "min_pearson"):
        value = getattr(args, name)
        if value is not None and not -1 <= value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be a finite number, but got {value}.")
    prompts = () if args.prompts is None else read_prompts(args.prompts)
    given = {name: getattr(args, name) for name in names}
    given["engine_dtype"] = args.engine_dtype or (args.trainer_dtype if args.exact else "float32")
    if args.engine_settings is not None:
        given["engine_arguments"] = parse_arguments(args.engine_settings, where="--engine-settings")
    return ProbeOptions(**given, prompts=prompts, explain=not args.no_hypotheses, ask=not args.no_ask)


def _broken_limits(result: ProbeResult, *, max_kl: float | None, min_pearson: float | None) -> list[str]:
    """The limits that the mismatch crosses, in words; empty if there is none. A limit of None is never crossed."""
    kl, pearson = result.metrics["mismatch/kl_k3"], result.metrics["mismatch/prob_pearson"]
    found = []
    if max_kl is not None and not kl <= max_kl:
        found.append(f"KL k3 {kl:.4g} nats per token is above --max-kl {max_kl:g}")
    if min_pearson is not None and not pearson >= min_pearson:
        found.append(f"Pearson {pearson:.5f} is below --min-pearson {min_pearson:g}")
    return found


def _quiet_loaders() -> None:
    """Silence the progress output of engines and loaders; warnings and errors still show."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as loading

    loading.disable_progress_bar()


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each puts its runner into ``run``."""
    parser = argparse.ArgumentParser(prog="trl-offpolicy", description="Off-policy corrections for TRL's GRPO.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        text = (command.__doc__ or "").splitlines()[0]
        subparser = subparsers.add_parser(name, help=text, description=text)
        runner = command(subparser)
        subparser.set_defaults(run=runner, subparser=subparser)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; ``a.b=c`` may stand before and behind the options.

    argparse gives all free words to the first place where one stands, and its ``parse_intermixed_args`` does not work
    with subcommands.
    """
    args, further = parser.parse_known_args(argv)
    if options := [word.partition("=")[0] for word in further if word.startswith("-")]:
        own = re.findall(r"--[\w-]+", args.subparser.format_usage())
        args.subparser.error(f"an option must be one of --help, but got {options[0]}.{near(options[0], own)}")
    if further and not hasattr(args, "overrides"):
        args.subparser.error(f"unrecognized arguments: {' '.join(further)}")
    if further:
        args.overrides = [*args.overrides, *further]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: arguments without the program's name; None takes them from the command line.

    Returns:
        0 on success, 2 for bad input (one line on standard error says why), 1 if a package is missing.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        parser.error(f"COMMAND must be one of {', '.join(COMMANDS)}, but got {given[0]!r}.{near(given[0], COMMANDS)}")
    args = parse(parser, given)
    runner: Runner = args.run
    try:
        with _short_warnings():
            return runner(args)
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  so that the interpreter's own flush at exit is quiet
        return 0
    except (OSError, ValueError) as error:
        return _fail(args.command, str(error), BAD_INPUT)
    except MissingPackageError as error:
        return _fail(args.command, str(error), MISSING_PACKAGE)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        return _fail(args.command, f"package {package} is not installed.{how_to_install(package)}", MISSING_PACKAGE)


def _fail(command: str, message: str, status: int) -> int:
    print(f"trl-offpolicy {command}: {' '.join(message.split())}", file=sys.stderr)
    return status


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print warnings as one line each, without file and source line."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        yield


if __name__ == "__main__":
    sys.exit(main())
