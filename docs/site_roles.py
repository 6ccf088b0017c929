"""A griffe extension: roles in docstrings (``:class:`~trl_offpolicy.Correction```) become links, examples code."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

ROLE = re.compile(r":(?:class|func|meth|data|mod|attr|exc):`(~?)([\w.]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
"""griffe reads sessions in a section called Examples."""
SESSION = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
"""A session outside of a section."""
DERIVED = "trl_offpolicy.metrics."
"""Modules whose classes are made when they run."""
PACKAGES = ("trl_offpolicy", "lightning_module")


def as_link(role: re.Match[str], scope: Object) -> str:
    """Markdown of one role: a link where the site has the object, else its name."""
    path = role[2]
    shown = path.rpartition(".")[2] if role[1] else path.lstrip(".")
    if path.startswith("."):
        module = scope if scope.is_module else scope.module
        path = (module.path if module.is_init_module else module.path.rpartition(".")[0]) + path
    elif path.partition(".")[0] not in PACKAGES:
        path = resolve(path, scope)
    return f'<autoref identifier="{path}" optional>`{shown}`</autoref>'


def resolve(name: str, scope: Object) -> str:
    """The full path of a name as the docstring's module sees it."""
    head, _, rest = name.partition(".")
    try:
        return ".".join(filter(None, (scope.resolve(head), rest)))
    except Exception:
        return name


class Roles(Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """A class that is derived in one line has its docstring when it runs, not in the source."""
        module = attr.parent
        if attr.docstring is None and module is not None and module.is_module and module.path.startswith(DERIVED):
            found = getattr(import_module(module.path), attr.name, None)
            if isinstance(found, type) and found.__doc__:
                attr.docstring = Docstring(found.__doc__, parent=attr)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            text = SESSION.sub(r"```pycon\n\g<0>\n```", EXAMPLE.sub("Examples:", obj.docstring.value))
            obj.docstring.value = ROLE.sub(lambda role: as_link(role, obj), text)
