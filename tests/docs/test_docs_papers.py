"""docs/papers.md: it is current, its configurations load, and it has every paper and system that it should have.

The numbers and names below were taken from the five source texts by script (all arXiv numbers; the table of methods,
the references, and every other name of a method or system), and from the notes on younger methods.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_offpolicy import presets
from trl_offpolicy.presets.parsing import ADVANTAGE_TYPES, LOSS_TYPES
from trl_offpolicy.presets.preset import Preset
from trl_offpolicy.trl.config import OffPolicyGRPOConfig

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("papers", ROOT / "scripts" / "papers.py")
assert _spec is not None and _spec.loader is not None
papers = importlib.util.module_from_spec(_spec)
sys.modules["papers"] = papers  # dataclasses look their module up
_spec.loader.exec_module(papers)

TABLES = papers.read(papers.ROWS.read_text())
ROWS = [row for rows in TABLES.values() for row in rows]
CONFIGURATIONS = [(f"{row.name}, {i}", text) for row in ROWS for i, text in enumerate(row.configurations)]

SOURCE_NUMBERS = re.findall(
    r"\S+",
    """
1506.02438 1707.06347 1909.08593 1912.09729 2110.00641 2309.14509 2402.03300 2402.14740 2410.18252 2503.01491
2503.14286 2503.14476 2505.22617 2505.24034 2505.24298 2506.09501 2506.13585 2507.01663 2507.13833 2507.18071
2507.20673 2510.01161 2510.06062 2510.11345 2510.11370 2510.11696 2510.12633 2510.18855 2510.26475 2510.26788
2511.14617 2511.17826 2511.18871 2511.20347 2511.20718 2512.01374 2512.02556 2512.06547 2512.07710 2512.23075
2601.03320 2601.14243 2601.18150 2601.22718 2602.00983 2602.01826 2602.02192 2602.04620 2602.04879 2602.07078
2602.10693 2602.13953 2602.17616 2602.19362 2603.01501 2603.19470 2604.07853 2604.08706 2604.16918 2604.26256
2605.06850 2605.07331 2605.12070 2605.14220
""",
)
YOUNG_NUMBERS = re.findall(
    r"\S+",
    """
2606.10968 2605.12380 2607.01083 2603.19835 2605.17570 2606.08779 2606.29526 2606.00395
""",
)
SOURCE_NAMES = (
    # methods
    "TIS", "vanilla-IS", "PPO-IS", "MIS", "PPO", "Dual-clip PPO", "Decoupled PPO", "PPO-EWMA", "GRPO", "DAPO", "TOPR",
    "ASPO", "MinPRO", "CTPO", "M2PO", "GSPO", "GSPO-token", "GMPO", "GPG", "CISPO", "SAPO", "DPPO-TV", "DPPO-KL",
    "VESPO", "VCPO", "OPOB", "OAPL", "R²VPO", "DISPO", "QUATRO", "TRM", "ST-PPO", "OTB", "TIR-OTB", "KL-Cov",
    "Clip-Cov", "OPSM", "Geometric", "IcePop", "Keep Routing", "Keep Sampling Mask", "R2", "R3", "ESPO", "TBPO",
    "Logit fusion", "A-3PO", "GAC", "ALP", "Freshness-aware PER", "Experience replay", "Missing old logits",
    "Shadow mask distillation", "Learning rate scheduling", "k1, k2, k3", "k1+", "k3+", "Corrected k3", "GAE", "RLOO",
    "ReMax", "REINFORCE++", "OPO", "GDPO", "Adaptive KL", "SGA", "online DPO", "Don't exclude rollouts", "RL-ZVP",
    "GenRM", "router bias", "five sources", "decision tree", "Five conjectures", "Policy gradient, sequence, and token",
    # systems
    "verl", "SkyRL", "slime", "TRL", "AReaL", "NeMo-RL", "ColossalAI", "ROLL", "vLLM", "SGLang", "Megatron", "FSDP",
    "TorchTitan", "FlashRL", "FP8-RL", "Jet-RL", "QuRL", "QeRL", "QaRL", "FP16", "TBIK", "VeXact", "Batch-invariant",
    "SGLang deterministic", "bitwise", "nondeterminism", "Ulysses", "ReSpec", "Seer", "Laminar", "AsyncFlow",
    "DistFlow", "LlamaRL", "ROLL Flash", "ECHO-2", "DORA", "Periodic asynchrony", "One-step off-policy",
    "Fully asynchronous", "DeepSeek-V3.2", "Ring-1T", "CompassMax", "MiniMax-M1", "GLM-5", "SWE-grep",
)  # fmt: skip
YOUNG_NAMES = (
    "KPop", "CPPO", "P3O", "Staleness and learning rate", "FIPO", "mu-GRPO", "DCMDP", "MIPU", "Balance heuristic",
    "prime-rl's regulariser", "PR2",
)  # fmt: skip


def built(text: str, folder: Path) -> Preset:
    """The preset of a configuration; a warning is an error."""
    plain: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none", "use_vllm": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return OffPolicyGRPOConfig(str(folder), **{**plain, **yaml.safe_load(text)}).preset


def first_column() -> str:
    """What the tables hold in their first column: the names, and the numbers beside them."""
    page = papers.PAGE.read_text()
    return "\n".join(re.findall(r"^\| (.*?)(?<!\\) \|", page, flags=re.MULTILINE))


def test_the_page_is_current() -> None:
    page = papers.PAGE.read_text()
    marks = papers.BLOCK.findall(page)
    assert sorted(marks) == sorted([*TABLES, "states"]) and len(marks) == page.count("<!-- table: ")
    assert papers.with_tables(page, TABLES) == page, "run python scripts/papers.py"


@pytest.mark.parametrize("text", [text for _, text in CONFIGURATIONS], ids=[name for name, _ in CONFIGURATIONS])
def test_every_configuration_loads(text: str, tmp_path: Path) -> None:
    """A loss has the aggregation that it was published with."""
    preset = built(text, tmp_path)
    if "policy_loss" in text:
        assert preset.objective.aggregation == preset.objective.policy_loss.aggregation


@pytest.mark.parametrize("number", [*SOURCE_NUMBERS, *YOUNG_NUMBERS])
def test_every_paper_has_a_row(number: str) -> None:
    assert any(number in row.arxiv for row in ROWS)
    assert number in first_column()


@pytest.mark.parametrize("name", [*SOURCE_NAMES, *YOUNG_NAMES])
def test_every_name_has_a_row(name: str) -> None:
    """In the name of a row or in its line about what it does (parts of a report, such as GenRM), as a whole word."""
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)
    assert [row.name for row in ROWS if any(map(word.search, (row.name, row.by, row.does, row.differs, row.see)))]


def test_every_name_is_meant() -> None:
    """A list that is split at the wrong place would pass."""
    assert len(set(SOURCE_NUMBERS)) == len(SOURCE_NUMBERS) == 64
    assert len({row.name for row in ROWS}) == len(ROWS) > 130
    assert all(re.fullmatch(r"\d{4}\.\d{5}", number) for row in ROWS for number in row.arxiv)


def test_every_preset_has_a_row() -> None:
    """verl's 19 have one row for all, which names the page that lists them."""
    shown = "\n".join(text for _, text in CONFIGURATIONS)
    missing = {name for name in presets.names() if not re.search(rf"{re.escape(name)}(?![\w-])", shown)}
    assert {name for name in missing if not name.startswith(("verl/", "skyrl/"))} == {
        "measure",
        "paper/icepop",
        "paper/opsm",
    }
    for twin, name in (("paper/icepop", "ring-1t/icepop"), ("paper/opsm", "deepseek-v3.2/opsm")):
        assert presets.get(twin).correction == presets.get(name).correction


