"""What leaves a machine: strict JSON, pages that load nothing, and no path of the machine in what is shared."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from trl_offpolicy.control.actions import Action, append_actions
from trl_offpolicy.diagnosis.report.model_card import write_card
from trl_offpolicy.diagnosis.report.report import write_report
from trl_offpolicy.engines.engine import SyncReport
from trl_offpolicy.run_folder.layout import RUN_FILE, SYNCS_FILE
from trl_offpolicy.run_folder.strict import dump_json, without_paths
from trl_offpolicy.run_folder.syncs import append_sync
from trl_offpolicy.run_folder.writer import RunFolderWriter, add_to_run

MACHINE = "/home/ann/private-project/models/small"


def no_constant(name: str) -> Any:
    raise AssertionError(f"JSON has no {name}")


def strictly(text: str) -> Any:
    return json.loads(text, parse_constant=no_constant)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_has_no_nan(tmp_path: Path, value: float) -> None:
    assert strictly(dump_json({"a": [value, {"b": value}], "path": Path("x")})) == {
        "a": [None, {"b": None}],
        "path": "x",
    }
    writer = RunFolderWriter(tmp_path, {"limit": value})
    writer.begin(0, seed=1)
    add_to_run(tmp_path, "further", {"value": value})
    writer.log(1, {"loss": value})
    append_sync(tmp_path, SyncReport(version=0, kind="memory", bytes=1, seconds=1.0, agreement=value))
    append_actions(tmp_path / "actions.jsonl", (Action(1, "ess", "what", value, 1.0, "why"),))
    writer.end()
    info = strictly((tmp_path / RUN_FILE).read_text())
    assert info["limit"] is None and info["further"]["value"] is None
    for name in ("metrics.jsonl", SYNCS_FILE, "actions.jsonl"):
        for line in (tmp_path / name).read_text().splitlines():
            strictly(line)


@pytest.fixture
def shared(tmp_path: Path, write_run: Any) -> tuple[str, str]:
    """The report and the card of a run whose ``run.json`` is full of paths."""
    rows = [{"step": i, "loss": 0.1, "offpolicy/mismatch/kl_k3": 0.001, "offpolicy/mismatch/prob_pearson": 0.999}
            for i in range(1, 13)]  # fmt: skip
    info = {
        "model": MACHINE,
        "command": f"python /home/ann/grpo.py --model {MACHINE} --output_dir={tmp_path}/run",
        "preset": "paper/tis",
        "engine": {"type": "vllm", "folder": "/odd-root/engine/weights"},
    }
    folder = write_run(rows, info=info)
    (folder / "recipe.yaml").write_text(f"model_name_or_path: {MACHINE}\n")
    return write_report(folder).read_text(), write_card(folder).read_text()


def test_no_path_of_the_machine_is_shared(shared: tuple[str, str], tmp_path: Path) -> None:
    for text in shared:
        for path in ("/home/ann", "private-project", "/odd-root", str(tmp_path.parent)):
            assert path not in text, path
    assert "…/small" in shared[1] and "paper/tis" in shared[1] and "paper/tis" in shared[0]


def test_pages_load_nothing_and_run_only_their_own_script(shared: tuple[str, str]) -> None:
    page = shared[0]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1]
    assert policy[1].split("script-src ")[1].startswith("'sha256-")
    assert page.index("Content-Security-Policy") < page.index("<style")  # it holds for what follows it
    assert page.count("<script") == 1  # tests/diagnosis/report/test_page.py: which one, and that no text becomes one
    assert not re.search(r"<script [^>]|<iframe|<link|\son\w+=|javascript:", page)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", page.replace("xlink:href", "href"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see https://example.org/home/ann/x", "see https://example.org/home/ann/x"),
        ("current/old at mismatch/kl_k3", "current/old at mismatch/kl_k3"),
        ("/work/wt/run/", "…/run"),
        ("--model=/data/m/small,", "--model=…/small,"),
        ("</data/x/y>", "</data/x/y>"),
        ("../home/ann/x", "../home/ann/x"),
    ],
)
def test_paths(text: str, expected: str) -> None:
    assert without_paths(text) == expected
