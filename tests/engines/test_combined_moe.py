"""Routing replay (R3), the sampling mask, sampling ahead and the broadcast of weights together, with a real vLLM.

The engine runs vLLM's Model Runner V2, whose Triton kernels run in Triton's interpreter here. Every batch is computed
again by plain forwards, see ``again.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.routing.test_moe_vllm import environment, run
from engines.server.servers import Server
from tiny_models import save_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(2400)]

SCRIPT = str(Path(__file__).with_name("combined_run.py"))
LIGHTNING = str(Path(__file__).resolve().parents[1] / "lightning" / "kept_run.py")
AGREE = 2e-3  # nats
SERVED = ("--max-model-len", "64", "--sampling-mask", "--", "--max-num-seqs", "16", "--enable-return-routed-experts")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("served")
    model = save_tiny_model(folder / "model", "qwen3_moe")
    running = Server(model, folder / "log", flags=SERVED, environment=environment("report")).start()
    try:
        yield folder, running.url
    finally:
        running.kill()


def trl(server: tuple[Path, str], folder: Path, *flags: str) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """By step: what was logged, and what was computed again."""
    served, url = server
    printed = run("callbacks", SCRIPT, str(folder), url, "--model", str(served / "model"), "--rate", "0.01", *flags)
    found = json.loads(printed.strip().splitlines()[-1])
    return list(zip(found["logged"], found["computed"], strict=True))


def check_r3(steps: list[tuple[dict[str, Any], dict[str, float]]]) -> None:
    """The engine's tokens have its routing at the weights that sampled, and the loss has it at those of now."""
    assert len(steps) == 4
    for logged, again in steps:
        assert again["then_mu/max"] < AGREE and logged["mismatch"] < AGREE
        assert logged["total"] == pytest.approx(again["now_mu/mean"], abs=1e-4)
    stale = [(logged, again) for logged, again in steps if again["lag"] > 0]
    assert stale
    assert max(again["routed_free/max"] for _, again in stale) > 0.05  # without the replay these would be other numbers


def check_kept(steps: list[tuple[dict[str, Any], dict[str, float]]]) -> None:
    for logged, again in steps:
        assert 1 < logged["kept"] < 60 and logged["by_rule"] == 0.0 and logged["outside"] < 0.5
        assert again["cut_whole/mean"] > 0.01  # without the cut these would be other numbers


@pytest.mark.parametrize(
    ("flags", "lags"),
    [
        (("--transfer", "broadcast"), [0, 1, 0, 1]),
        (("--top-p", "0.9"), [0, 1, 0, 1]),
        (("--ahead", "snapshot"), [0, 1, 1, 1]),
        (("--top-p", "0.9", "--ahead", "snapshot", "--transfer", "broadcast"), [0, 1, 1, 1]),
    ],
    ids=["broadcast", "kept", "ahead", "all"],
)
def test_r3_in_trl(server: tuple[Path, str], flags: tuple[str, ...], lags: list[int], tmp_path: Path) -> None:
    steps = trl(server, tmp_path, "--replay", "r3", *flags)
    assert [again["lag"] for _, again in steps] == lags
    check_r3(steps)
    if "--top-p" in flags:
        check_kept(steps)


@pytest.mark.parametrize("flags", [(), ("--transfer", "broadcast")], ids=["folder", "broadcast"])
def test_r3_and_the_sampling_mask_ahead_in_lightning(
    server: tuple[Path, str], flags: tuple[str, ...], tmp_path: Path
) -> None:
    """One batch behind, old log-probs from copies of the weights: the mismatch is 0 at a lag of 1 too."""
    folder, url = server
    printed = run("callbacks", LIGHTNING, str(folder), "--moe", "--ahead", "--again", "--url", url, *flags)
    rows = json.loads(printed.strip().splitlines()[-1])
    assert len(rows) == 4 and rows[-1]["rollout/version_lag_max"] >= 1
    for row in rows:
        assert row["mismatch/logp_diff_max"] < AGREE
        assert 1 < row["rollout/kept_ids_mean"] < 60 and row["rollout/recomputed_cut_fraction"] == 0.0
        assert row["again"]["then_mu/max"] < AGREE and row["again"]["cut_whole/mean"] > 0.01
        assert row["total/logp_diff_mean"] == pytest.approx(row["again"]["now_mu/mean"], abs=1e-4)
    assert max(row["again"]["routed_free/max"] for row in rows) > 0.05  # without R3 these would be other numbers
