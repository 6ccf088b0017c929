"""Every recipe's config.yaml: read by the script's own parser, and its entry point run on the tiny model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import Dataset
from peft import LoraConfig
from processes import run_command
from tiny_models import WORDS, save_tiny_model, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recipes import grpo, record, tasks
from trl_offpolicy.diagnosis.rescoring import weights
from trl_offpolicy.run_folder import base_model

ROOT = Path(__file__).resolve().parents[2]
RECIPES = {path.parent.name: path for path in sorted((ROOT / "recipes").glob("*/config.yaml"))}
CPU = {"use_cpu": "true", "bf16": "false", "gradient_checkpointing": "false", "report_to": "none"}
TINY = CPU | {
    "dtype": "float32",
    "vllm_mode": "colocate",
    "engine": json.dumps({"dtype": "float32", "enforce_eager": True, "max_model_len": 64}),
    "vllm_max_model_length": "64",
    "max_completion_length": "6",
    "reward": "final_number",
}
"""For a model of some thousand parameters, whose replies are words."""
ROOM = {"num_generations": "4", "per_device_train_batch_size": "4", "gradient_accumulation_steps": "2",
        "max_steps": "2", "save_strategy": "no", "eval_size": "4"}  # fmt: skip
"""Sizes for a recipe without a section ``smoke``: it runs on a CPU as it is."""
GPU = ("grpo_tis_gsm8k", "geo_mask_long_cot", "icepop_moe", "fsdp2_7b", "zero3_7b", "moe_replay")
EXPECTED = {
    "grpo_tis_gsm8k": "weight/truncated_fraction",
    "geo_mask_long_cot": "keep/dropped_sequence_fraction",
    "icepop_moe": "weight_applied/ess_token",
    "fsdp2_7b": "keep/dropped_sequence_fraction",
    "zero3_7b": "weight/truncated_fraction",
    "opsm_multi_step": "keep/dropped_sequence_fraction",
    "moe_replay": "routing/agreement",
    "moe_small": "routing/agreement",
    "truncated_sampling": "rollout/outside_fraction",
}
"""A number that the recipe's method logs."""
REPLACED = {"moe_replay": {"routing_replay": "r3"}}
"""Options of a smoke run here: the quickstart's model is dense, the tiny one is not."""


