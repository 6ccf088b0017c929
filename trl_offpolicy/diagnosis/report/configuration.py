"""``run.json`` as YAML for people: what it holds as Python text (a correction, an objective) becomes settings too."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def configuration(info: Mapping[str, Any]) -> str:
    """``run.json`` as YAML, one key a line; empty if there is nothing.

    Example:
        >>> print(configuration({"correction": "Correction(weight=TruncateWeight(max_weight=2.0), keep=())"}))
        correction:
          weight:
            type: truncate
            max_weight: 2.0
          keep: []
        <BLANKLINE>
    """
    import yaml

    if not info:
        return ""
    return str(yaml.safe_dump(_readable(dict(info)), sort_keys=False, allow_unicode=True, width=10_000))


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _readable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(entry) for entry in value]
    return _from_text(value) if isinstance(value, str) else value


def _from_text(text: str) -> Any:
    """Settings from the text of a Python object, or from words with a dict after them; any other text as it is."""
    if (tree := _parsed(text, ast.Call)) is not None:
        settings = _value(tree)
        return {key: value for key, value in settings.items() if key != "type"} or text
    words, brace, rest = text.partition(" {")
    if brace and (tree := _parsed(brace + rest, ast.Dict)) is not None:
        return {words: _value(tree)}
    return text


def _parsed(text: str, kind: type[ast.expr]) -> ast.expr | None:
    """The expression of one kind that a text is; None if it is none. Nothing is evaluated."""
    if not text.rstrip().endswith((")", "}")):
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    plain_call = not isinstance(tree, ast.Call) or (isinstance(tree.func, ast.Name) and not tree.args)
    return tree if isinstance(tree, kind) and plain_call else None


def _value(node: ast.expr) -> Any:
    """Plain values of a tree; what has none stays text."""
    if isinstance(node, ast.Constant | ast.UnaryOp):  # a number may have a sign
        with suppress(ValueError):
            value = ast.literal_eval(node)
            return value if isinstance(value, str | int | float | bool | None) else str(value)
    if isinstance(node, ast.Tuple | ast.List):
        return [_value(entry) for entry in node.elts]
    if isinstance(node, ast.Dict) and all(node.keys):
        return {ast.literal_eval(key): _value(entry) for key, entry in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        named = {word.arg: _value(word.value) for word in node.keywords if word.arg}
        return {"type": _yaml_name(node.func.id), **named}
    return ast.unparse(node)


def _yaml_name(class_name: str) -> str:
    """The name in YAML of a part of this package, else of its class: ``RatioBand`` is ``ratio_band``."""
    from trl_offpolicy.correction import correction  # noqa: F401  defines the parts of a correction
    from trl_offpolicy.objective import objective  # noqa: F401
    from trl_offpolicy.parts import Part, types_of

    names = {cls.__name__: name for kind in Part.__subclasses__() for name, cls in types_of(kind).items()}
    return names.get(class_name) or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).lower()
