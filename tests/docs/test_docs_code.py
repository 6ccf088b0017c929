"""Every fenced block of the documentation runs, or is checked and says why it is not run.

- Python runs in the order of the page, in one namespace and one folder; ``print`` prints what is said behind it.
- YAML is validated by what it is for: a training configuration, one of accelerate, one of Lightning.
- Commands are parsed by the program that they call. Those that take seconds are run.
- ``<!-- not run: why -->`` before a block: it is checked as far as that goes without running it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from code_blocks import ROOT, Block, alternatives, blocks_of, check_command, check_yaml, commands_of, run_python

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "docs/api/*.md",
        "recipes/*/README.md",
        "benchmarks/**/README.md",
    )
    for path in ROOT.glob(pattern)
)
ELSEWHERE = {
    ("docs/corrections.md", "python"): "test_docs_corrections.py",
    ("docs/metrics.md", "python"): "test_docs_metrics.py",
    ("docs/objectives.md", "python"): "test_docs_objectives.py",
    ("docs/objectives.md", "yaml"): "test_docs_objectives.py",
    ("docs/diagnosis.md", "python"): "test_docs_diagnosis.py",
}
"""Blocks that the tests of a single page run."""
LONG = ("recipes/", "benchmarks/")
"""Their commands train, for minutes to hours, and need no comment that says so; their slow tests run them shortened."""
RUN = ("demo", "presets", "doctor", "report")
"""Subcommands that take seconds."""
STATUS = {"--fail-on critical": 3}
"""Exit statuses other than 0 that a page shows."""
FIRST_RUN = ",\n".join(
    f"    {option}"
    for option in (
        "max_steps=10",
        "logging_steps=1",
        "max_completion_length=16",
        "use_vllm=True",
        'vllm_mode="colocate"',
    )
)
"""Options of the first run in README and on the first page."""
REPLACED = {
    "README.md": {
        FIRST_RUN: "    **on_cpu",
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': "model",
        "train_dataset=sums": "train_dataset=sums, processing_class=tokenizer, rollout_func=rollout_func",
        'correction="paper/tis", engine={"type": "vllm"}': 'correction="paper/tis", **tiny_lightning',
        "Trainer(max_steps=100, log_every_n_steps=1)": "Trainer(max_steps=1, **quiet)",
        "micro_batch_size=8, num_generations=8": "micro_batch_size=4, num_generations=4",
    },
    "docs/lightning.md": {
        '"HuggingFaceTB/SmolLM2-135M-Instruct"': "model",
        'engine={"type": "vllm", "dtype": "float32"}': "**tiny_lightning",
        'sampling={"max_tokens": 64}': 'sampling={"max_tokens": 6}',
        "micro_batch_size=8, num_generations=8": "micro_batch_size=4, num_generations=4",
        "max_steps=100, log_every_n_steps=1, accumulate": "max_steps=1, **quiet, accumulate",
        "log_every_n_steps=1).fit": "log_every_n_steps=1, **quiet).fit",
    },
    "docs/control.md": {"GRPOTrainer(...)": "stock_trainer()"},
    "docs/extending.md": {
        "use_vllm=True, offpolicy": 'use_vllm=True, use_cpu=True, bf16=False, report_to="none", offpolicy',
    },
    "docs/agents.md": {"max_steps=2, logging_steps=1": "**on_cpu"},
}
"""What stands in for a GPU, a big model and hours: words of a page and their replacements."""
REPLACED["docs/index.md"] = {
    FIRST_RUN: "    **on_cpu",
    '"HuggingFaceTB/SmolLM2-135M-Instruct"': "model",
    "train_dataset=sums": "train_dataset=sums, processing_class=tokenizer, rollout_func=rollout_func",
}


@pytest.fixture
def folder(tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a recorded run and a tiny model where the pages have theirs."""
    run = ROOT / "trl_offpolicy" / "diagnosis" / "report" / "demo_run"
    shutil.copytree(run, tmp_path / "runs" / "quickstart")
    (tmp_path / "verl_logs").mkdir()
    logged = {"rollout_corr/chi2_token": 0.5, "rollout_corr/rollout_is_eff_sample_size": 0.9}
    lines = (json.dumps({"step": step, "data": logged}) for step in range(1, 9))
    (tmp_path / "verl_logs" / "experiment.jsonl").write_text("\n".join(lines))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "SmolLM2-135M-Instruct").symlink_to(model_folder("llama"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "extension"))  # my_package of docs/extending.md
    yield tmp_path


@pytest.fixture
def names(folder: Path, fresh_model: Callable[..., Any], tokenizer: Any) -> dict[str, Any]:
    """What a page's reader has: a model, rewards, data; and what stands in for an engine."""
    from lightning.pytorch import Trainer
    from lightning_runs import OwnMismatch
    from tiny_models import score_last_word, tiny_prompts
    from trainer_runs import Engine
    from trl import GRPOConfig, GRPOTrainer

    small = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 2}
    off = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False}
    on_cpu = {**small, **off, "logging_steps": 1}
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }

    def stock_trainer() -> Any:
        args = GRPOConfig("stock", **on_cpu)
        options = {"train_dataset": tiny_prompts(), "processing_class": tokenizer, "rollout_func": Engine(noise=0.1)}
        return GRPOTrainer(fresh_model(), score_last_word, args, **options)

    return {
        "model": fresh_model(),
        "reward_funcs": score_last_word,
        "my_reward": score_last_word,
        "dataset": tiny_prompts(),
        "rows": tiny_prompts(),
        "tokenizer": tokenizer,
        "rollout_func": Engine(noise=0.1),
        "on_cpu": on_cpu,
        "quiet": {**quiet, "enable_model_summary": False},
        "tiny_lightning": {"engine": OwnMismatch(noise=0.1), "tokenizer": tokenizer, "sync_check": False},
        "Trainer": Trainer,
        "stock_trainer": stock_trainer,
    }