def options(values: dict[str, str]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", value)]


@pytest.mark.parametrize("name", RECIPES)
def test_the_script_reads_the_recipe(name: str, tmp_path: Path) -> None:
    parser = grpo.TrlParser((grpo.RecipeArguments, grpo.OffPolicyGRPOConfig, grpo.ModelConfig))
    given = ["--config", str(RECIPES[name]), *options(CPU | {"output_dir": str(tmp_path)})]
    recipe, training, model = parser.parse_args_and_config(given)
    assert tasks.reward_function(recipe.reward) and model.model_name_or_path
    said = yaml.safe_load(RECIPES[name].read_text())
    preset = said["offpolicy"] if isinstance(said["offpolicy"], str) else said["offpolicy"].get("preset")
    assert training.preset.correction is not None and (preset is None or training.preset.name.startswith(preset))
    assert recipe.answer_pattern == said.get("answer_pattern")


@pytest.mark.parametrize("name", RECIPES)
def test_model_and_data_of_the_hub_are_pinned(name: str) -> None:
    """A recipe that takes something from the Hub names its commit; the quickstart's model is a package's version."""
    said = yaml.safe_load(RECIPES[name].read_text())
    assert (name in GPU) == ("smoke" in said) == (not said["model_name_or_path"].startswith(".cache/"))
    if name in GPU:
        assert re.fullmatch("[0-9a-f]{40}", said["model_revision"])
    if not said["dataset_name"].startswith(("reasoning-gym/", ".cache/")):
        assert re.fullmatch("[0-9a-f]{40}", said["dataset_revision"])


@pytest.mark.parametrize("name", GPU)
def test_smoke_changes_the_size_and_not_the_method(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = yaml.safe_load(RECIPES[name].read_text())
    words = record.with_smoke(["--config", str(RECIPES[name]), "--smoke", "--output_dir", str(tmp_path)])
    assert "--smoke" not in words and words[-2:] == ["--output_dir", str(tmp_path)]
    parser = grpo.TrlParser((grpo.RecipeArguments, grpo.OffPolicyGRPOConfig, grpo.ModelConfig))
    recipe, training, model = parser.parse_args_and_config(words)
    assert training.use_cpu and training.max_steps == 2 and training.save_strategy == "no"
    assert training.output_dir == str(tmp_path) and training.learning_rate == said["learning_rate"]
    assert (model.model_revision, recipe.dataset_name.partition("/")[0]) == ("main", "reasoning-gym")
    kept = ("offpolicy", "loss_type", "beta", "learning_rate", "use_peft", "eval_strategy", "temperature", "seed")
    assert not set(kept) & set(said["smoke"])
    options = record.recipe_options(recipe, training, model, argv=words)
    assert options["offpolicy"] == said["offpolicy"] and options["max_steps"] == 2 and "smoke" not in options
    with pytest.raises(SystemExit, match="--smoke must come with a --config"):
        record.with_smoke(["--smoke"])


def test_smoke_without_a_section_is_small_and_keeps_data_reward_and_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a migrated configuration is: written for GPUs, without a section ``smoke``."""
    large = {
        "model_name_or_path": "Qwen/Qwen2.5-7B", "model_revision": "a" * 40, "attn_implementation": "flash_attention_2",
        "use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 4, "vllm_gpu_memory_utilization": 0.6,
        "num_generations": 8, "per_device_train_batch_size": 32, "steps_per_generation": 64, "max_steps": 500,
        "max_completion_length": 4096, "save_strategy": "steps", "save_steps": 20, "report_to": "wandb", "bf16": True,
        "engine": {"dtype": "bfloat16", "max_num_seqs": 256, "weight_rounding": "fp8"},
        "routing_replay": "r3", "async_rollouts": 2,
    }  # fmt: skip
    kept = {"train_files": ["a.parquet"], "reward": "score.py:f", "learning_rate": 3e-6, "offpolicy": "paper/icepop"}
    ours = tmp_path / "ours.yaml"
    ours.write_text(yaml.safe_dump({**large, **kept}))
    words = record.with_smoke(["--config", str(ours), "--smoke", "--seed", "7"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{ours} has no section smoke: two small steps on a CPU" in said
    assert said.endswith(", without routing_replay, without async_rollouts\n")  # a dense model, no server
    parser = grpo.TrlParser((grpo.RecipeArguments, grpo.OffPolicyGRPOConfig, grpo.ModelConfig))
    recipe, training, model = parser.parse_args_and_config(words)
    assert (recipe.train_files, recipe.reward) == (kept["train_files"], "score.py:f")
    assert (training.learning_rate, training.seed, training.preset.name) == (3e-6, 7, "paper/icepop")
    assert training.use_cpu and not training.bf16 and training.max_steps == 2 and training.save_strategy == "no"
    assert training.async_rollouts is None
    assert training.engine == {"weight_rounding": "fp8", "dtype": "float32", "enforce_eager": True}
    assert (training.num_generations, training.generation_batch_size, training.max_completion_length) == (4, 8, 16)
    assert (training.vllm_mode, training.vllm_tensor_parallel_size, training.report_to) == ("colocate", 1, [])
    assert training.output_dir == "runs/ours_smoke"
    assert (model.model_name_or_path, model.attn_implementation) == (".cache/SmolLM2-135M-Instruct", None)
    record.with_smoke(["--config", str(RECIPES["fsdp2_7b"]), "--smoke"])
    assert capsys.readouterr().err == ""  # it has its own section


def test_a_pinned_model_is_a_folder_for_trainer_tokenizer_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--user--tiny" / "snapshots" / commit  # as the Hub's cache keeps it
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = grpo.model_folder(grpo.ModelConfig("user/tiny", model_revision=commit))
    assert Path(found) == folder
    assert base_model.base_model(found).revision == commit
    model = SimpleNamespace(peft_config={"default": LoraConfig(base_model_name_or_path=found)})
    grpo.keep_hub_name(model, "user/tiny", commit)
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "user/tiny"
    adapter = weights.Snapshot(step=1, source=str(tmp_path / "adapter"), adapter=True)
    assert weights._base_of(adapter, tmp_path) == str(folder)  # the doctor finds it again
    assert grpo.model_folder(grpo.ModelConfig("user/tiny")) == "user/tiny"
    assert grpo.model_folder(grpo.ModelConfig(str(folder), model_revision=commit)) == str(folder)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("", ("c1", "c2")),
        ("--model_name_or_path a/b --dataset_name=c/d", ("main", None)),
        ("--model-name-or-path a/b --model_revision c1 --dataset_name c/d --dataset_revision c2", ("c1", "c2")),
    ],
)
def test_another_name_comes_without_the_commit(
    words: str, kept: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
    recipe, model = grpo.RecipeArguments(dataset_revision="c2"), grpo.ModelConfig("a/b", model_revision="c1")
    grpo.drop_foreign_commits(recipe, model)
    assert (model.model_revision, recipe.dataset_revision) == kept


def tiny_world(folder: Path, columns: tuple[str, str]) -> tuple[Path, Path]:
    """A model with a chat template, and questions whose answers end as GSM8K's do."""
    model = save_tiny_model(folder / "model", "qwen3_moe")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    tokenizer.save_pretrained(model)
    data = folder / "data"
    data.mkdir()
    rows = [{columns[0]: " ".join(WORDS[i : i + 3]), columns[1]: f"a reason #### {i}"} for i in range(32)]
    Dataset.from_list(rows).to_json(data / "train.jsonl")
    return model, data


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", EXPECTED)
def test_the_entry_point_runs_the_recipe_on_a_tiny_model(name: str, tmp_path: Path) -> None:
    said = yaml.safe_load(RECIPES[name].read_text())
    columns = (said.get("question_column", "question"), said.get("answer_column", "answer"))
    model, data = tiny_world(tmp_path, columns)
    changed = TINY | {"model_name_or_path": str(model), "dataset_name": str(data), "output_dir": str(tmp_path / "run")}
    changed |= {"question_template": "{question}", "answer_pattern": "#### (.+)"}
    changed |= REPLACED.get(name, {})
    smoke = ["--smoke"] if name in GPU else options(ROOM)
    config = tmp_path / "config.yaml"  # the Hub's configuration name and commit mean nothing to a folder
    hubs = ("dataset_config", "dataset_revision")
    config.write_text(yaml.safe_dump({key: value for key, value in said.items() if key not in hubs}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "recipes/grpo.py"]
    done = run_command([*command, "--config", config, *smoke, *options(changed)], seconds=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(f"offpolicy/{EXPECTED[name]}" in row for row in rows)
    if "eval_strategy" in said:
        evaluated = json.loads((tmp_path / "run" / "evaluation.json").read_text())
        assert evaluated["before"]["step"] == 0 and evaluated["after"]["step"] == 2
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["offpolicy"] == said["offpolicy"] and recipe["max_steps"] == 2 and "smoke" not in recipe
    assert "### Reproduce" in (tmp_path / "run" / "README.md").read_text()


def recipe_of(folder: Path, **changed: Any) -> grpo.RecipeArguments:
    return grpo.RecipeArguments(dataset_name=str(folder), eval_size=4, **changed)


def test_questions_and_answers_of_a_folder_become_prompts(tmp_path: Path) -> None:
    _, data = tiny_world(tmp_path, ("problem", "answer"))
    recipe = recipe_of(data, question_column="problem", answer_pattern="#### (.+)", system_prompt="Be brief.")
    train, held_out = tasks.load_splits(recipe)
    assert len(held_out) == 4 and len(train) == 28 and held_out[1]["answer"] == "1"
    assert train[0]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "w4 w5 w6"}]
    with pytest.raises(ValueError, match=r"question_column must be a column of .*, but got 'question'"):
        tasks.load_splits(recipe_of(data))
    with pytest.raises(ValueError, match="answer_pattern must match every answer"):
        tasks.load_splits(recipe_of(data, question_column="problem", answer_pattern="= (.+)"))


def test_a_question_may_be_a_chat_and_have_no_answer(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = Dataset.from_list([{"turns": chat}] * 8)
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    recipe = recipe_of(tmp_path / "data", question_column="turns", answer_column=None, system_prompt="Be brief.")
    train, _ = tasks.load_splits(recipe)
    assert train[0]["prompt"] == [{"role": "system", "content": "Be brief."}, *chat] and train[0]["question"] == "c"
    assert "answer" not in train.column_names
    with pytest.raises(ValueError, match=r"answer_column must be a column of .*, but got 'answer'"):
        tasks.load_splits(recipe_of(tmp_path / "data", question_column="turns"))


def test_the_last_number_decides() -> None:
    replies = ["3 then 1,042.", "it is 7", "-2.50", "none"]
    assert tasks.final_number(replies, ["1042", "8", "-2.5", "0"]) == [1.0, 0.0, 1.0, 0.0]
