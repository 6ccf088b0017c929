"""Reads the setting of a second engine: ``name=value,...`` for vLLM, or the URL of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_WORDS = {"true": True, "false": False, "none": None}
_OTHER_WEIGHTS = ("model", "weight_rounding", "quantization", "hf_overrides", "load_format")
"""Options under which the second engine would not hold the same weights of the same model."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A second setting of the engine.

    Args:
        text: as it was given.
        url: address of a server; empty = a second vLLM engine is started here.
        arguments: arguments of ``vllm.LLM`` that differ from the first engine's.
        environment: variables of the second engine's process.
    """

    text: str
    url: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def parse_setting(text: str, *, where: str = "against") -> Setting:
    """The setting that a text describes; names in capitals are variables of the environment.

    Args:
        text: a URL, or ``name=value,...`` with JSON values (words need no quotes).
        where: name of the option in messages.

    Raises:
        ValueError: the text is neither, or names something that would make it another policy.

    Example:
        >>> parse_setting("tensor_parallel_size=2,enforce_eager=true,OMP_NUM_THREADS=1").arguments
        {'tensor_parallel_size': 2, 'enforce_eager': True}
        >>> parse_setting("http://127.0.0.1:8001/").url
        'http://127.0.0.1:8001'
    """
    if text.startswith(("http://", "https://")):
        return Setting(text=text, url=text.rstrip("/"))
    arguments = parse_arguments(text, where=where)
    if clash := [name for name in arguments if name in _OTHER_WEIGHTS]:
        raise ValueError(
            f"{where} must leave the weights as they are, but got {clash[0]}: that is another policy, not another "
            "setting. Probe it by itself."
        )
    variables = {name: str(value) for name, value in arguments.items() if _VARIABLE.fullmatch(name)}
    others = {name: value for name, value in arguments.items() if name not in variables}
    return Setting(text=text, arguments=others, environment=variables)


def parse_arguments(text: str, *, where: str) -> dict[str, Any]:
    """``name=value,...`` as a mapping; values are JSON, or words.

    Raises:
        ValueError: a part is not of this form, or a name comes twice.

    Example:
        >>> parse_arguments('dtype=bfloat16,compilation_config={"mode": 0, "cudagraph_mode": 0}', where="against")
        {'dtype': 'bfloat16', 'compilation_config': {'mode': 0, 'cudagraph_mode': 0}}
    """
    found: dict[str, Any] = {}
    for part in _parts(text):
        name, sign, value = part.partition("=")
        name = name.strip().removeprefix("--")
        plain = name if _VARIABLE.fullmatch(name) else name.replace("-", "_")
        if not sign or not plain.isidentifier() or not value.strip():
            raise ValueError(f"{where} must be name=value,... or the URL of a server, but got {part!r}.")
        if plain in found:
            raise ValueError(f"{where} must name {plain} once, but got it twice.")
        found[plain] = _value(value.strip())
    return found


def _parts(text: str) -> Iterator[str]:
    """The text cut at commas that are not inside brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            yield part
            part = ""
        else:
            part += letter
    yield part


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text