def replaced(block: Block) -> Block:
    """With the stand-ins of its page."""
    code = block.code
    for old, new in REPLACED.get(block.page, {}).items():
        code = code.replace(old, new)
    return Block(block.page, block.line, block.kind, code, block.why_not)


def run_command(words: list[str], place: str) -> None:
    """In this process; the exit status is what the page says."""
    from trl_offpolicy.cli import main

    expected = next((status for option, status in STATUS.items() if option in " ".join(words)), 0)
    assert main(words[1:]) == expected, f"{place}: {' '.join(words)}"


def handle(block: Block, names: dict[str, Any], folder: Path) -> str:
    """Run or check one block; returns what was done."""
    if (block.page, block.kind) in ELSEWHERE:
        return "run by its page's own test"
    if block.kind == "python":
        if block.why_not is not None:
            compile(block.code, block.place, "exec")
            return "not run"
        run_python(replaced(block), names)
        return "run"
    if block.kind == "yaml":
        for spec in alternatives(block.code):
            check_yaml(spec, folder)
        return "validated"
    if block.kind == "text":
        return "shown"
    assert block.kind == "bash", f"{block.place}: nothing is done with {block.kind} blocks."
    return handle_commands(block)


def handle_commands(block: Block) -> str:
    """Check every command, and run them where all take seconds."""
    commands = commands_of(block)
    kinds = [check_command(words) for words in commands]
    quick = [kind in RUN or "--dry-run" in words for kind, words in zip(kinds, commands, strict=True)]
    if block.why_not is not None:
        return "not run"
    if not all(quick):
        assert block.page.startswith(LONG), f"{block.place}: say with `<!-- not run: why -->` why it is not run."
        return "checked"
    for words in commands:
        run_command(words, block.place)
    return "run"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_every_block_runs_or_is_checked(page: str, names: dict[str, Any], folder: Path, capsys: Any) -> None:
    done = []
    for block in blocks_of(page):
        try:
            done.append(f"{block.kind} {handle(block, names, folder)}")
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block.place} ({block.kind}): {type(error).__name__}: {error}") from error
    with capsys.disabled():
        print(f"\n{page}: {', '.join(f'{count} {what}' for what, count in sorted(Counter(done).items()))}")
    code = "".join(block.code for block in blocks_of(page))
    assert [old for old in REPLACED.get(page, {}) if old not in code] == []


def test_every_fence_is_seen() -> None:
    """Each says its language (output is ``text``) and stands at the margin."""
    fences = {page: len(re.findall(r"^ *```", (ROOT / page).read_text(), flags=re.MULTILINE)) for page in PAGES}
    assert {page: count for page, count in fences.items() if count != 2 * len(blocks_of(page))} == {}


def test_blocks_of_other_tests_are_tested_there() -> None:
    for (page, kind), module in ELSEWHERE.items():
        assert any(block.kind == kind for block in blocks_of(page))
        assert page in (ROOT / "tests" / "docs" / module).read_text()


def test_few_blocks_are_not_run() -> None:
    """Each says why; a new one is a reason to think again."""
    left_out = [block for page in PAGES for block in blocks_of(page) if block.why_not is not None]
    assert all(len(block.why_not or "") > 10 for block in left_out)
    assert len([block for block in left_out if block.kind != "bash"]) == 0
    assert len(left_out) <= 12, [block.place for block in left_out]


def test_a_wrong_block_is_found(tmp_path: Path) -> None:
    """What this module relies on: each kind of mistake is one here."""

    def block(kind: str, code: str) -> Block:
        return Block("page.md", 1, kind, code, None)

    with pytest.raises(AssertionError, match="expected '3'"):
        run_python(block("python", "print(1 + 1)  # 3\n"), {})
    with pytest.raises(AssertionError, match="say what the print"):
        run_python(block("python", "print(1)\n"), {})
    for spec in (
        "offpolicy: papers/tis",
        "offpolicy: {framework: verl, options: {rollout_iss: token}}",
        "epsilom: 0.2",
    ):
        with pytest.raises((AssertionError, ValueError)):
            check_yaml(alternatives(spec)[0], tmp_path)
    with pytest.raises(ValueError, match="weight_rounding"):
        check_yaml({"engine": {"weight_rounding": "int5"}}, tmp_path)
    with pytest.raises(AssertionError, match="repeated"):
        alternatives("engine: {}\ncontrol: warn\nengine: {}\n")
    assert len(alternatives("control: warn\ncontrol:\n  policy: act\n")) == 2
    for line in (
        "trl-offpolicy docter run",
        "trl-offpolicy report run --outptu x",
        "make quikstart",
        'pip install "trl-offpolicy[vlm]"',
        "accelerate launch recipes/grpo.py --config recipes/quickstart/config.yaml --epsilom 0.2",
        "accelerate launch --config_file recipes/accelerate/zero9.yaml recipes/grpo.py",
        "python -m lightning_module fit --config recipes/lightning/quickstart.yaml --model.corection paper/tis",
        "python benchmarks/step_time.py --round 4",
        "python benchmarks/step_times.py",
        "curl example.org",
    ):
        (words,) = commands_of(block("bash", line))
        with pytest.raises((AssertionError, SystemExit, ValueError)):
            check_command(words)
