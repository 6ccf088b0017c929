"""The JSON in a prompt, as other libraries write it: lists of tools and structured questions, rendered on each side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

COMPACT = (",", ":")


def _for_a_page(value: Any, **options: Any) -> str:
    """As Jinja's own ``tojson`` filter: keys in order, and what a web page would read as markup escaped."""
    text = json.dumps(value, sort_keys=True, **options)
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


FORMS: Mapping[str, Callable[[Any], str]] = {
    "with blanks": lambda value: json.dumps(value, ensure_ascii=False),
    "without blanks": lambda value: json.dumps(value, ensure_ascii=False, separators=COMPACT),
    "in ASCII": json.dumps,
    "in ASCII without blanks": lambda value: json.dumps(value, separators=COMPACT),
    "with sorted keys": lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True),
    "with sorted keys without blanks": lambda value: json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=COMPACT
    ),
    "sorted and escaped as by Jinja's tojson": _for_a_page,
    "sorted and escaped as by Jinja's tojson, without blanks": lambda value: _for_a_page(value, separators=COMPACT),
    "in lines indented by 2": lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    "in lines indented by 4": lambda value: json.dumps(value, ensure_ascii=False, indent=4),
    "as Python's repr": repr,
}
"""How a value is written, by name: ``json.dumps`` with the options that libraries choose, and others."""


def in_other_forms(texts: Sequence[str]) -> dict[str, list[str]]:
    """The texts with all of their JSON in each of :data:`FORMS`, by name; empty if they hold none.

    Example:
        >>> in_other_forms(['Tools: {"b": 1, "a": "x"}.'])["JSON with sorted keys without blanks"]
        ['Tools: {"a":"x","b":1}.']
    """
    parts = [list(_parts(text)) for text in texts]
    if not any(isinstance(part, tuple) for row in parts for part in row):
        return {}
    return {
        f"JSON {name}": ["".join(part if isinstance(part, str) else write(part[0]) for part in row) for row in parts]
        for name, write in FORMS.items()
    }


def _parts(text: str) -> Iterator[str | tuple[Any]]:
    """The text in pieces; a JSON value that holds keys is the one entry of a tuple."""
    decoder, begin, place = json.JSONDecoder(), 0, 0
    while (place := _next_bracket(text, place)) >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        if _has_keys(value):
            yield text[begin:place]
            yield (value,)
            begin = end
        place = end
    yield text[begin:]


def _next_bracket(text: str, place: int) -> int:
    found = [at for bracket in "{[" if (at := text.find(bracket, place)) >= 0]
    return min(found, default=-1)


def _has_keys(value: Any) -> bool:
    """Whether a value is an object, or a list of such: numbers in brackets are no JSON that anybody rendered."""
    return bool(value) and (isinstance(value, dict) or (isinstance(value, list) and all(map(_has_keys, value))))
