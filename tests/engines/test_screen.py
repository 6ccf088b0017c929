"""What is left out of the screen is named; all else is printed."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from typing import Any

import pytest
import torch

from trl_offpolicy.engines.screen import KNOWN, quiet_start, quiet_vllm

RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
NUMA = "[W1124 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy (function init_cpu_memory_env)\n"


@pytest.fixture(autouse=True)
def as_before() -> Any:
    kept = {name: list(logging.getLogger(name).filters) for name in KNOWN}
    with warnings.catch_warnings():
        yield
    for name, filters in kept.items():
        logging.getLogger(name).filters[:] = filters


def test_named_messages_are_left_out_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    quiet_vllm()
    quiet_vllm()
    logging.getLogger(RELOAD).warning("%s: Failed to load weights", "ParallelLMHead")
    logging.getLogger("vllm.triton_utils.importing").warning("Triton is installed, but it is of no use.")
    assert caplog.messages == []
    logging.getLogger(RELOAD).warning("%s: Failed to load weights", "QKVParallelLinear")
    logging.getLogger("vllm.elsewhere").warning("ParallelLMHead: Failed to load weights")
    assert caplog.messages == [f"{layer}: Failed to load weights" for layer in ("QKVParallelLinear", "ParallelLMHead")]
    assert all(len(logging.getLogger(name).filters) == 1 for name in KNOWN)


def test_two_deprecations_are_left_out() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet_vllm()
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use another", FutureWarning, stacklevel=1)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use another", FutureWarning, stacklevel=1)
        warnings.warn("`torch.distributed.other` is deprecated", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in said] == ["`torch.distributed.other` is deprecated"]


def test_the_line_of_the_numa_binding(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    nodes = []

    def bind(asked: Any) -> None:
        nodes.append(asked)
        os.write(2, f"{NUMA}numa: no such node\n".encode())

    monkeypatch.setitem(sys.modules, "vllm", None)  # its operators need not be registered
    monkeypatch.setattr(torch.ops._C, "init_cpu_memory_env", bind, raising=False)
    with quiet_start():
        torch.ops._C.init_cpu_memory_env([0])
    torch.ops._C.init_cpu_memory_env([1])
    assert nodes == [[0], [1]]
    assert capfd.readouterr().err == f"numa: no such node\n{NUMA}numa: no such node\n"


def test_without_vllm_on_a_cpu_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with quiet_start():
        pass


@pytest.mark.parametrize("operators", [True, False])
def test_standard_output_has_a_descriptor_in_the_captured_cell_of_a_notebook(
    operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for it while it starts, and raises where there is none."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    if operators:
        monkeypatch.setattr(torch.ops._C, "init_cpu_memory_env", lambda asked: None, raising=False)
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stdout", captured)
    with quiet_start():
        assert sys.stdout.fileno() == 1
        print("read by the user")
    assert sys.stdout is captured and captured.getvalue() == "read by the user\n"
    monkeypatch.setattr(sys, "stdout", sys.__stderr__)
    with quiet_start():
        assert sys.stdout is sys.__stderr__
