"""The tree: what a folder imports, and what it must not. Imports inside functions and for types only count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import trl_offpolicy

ROOT = Path(trl_offpolicy.__file__).parents[1]
LAYERS = (
    "checks", "packages", "parts", "functional", "stats", "types", "correction", "objective", "migrate", "presets",
    "metrics", "engines", "rollouts", "run_folder", "diagnosis", "control", "trl", "integrations", "cli",
)  # fmt: skip
"""A module imports from its own layer and from those before it."""
PUBLIC = ("async_grpo", "advantages", "config", "losses", "proximal", "replay", "routing", "shaping", "trainer")
"""Modules of one line at the top: the paths that users know."""


def modules() -> dict[str, Path]:
    found = {}
    for path in (path for package in ("trl_offpolicy", "lightning_module") for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Every dotted name that is imported, of names in a module the name as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str:
    """The module that a dotted name is, or is in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def layer(module: str) -> str:
    package, _, rest = module.partition(".")
    return package if package == "lightning_module" or not rest else rest.split(".")[0]


def own_imports(module: str) -> set[str]:
    return {found for name in imported(MODULES[module]) if (found := module_of(name)) and found != module}


def upwards(module: str, target: str) -> bool:
    """True if ``target`` lies above ``module``."""
    here, there = layer(module), layer(target)
    if here == "lightning_module":  # a trainer beside trl/, on the same layers
        return there in ("trl", "cli", "trl_offpolicy")
    if here not in LAYERS or here == "cli":  # the package itself, its names, __main__, the public paths, the commands
        return there == "lightning_module"
    return there not in LAYERS[: LAYERS.index(here) + 1]


def test_every_module_has_a_layer():
    known = {*LAYERS, *PUBLIC, "public", "trl_offpolicy", "lightning_module", "__main__"}
    assert {layer(module) for module in MODULES} == known


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module):
    assert sorted(target for target in own_imports(module) if upwards(module, target)) == []


def test_the_rule_finds_what_it_forbids():
    assert upwards("trl_offpolicy.functional.kl", "trl_offpolicy.types")
    assert upwards("trl_offpolicy.diagnosis.doctor", "trl_offpolicy.trl.trainer")
    assert upwards("trl_offpolicy.control.risk", "trl_offpolicy")
    assert upwards("lightning_module.module", "trl_offpolicy.trl.callbacks")
    assert not upwards("trl_offpolicy.correction.measure", "trl_offpolicy.correction.terms.keep")
    assert "trl_offpolicy.diagnosis.doctor" in own_imports("trl_offpolicy.cli.commands")  # inside a function


def test_only_the_folder_trl_imports_trl_and_only_lightning_module_lightning():
    for module, path in MODULES.items():
        packages = {name.split(".")[0] for name in imported(path)}
        assert layer(module) == "trl" or "trl" not in packages, module
        assert layer(module) == "lightning_module" or "lightning" not in packages, module


def test_the_hooks_of_other_frameworks_import_no_trainer():
    for module in (name for name in MODULES if layer(name) == "integrations"):
        assert not [target for target in own_imports(module) if layer(target) in ("trl", "engines", "rollouts")], module
        packages = {name.split(".")[0] for name in imported(MODULES[module])}
        assert not packages & {"verl", "skyrl", "slime", "miles", "prime_rl", "megatron"}, module  # only when called


def test_no_module_imports_itself_in_a_circle():
    graph = {module: own_imports(module) for module in MODULES}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for target in graph[module]:
            walk(target, (*path, module))
        done.add(module)

    for module in graph:
        walk(module, ())


def test_a_public_path_is_one_import():
    for name in PUBLIC:
        path = ROOT / "trl_offpolicy" / f"{name}.py"
        nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
        assert 1 <= len(nodes) <= 2 and len(path.read_text().splitlines()) <= 6, name


@pytest.mark.parametrize(
    "path, name",
    [
        ("blocks", "row_blocks"),
        ("booleans", "both"),
        ("advantages_groups", "leave_one_out"),
        ("advantages_tokens", "returns_to_go"),
    ],
)
def test_former_paths_of_functional_still_work(path, name):
    assert callable(getattr(import_module(f"trl_offpolicy.functional.{path}"), name))
