"""The label of a vLLM server (its ``weight_version``): whose weights it holds, and whether it may be asked."""

from __future__ import annotations

FRESH = "default"
"""Of a server that was given no weights since its start."""
ADAPTER = ":adapter"
"""Ends the label where the base weights are untouched."""
_LOADING, _UNUSABLE = "loading:", "unusable:"
_LONGEST = 600


def loading(label: str) -> str:
    """The label while the weights of ``label`` are being loaded, which stays if that does not end."""
    return _LOADING + label


def unusable(reason: str) -> str:
    """The label of a server whose weights are those of nobody."""
    return _UNUSABLE + " ".join(reason.split())[:_LONGEST]


def is_loading(label: str, run: str) -> bool:
    """True if ``run`` is loading weights, or began to."""
    return label.startswith(f"{_LOADING}{run}:")


def refusal(label: str) -> str | None:
    """Why a server with this label must not be asked for completions; None = it may.

    Example:
        >>> refusal("run:3")
        >>> refusal(loading("run:3"))
        'a load of run:3 has begun and not ended, so that its weights may be of two versions'
    """
    if label.startswith(_LOADING):
        name = label.removeprefix(_LOADING)
        return f"a load of {name} has begun and not ended, so that its weights may be of two versions"
    if label.startswith(_UNUSABLE):
        return label.removeprefix(_UNUSABLE)
    return None
