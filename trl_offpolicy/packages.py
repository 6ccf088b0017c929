"""What only some features need: packages and prepared models. If one is missing, the error says how to get it."""

from __future__ import annotations

import os
import sys
import time
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

EXTRAS = {
    "vllm": "vllm",
    "deepspeed": "deepspeed",
    "lightning": "lightning",
    "jsonargparse": "lightning",
    "reasoning_gym": "quickstart",
    "gguf": "quickstart",
    "rl_doctor": "doctors",
    "rlprobe": "doctors",
}
"""{module: the extra of this package that installs it}."""


class MissingPackageError(ModuleNotFoundError):
    """A package is not installed. The message has the command that installs it."""


def how_to_install(module: str) -> str:
    """The command that installs a module, with a space before it; empty text for one that no extra holds.

    Example:
        >>> how_to_install("lightning")
        ' Install it in a checkout of trl-offpolicy: pip install -e ".[lightning]".'
    """
    extra = EXTRAS.get(module)
    if extra is None:
        return ""
    without_gpu = " On a machine without a GPU: make install." if extra == "vllm" else ""
    return f' Install it in a checkout of trl-offpolicy: pip install -e ".[{extra}]".{without_gpu}'


def require(module: str, *, by: str) -> None:
    """Raise unless a module is installed; nothing is imported.

    Args:
        module: its name.
        by: what needs it, for the message, e.g. ``use_vllm: true``.

    Raises:
        MissingPackageError: it is not installed; the message has the command that installs it.
    """
    installed = sys.modules[module] is not None if module in sys.modules else find_spec(module) is not None
    if not installed:
        message = f"{by} must have the package {module}, but it is not installed.{how_to_install(module)}"
        raise MissingPackageError(message, name=module)


QUICKSTART_MODEL = "SmolLM2-135M-Instruct"
"""The folder in ``.cache`` into which ``make model`` converts the model of the quickstart."""


PREPARE_SCRIPT = "recipes/quickstart/prepare_model.py"
"""What converts it: in a checkout, and in a copy of a recipe."""


def how_to_prepare() -> str:
    """What makes the quickstart's model in the working folder, with a space before it."""
    if not Path("Makefile").is_file() and Path(PREPARE_SCRIPT).is_file():  # a copy of a recipe
        return f" `python {PREPARE_SCRIPT}` prepares it."
    return " `make model` in a checkout of trl-offpolicy prepares it."


def check_model(field: str, name: object) -> None:
    """Raise for the path of a folder that does not exist; a loader would look for it on the Hub, and say so.

    Args:
        field: its name, for the message.
        name: a folder, a Hub name (``model`` or ``owner/model``) or a model, which are not looked at.

    Raises:
        FileNotFoundError: there is no such folder; for the quickstart's model the message says what makes it.
    """
    if not isinstance(name, str) or Path(name).expanduser().is_dir():
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        prepare = how_to_prepare() if Path(name).name == QUICKSTART_MODEL else ""
        raise FileNotFoundError(f"{field} must be an existing folder or a Hub name, but got {name!r}.{prepare}")


BUILD_PATIENCE = 60.0
"""Seconds after which a build of which no process is seen counts as interrupted."""


def interrupted_builds(folder: Path | None = None) -> list[Path]:
    """Locks that interrupted builds of torch's extensions have left, for which the next one waits without end.

    Args:
        folder: where torch builds; None = ``TORCH_EXTENSIONS_DIR``, else the user's cache.
    """
    root = folder or Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    old = time.time() - BUILD_PATIENCE
    found = [path for pattern in ("*/lock", "*/*/lock") for path in root.glob(pattern) if path.stat().st_mtime < old]
    return sorted(path for path in found if path.parent.resolve() not in _working_folders())


def _working_folders() -> set[Path]:
    """Working folders of all processes that can be seen; a compiler's is that of its build."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            found.add(link.resolve(strict=True))
    return found


def warn_about_builds(folder: Path | None = None) -> None:
    """Warn of each lock of an interrupted build; arguments as for :func:`interrupted_builds`."""
    for lock in interrupted_builds(folder):
        warnings.warn(
            f"{lock} was left by an interrupted build of {lock.parent.name}: DeepSpeed will wait for it without end "
            f"and without a word. If no other machine is building there, delete it: rm {lock}",
            stacklevel=2,
        )
