"""Keeps tokens and passwords out of what a run folder says of its command: the folder may be uploaded."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NAMES = re.compile(
    r"(?:^|[-_.])(?:hub|hf|auth|access|api|wandb)[-_]?(?:token|key)$|(?:^|[-_.])(?:password|secret)$", re.I
)
_VALUES = re.compile(r"\b(?:hf_|sk-)[A-Za-z0-9_-]{8,}")
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret.

    Example:
        >>> is_secret("hub_token"), is_secret("--api-key"), is_secret("eos_token")
        (True, True, False)
    """
    return _NAMES.search(name) is not None


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line whose secrets are hidden, by the names of the options and by how tokens look.

    Example:
        >>> without_secrets(["train.py", "--hub_token", "abc", "--api_key=abc", "--seed", "1"])
        ['train.py', '--hub_token', '***', '--api_key=***', '--seed', '1']
    """
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
        elif word.startswith("-") and equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_VALUES.sub(HIDDEN, word))
        hide_next = word.startswith("-") and not equals and is_secret(word)
    return shown