def test_every_paper_that_the_code_cites_has_a_row() -> None:
    cited = {
        number
        for package in ("trl_offpolicy", "lightning_module")
        for path in (ROOT / package).rglob("*.py")
        for number in re.findall(r"arXiv[: ]\s*(\d{4}\.\d{5})", path.read_text())
    }
    assert len(cited) > 30
    assert cited - {number for row in ROWS for number in row.arxiv} == set()


def test_every_loss_and_estimator_has_a_row() -> None:
    shown = "\n".join(text for _, text in CONFIGURATIONS)
    of_presets = {type(presets.get(row.preset).objective.policy_loss) for row in ROWS if row.preset}
    losses = set(re.findall(r"policy_loss: \{type: (\w+)", shown))
    assert {name for name, kind in LOSS_TYPES.items() if name not in losses and kind not in of_presets} == {
        "ppo_is"
    }  # its preset is bypass mode, which is the same loss
    estimators = set(re.findall(r"advantages: (?:\{type: )?(\w+)", shown))
    assert estimators == set(ADVANTAGE_TYPES)


def test_what_is_not_here_says_so() -> None:
    page = papers.PAGE.read_text()
    for row in ROWS:
        (line,) = [line for line in page.splitlines() if line.startswith("| ") and papers._named(row) in line]
        assert ("**not here**" in line) == (row.state in ("not here", "out of scope"))


@pytest.mark.parametrize("name", ["corrections.md", "objectives.md"])
def test_the_published_forms_load(name: str, tmp_path: Path) -> None:
    """The table "Where we differ from the papers" of another page."""
    section = (ROOT / "docs" / name).read_text().split("## Where we differ from the papers\n")[1].split("\n## ")[0]
    forms = re.findall(r"`((?:offpolicy|async_rollouts): .*?)`", section)
    assert len(forms) >= 5
    for text in forms:
        preset = built(f"vllm_mode: server\n{text}" if text.startswith("async") else text, tmp_path)
        if "policy_loss" in text:
            assert preset.objective.aggregation == preset.objective.policy_loss.aggregation


ONE = "a:\n  - {name: x, does: y"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}, is: perhaps}}", r"^'is' of 'x' must be one of \['here', 'part', .*\], but got 'perhaps'"),
        (f"{ONE}}}", r"^config, preset or see must be given for 'x', which is 'here'"),
        (f"{ONE}, is: not here, preset: paper/tis}}", r"^config and preset must be absent for 'x'"),
    ],
)
def test_a_row_that_contradicts_itself(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        papers.read(text)


def test_a_row_with_an_unknown_field() -> None:
    with pytest.raises(TypeError, match="preest"):
        papers.read(f"{ONE}, preest: paper/tis}}")


def test_one_line_makes_a_row_present() -> None:
    """What a helper changes when a young method arrives: the line 'is' goes, a configuration comes."""
    (row,) = papers.read(f"{ONE}, preset: paper/tis}}")["a"]
    shown = papers.table([row])
    assert shown.endswith("| x | y<br>`w_t = min(pi_old / mu, C)` | `offpolicy: paper/tis` | - | - |\n")
    (absent,) = papers.read(f"{ONE}, is: not here}}")["a"]
    assert papers.table([absent]).endswith("| x | y | **not here** | - | - |\n")
