"""Requests at once: order, errors, and an interrupt that waits for none of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from trl_offpolicy.engines.server.parallel import at_once

INTERRUPTED = """
import os, signal, threading, time
from trl_offpolicy.engines.server.parallel import at_once
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would this
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
at_once(lambda _: time.sleep(600), range(100), most=4)
"""


def test_answers_come_in_order_and_at_most_so_many_run() -> None:
    running, most = [0], [0]
    lock = threading.Lock()

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01 * (3 - number % 3))
        with lock:
            running[0] -= 1
        return number * 2

    assert at_once(work, range(12), most=3) == [number * 2 for number in range(12)]
    assert most[0] == 3
    assert at_once(work, []) == []


def test_the_first_error_is_raised_after_what_was_begun() -> None:
    done = []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("zero")
        time.sleep(0.1)
        done.append(number)

    with pytest.raises(ValueError, match="zero"):
        at_once(work, range(50), most=2)
    assert done in ([], [1])


@pytest.mark.integration
def test_ctrl_c_does_not_wait_for_requests() -> None:
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=200)
    assert ended.returncode != 0 and "KeyboardInterrupt" in ended.stderr
    assert time.monotonic() - start < 200  # importing takes a while on a busy machine; a request takes 600 s
