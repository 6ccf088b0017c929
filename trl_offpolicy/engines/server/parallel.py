"""Many requests at once, which an interrupt does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

CONCURRENCY = 64
_LOOK = 0.5  # seconds between two looks for an interrupt


def at_once(function: Callable[[Item], Answer], items: Iterable[Item], *, most: int = CONCURRENCY) -> list[Answer]:
    """``[function(item) for item in items]`` in at most ``most`` threads.

    The first error is raised once all that was begun has ended. Ctrl-C is raised at once: a pool of
    ``concurrent.futures`` would wait for its requests, and Python for the pool's threads, for minutes each.

    Example:
        >>> at_once(lambda n: n * n, [1, 2, 3])
        [1, 4, 9]
    """
    waiting = list(enumerate(items))[::-1]
    answers: dict[int, Answer] = {}
    errors: dict[int, BaseException] = {}
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting or errors:
                    return
                number, item = waiting.pop()
            try:
                answers[number] = function(item)
            except BaseException as error:
                errors[number] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(most, len(waiting)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK)  # a signal that another thread got does not end a wait
    except BaseException:  # Ctrl-C: what has not begun does not begin
        with lock:
            waiting.clear()
        raise
    if errors:
        raise errors[min(errors)]
    return [answers[number] for number in sorted(answers)]
