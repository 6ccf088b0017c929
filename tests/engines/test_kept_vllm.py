"""Replay of the sampling mask with a real vLLM: the trainer scores over exactly the tokens that the engine kept.

vLLM reports these from its Model Runner V2, whose Triton kernels run in Triton's interpreter here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from engines.routing.test_moe_vllm import environment, run
from engines.server.servers import Server
from tiny_models import save_tiny_model

SCRIPT = str(Path(__file__).with_name("truncated_run.py"))
LIGHTNING = str(Path(__file__).resolve().parents[1] / "lightning" / "kept_run.py")
CUTS = ("top_p 0.8", "top_p 0.9", "top_k 20", "min_p 0.05", "all three")
AGREE = 2e-4  # nats: float32 on both sides of a two-layer model agrees to about 1e-5
SERVED = ("--max-model-len", "64", "--sampling-mask", "--", "--max-num-seqs", "16")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@cache
def sampled(*flags: str, source: str = "report", folder: str | None = None) -> dict[str, Any]:
    printed = run(source, SCRIPT, folder or mkdtemp(), "--prompts", "2", "--length", "16", *flags)
    found: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return found


def check(found: dict[str, Any], cut: str) -> None:
    result = found["cuts"][cut]
    assert found["no_mask"] is None and result["kept"]["unknown"] == 0
    assert result["tokens"] > 60
    assert abs(result["with"]["mean"] - 1) < 2e-5 and result["with"]["largest"] < AGREE
    assert result["outside"] == 0
    assert result["without"]["mean"] < 0.95
    assert 1 < result["kept"]["mean"] < 60


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_the_mean_ratio_is_one(cut: str, lora: tuple[str, ...]) -> None:
    check(sampled(*lora), cut)


@pytest.mark.parametrize("lora", [(), ("--lora",)], ids=["full", "lora"])
def test_training_under_top_p(lora: tuple[str, ...]) -> None:
    for row in sampled(*lora)["trained"]:
        assert row["logp_diff_max"] < AGREE and row["outside"] == 0


def test_where_nothing_is_cut_nothing_changes() -> None:
    result = sampled()["cuts"]["none"]
    assert result["with"]["mean"] == pytest.approx(result["without"]["mean"], abs=1e-6)
    assert result["with"]["largest"] < AGREE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("served")
    model = save_tiny_model(folder / "model")
    server = Server(model, folder / "log", flags=SERVED, environment=environment("report")).start()
    try:
        yield folder, server.url
    finally:
        server.kill()


def test_a_server_reports_them_too(server: tuple[Path, str]) -> None:
    folder, url = server
    found = sampled("--url", url, source="callbacks", folder=str(folder))
    for cut in CUTS:
        check(found, cut)
    for row in found["trained"]:
        assert row["logp_diff_max"] < AGREE and row["outside"] == 0


def lightning(source: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    printed = run(source, LIGHTNING, str(folder), *flags)
    found: list[dict[str, Any]] = json.loads(printed.strip().splitlines()[-1])
    return found


def check_lightning(rows: list[dict[str, Any]]) -> None:
    """At the first step of a generation the engine has the trainer's weights."""
    assert len(rows) == 4
    for row in rows:
        assert row["rollout/recomputed_cut_fraction"] == 0.0 and row["rollout/outside_fraction"] == 0.0
        assert 1 < row["rollout/kept_ids_mean"] < 60
    for first in rows[::2]:
        assert first["mismatch/logp_diff_max"] < AGREE


@pytest.mark.parametrize("flags", [(), ("--lora",), ("--moe",)], ids=["full", "lora", "with R3"])
def test_lightning(flags: tuple[str, ...], tmp_path: Path) -> None:
    rows = lightning("report", tmp_path, *flags)
    check_lightning(rows)
    if "--moe" in flags:
        assert all(first["routing/agreement"] >= 0.999 for first in rows[::2])


def test_lightning_ahead_of_the_trainer(server: tuple[Path, str], tmp_path: Path) -> None:
    """One batch behind, old log-probs from copies of the weights: the mismatch is 0 at a lag of 1 too."""
    folder, url = server
    rows = lightning("callbacks", folder, "--url", url, "--ahead")
    check_lightning(rows)
    assert rows[-1]["rollout/version_lag_max"] >= 1
