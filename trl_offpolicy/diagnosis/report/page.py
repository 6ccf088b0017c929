"""Renders pages from the templates in ``diagnosis/templates``. Every value is escaped."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_offpolicy.diagnosis.numbers import format_number
from trl_offpolicy.diagnosis.report.summary import format_with_interval
from trl_offpolicy.run_folder.strict import without_paths

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parents[1] / "templates"
SCRIPT = TEMPLATES / "tables.js"
"""The only script of a page: it sorts and filters tables."""


def render_page(template: str, **values: Any) -> str:
    """Render the whole document.

    Args:
        template: a file in :data:`TEMPLATES`.
        **values: the values that the template names; a missing one raises an error.
    """
    return _environment().get_template(template).render(**values)


@cache
def script_hash() -> str:
    """What a Content-Security-Policy calls :data:`SCRIPT`: a browser runs no other script on the page."""
    return f"sha256-{b64encode(sha256(SCRIPT.read_text(encoding='utf-8').encode()).digest()).decode()}"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_shared,
    )
    environment.filters |= {
        "number": format_number,
        "with_interval": format_with_interval,
        "first_up": lambda text: f"{text[:1].upper()}{text[1:]}",
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    }
    environment.globals["script_hash"] = Markup(script_hash())  # its slashes are no path
    return environment


def _shared(value: Any) -> Any:
    """A value of a page that may be sent to others: a text without paths of this machine. Markup is made of such."""
    return without_paths(value) if type(value) is str else value


def flat_texts(info: Mapping[str, Any]) -> dict[str, str]:
    """Each entry as one line of text, e.g. of ``run.json``; nested ones are flattened.

    Example:
        >>> flat_texts({"versions": {"torch": "2.9", "trl": "1.16"}, "preset": None})
        {'versions': 'torch 2.9, trl 1.16', 'preset': '–'}
    """
    return {str(key): _flat_text(value) for key, value in info.items()}


def _flat_text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_flat_text(entry)}" for key, entry in value.items())
    return "–" if value is None or value == "" else str(value)
