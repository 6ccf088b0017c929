"""One event loop in a thread of its own, for async tools and rewards: what they share stays on one loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any


def run_in_background(coroutine: Coroutine[Any, Any, Any], *, timeout: float | None = None) -> Any:
    """The result of a coroutine. Also works where a loop is running already, as in a notebook.

    Args:
        coroutine: what is awaited.
        timeout: seconds after which the loop is taken to be blocked, and is left to itself; later calls get another.

    Raises:
        TimeoutError: there is no result after ``timeout`` seconds.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result(timeout)
    except TimeoutError:
        if not future.done():
            future.cancel()
            _loop_of.cache_clear()
        raise


def _loop() -> asyncio.AbstractEventLoop:
    return _loop_of(os.getpid())  # a fork has no threads, and so no loop


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trl-offpolicy-async", daemon=True).start()
    return loop
