"""What is done about a server whose load of weights failed: it gets those that it had, or refuses requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from trl_offpolicy.engines.engine import EngineError
from trl_offpolicy.engines.server.labels import FRESH, unusable

_RECOVERIES = 2  # vLLM's first load after a failed one can meet what that one left


def recover(
    before: str,
    error: str,
    *,
    known: Mapping[str, str | None],
    loads: int,
    reload: Callable[[str], None],
    reset: Callable[[], None],
    read_label: Callable[[], str],
    set_label: Callable[[str], None],
    failed: str,
) -> str:
    """After a failed load, give the server the weights that it had; returns what it has now, in words.

    Args:
        before: its label before the load.
        error: why the load failed.
        known: folder of the weights of each label that can be loaded again.
        loads: loads that one recovery takes.
        reload: has the server load a folder.
        reset: empties its prefix cache.
        read_label: returns its label.
        set_label: sets it.
        failed: label of the weights that it did not take.
    """
    old = known.get(before)
    for _ in range(_RECOVERIES if old is not None else 0):
        assert old is not None
        try:
            for _ in range(loads):
                reload(old)
            reset()
            set_label(before)
        except EngineError as again:
            error = f"{error}; nor could the weights before it be loaded again: {again}"
            continue
        name = "the weights that it was started with" if before == FRESH else f"the weights of {before}"
        return f"It has {name} again."
    try:
        if before != FRESH and read_label() == FRESH:
            return "It was started anew meanwhile, and has the weights that it was started with."
        set_label(unusable(f"the load of {failed} failed ({error})"))
    except EngineError as gone:
        return f"What it has now is not known: {gone}"
    return (
        "Its weights are now those of no version: it is marked unusable, and refuses requests until it is started "
        "again or takes whole weights."
    )


def waited(done: Callable[[], bool], *, seconds: float) -> bool:
    """Whether ``done`` came true within so many seconds."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
