"""One event loop in a thread of its own, for async tools and rewards: what they share stays on one loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any


def run_in_background(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine. Also works where a loop is running already, as in a notebook."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="trl-offpolicy-async", daemon=True).start()
    return loop
