"""Fenced blocks of the documentation: found, run, checked. ``tests/docs/test_docs_code.py`` says which."""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import shlex
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "recipes" / "quickstart" / "config.yaml"
"""Stands for a page's ``MY.yaml``."""
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.*?) -->\n+)?^```(?P<kind>\w+)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
OUTPUT = doctest.OutputChecker()
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        page: path in the checkout.
        line: of its fence.
        kind: ``python``, ``yaml``, ``bash``, ...
        code: what stands inside.
        why_not: what the comment before it says, if it is not run.
    """

    page: str
    line: int
    kind: str
    code: str
    why_not: str | None

    @property
    def place(self) -> str:
        """``docs/index.md:42``."""
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in order."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text.count("\n", 0, one.start("kind")) + 1, one["kind"], one["code"], one["why"])
        for one in BLOCK.finditer(text)
    ]


# --------------------------------------------------------------------------------------------------------------- python


def run_python(block: Block, space: dict[str, Any]) -> None:
    """Run statement by statement; a ``print`` prints what the comment behind it (or below it) says.

    Raises:
        AssertionError: it prints something else, or a ``print`` says nothing about it.
    """
    lines = block.code.splitlines()
    for statement in ast.parse(block.code).body:
        printed = io.StringIO()
        code = compile(ast.Module([statement], []), block.place, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, space)
        for call in (node for node in ast.walk(statement) if is_print(node)):
            expected = comment_at(lines, call.end_lineno or 0)
            assert expected, f"{block.place}: say what the print in line {call.lineno} prints."
            assert OUTPUT.check_output(expected + "\n", printed.getvalue(), OUTPUT_FLAGS), (
                f"{block.place}: expected {expected!r}, got {printed.getvalue()!r}."
            )


def is_print(node: ast.AST) -> bool:
    """A call of ``print``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def comment_at(lines: list[str], end: int) -> str | None:
    """The comment behind line ``end`` (counted from 1), or the one that is the whole next line."""
    behind = re.search(r"  # (.*)$", lines[end - 1])
    if behind:
        return behind[1]
    below = re.match(r"# (.*)$", lines[end]) if end < len(lines) else None
    return below[1] if below else None


# ----------------------------------------------------------------------------------------------------------------- yaml


def alternatives(code: str) -> list[dict[str, Any]]:
    """The documents of a block: one, or, where its only key is repeated, one for each time.

    Raises:
        AssertionError: some keys are repeated and some are not, so that the block means nothing.
    """
    margin = min(len(line) - len(line.lstrip()) for line in code.splitlines() if line.strip())
    parts = re.split(rf"^(?= {{{margin}}}[\w-])", code, flags=re.MULTILINE)
    parts = [part for part in parts if yaml.safe_load(part) is not None]
    keys = [part.split(":")[0].strip() for part in parts]
    if len(set(keys)) == len(keys):
        return [yaml.safe_load(code)]
    assert len(set(keys)) == 1, f"keys {keys} are repeated in part."
    return [yaml.safe_load(part) for part in parts]


def check_yaml(spec: dict[str, Any], folder: Path) -> str:
    """Validate a configuration by what it is for; returns what that is."""
    if "distributed_type" in spec:
        return check_accelerate(spec, folder)
    if "model" in spec and "data" in spec:
        return check_lightning(spec, folder)
    if set(spec) <= {"policy_loss", "kl", "proximal"}:
        spec = {"offpolicy": {"objective": spec}}
    if set(spec) == {"advantages"}:
        spec = {"offpolicy": spec}
    return check_training(spec, folder)


def check_training(spec: dict[str, Any], folder: Path) -> str:
    """Every key is a field of the recipe script, and the trainer's configuration takes the values."""
    from trl_offpolicy.engines.settings import EngineSettings
    from trl_offpolicy.trl.config import OffPolicyGRPOConfig

    own = {item.name for item in fields(OffPolicyGRPOConfig)}
    others = {item.name for cls in recipe_arguments() for item in fields(cls)} - own
    assert set(spec) <= own | others, f"unknown fields {sorted(set(spec) - own - others)}"
    plain: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
    given = {key: value for key, value in spec.items() if key in own}
    args = OffPolicyGRPOConfig(**{"output_dir": str(folder), **plain, **given})
    EngineSettings.parse(args.engine)
    assert args.preset.objective is not None
    return "training"


def check_accelerate(spec: dict[str, Any], folder: Path) -> str:
    """accelerate reads it."""
    from accelerate.commands.config.config_args import load_config_from_file

    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump(spec))
    assert load_config_from_file(str(path)).num_processes >= 1
    return "accelerate"


def check_lightning(spec: dict[str, Any], folder: Path) -> str:
    """LightningCLI takes all of it."""
    path = folder / "lightning.yaml"
    path.write_text(yaml.safe_dump(spec))
    check_lightning_command(["fit", "--config", str(path)])
    return "lightning"


# ----------------------------------------------------------------------------------------------------------------- bash


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command; comments, variables before it and a loop around it are left out."""
    lines = re.sub(r"\\\n", " ", block.code).splitlines()
    lines = [re.sub(r"^for .*; do$|; done$", "", line.split("  #")[0].strip()).strip() for line in lines]
    words = [shlex.split(line, comments=True) for line in lines]
    return [list(after_variables(one)) for one in words if one]


def after_variables(words: list[str]) -> list[str]:
    """Without ``NAME=value`` in front."""
    return after_variables(words[1:]) if re.match(r"^[A-Z_]+=", words[0]) else words


def check_command(words: list[str]) -> str:
    """The program, its subcommand and its options exist; returns the kind of command.

    Raises:
        AssertionError, SystemExit, ValueError: something in it does not exist.
    """
    if words[0] == "trl-offpolicy":
        from trl_offpolicy.cli.commands import build_parser

        return str(build_parser().parse_args(words[1:]).command)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(words[1:]) <= set(targets), words
        return "make"
    if words[:2] == ["pip", "install"]:
        return check_pip(words[2:])
    if words[:2] == ["accelerate", "launch"]:
        return check_launch(words[2:])
    if re.fullmatch(r"python3\.11 -m venv \.venv(-gpu)?|source \.venv(-gpu)?/bin/activate", " ".join(words)):
        return "environment"
    if words[:3] == ["python", "-m", "lightning_module"]:
        check_lightning_command(words[3:])
        return "lightning"
    assert words[0] == "python", f"nothing is known about {words[0]!r}"
    return check_script(words[1:])


def check_pip(words: list[str]) -> str:
    """The extras of this package that are named exist."""
    import tomllib

    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"(?:trl-offpolicy|\.)\[([\w,]+)\]", " ".join(words))
    assert named and all(extra in known for one in named for extra in one.split(",")), words
    return "pip"


def check_launch(words: list[str]) -> str:
    """``accelerate launch`` takes its part, the script the rest."""
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args(words)
    assert parsed.config_file is None or (ROOT / parsed.config_file).is_file(), parsed.config_file
    return check_script([parsed.training_script, *parsed.training_script_args])


@cache
def recipe_arguments() -> tuple[type, ...]:
    """The dataclasses that ``recipes/grpo.py`` parses beside the trainer's."""
    from importlib.util import module_from_spec, spec_from_file_location

    from trl import ModelConfig

    spec = spec_from_file_location("recipe_under_test", ROOT / "recipes" / "grpo.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.RecipeArguments, ModelConfig


def check_script(words: list[str]) -> str:
    """The script is there and knows every option; the recipe script parses them as in earnest."""
    path, *options = words
    assert (ROOT / path).is_file(), path
    if path == "recipes/grpo.py":
        from trl import TrlParser

        from trl_offpolicy.trl.config import OffPolicyGRPOConfig

        recipe, model = recipe_arguments()
        on_cpu = ["--use_cpu", "true", "--bf16", "false", "--fp16", "false"]  # a recipe for a GPU is parsed as well
        options = [
            str(EXAMPLE) if re.fullmatch(r"[A-Z]+\.yaml", word) else word for word in options if word != "--smoke"
        ]
        with contextlib.chdir(ROOT):
            TrlParser((recipe, OffPolicyGRPOConfig, model)).parse_args_and_config([*options, *on_cpu])
        return "recipe"
    named = {word.split("=")[0] for word in options if word.startswith("--")}
    known = {node.value for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Constant)}
    assert named <= known, f"{path} does not know {sorted(named - known)}"
    return "script"


def check_lightning_command(words: list[str]) -> None:
    """LightningCLI prints the configuration that these arguments give."""
    from lightning_module.cli import main

    shown = io.StringIO()
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(shown):
            main([*words, "--print_config"])
    except SystemExit as done:
        assert done.code in (0, None), words
    assert "model:" in shown.getvalue(), words
