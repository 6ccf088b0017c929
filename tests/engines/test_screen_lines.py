"""What the slow tests of both quickstarts take for a warning."""

from __future__ import annotations

from screen_lines import KNOWN, LAUNCHED, unknown_warnings

SCREEN = """The following values were not passed to `accelerate launch` and had defaults used instead:
\t`--num_processes` was set to a value of `0`
To avoid this warning pass in values for each of the problematic parameters or run `accelerate config`.
[2026-11-26 23:54:29] [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU. If you have GPU
importing torch, transformers and vLLM
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:10<00:00, 10.86s/it]
"""
ODD = (
    "/site-packages/a.py:3: FutureWarning: `torch.distributed.reduce_op` is deprecated",
    "WARNING 11-26 23:54:29 [layerwise.py:60] ParallelLMHead: Failed to load weights",
    "[W1126 23:54:29.1 utils.cpp:68] NUMA binding: no such node",
    "ERROR: the engine is gone",
    "Traceback (most recent call last):",
)


def test_what_the_quickstart_was_seen_to_print_is_known() -> None:
    assert unknown_warnings(SCREEN, LAUNCHED) == []
    assert [line[:10] for line in unknown_warnings(SCREEN, KNOWN)] == ["To avoid t"]


def test_any_other_warning_is_found_and_pythons_source_line_belongs_to_the_line_above() -> None:
    assert unknown_warnings(SCREEN + "\n".join(ODD), LAUNCHED) == list(ODD)
    python = "/x.py:3: UserWarning: known\n  warnings.warn('it')\n/x.py:4: UserWarning: new\n  warnings.warn('it')\n"
    assert unknown_warnings(python, {"UserWarning: known": ""}) == ["/x.py:4: UserWarning: new"]
