"""verl's files of prompts and its reward functions: read by the recipes' script, and a migrated file becomes a run."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from datasets import Dataset
from processes import run_command
from tiny_models import WORDS, save_tiny_model, tiny_tokenizer

from recipes import grpo
from recipes.record import refuse_to_set
from recipes.tasks import graded_number, load_splits, reward_function
from trl_offpolicy.cli.commands import main

ROOT = Path(__file__).resolve().parents[2]
SCORE = """
def letters(data_source, solution_str, ground_truth, extra_info=None, factor=1.0):
    assert data_source == "words" and extra_info["index"] >= 0
    return {"score": factor * (len(solution_str) + float(ground_truth)), "logged": 1.0}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) + float(ground_truth)

def asks(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info.get("bonus", 2.0)


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [0.0 for _ in solution_strs]

def of_trl(completions, ground_truth, bonus=0.0, **columns):
    return [len(text) + float(truth) + bonus for text, truth in zip(completions, ground_truth)]

def other(text):
    return 0.0

number = 3
"""


def verl_row(index: int, **changed: Any) -> dict[str, Any]:
    """As the scripts of verl's examples write them."""
    row = {
        "data_source": "words",
        "prompt": [{"role": "system", "content": "w9"}, {"role": "user", "content": WORDS[index]}],
        "ability": "words",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"split": "train", "index": index},
    }
    return row | changed


def parquet(path: Path, count: int, first: int = 0, **changed: Any) -> str:
    Dataset.from_list([verl_row(first + index, **changed) for index in range(count)]).to_parquet(path)
    return str(path)


@pytest.fixture
def score(tmp_path: Path) -> Path:
    path = tmp_path / "score.py"
    path.write_text(SCORE)
    return path


def recipe(**changed: Any) -> Any:
    return SimpleNamespace(**{"train_files": None, "val_files": None, "eval_size": 3, "dataset_name": "a/b", **changed})


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    files = [parquet(tmp_path / "a.parquet", 4), parquet(tmp_path / "b.parquet", 2, first=10)]
    train, held_out = load_splits(recipe(train_files=files, val_files=[parquet(tmp_path / "v.parquet", 5, first=20)]))
    assert train["ground_truth"] == ["0", "1", "2", "3", "10", "11"] and held_out["ground_truth"] == ["20", "21", "22"]
    assert train[4]["prompt"] == verl_row(10)["prompt"] and train[4]["data_source"] == "words"
    assert train[4]["extra_info"]["index"] == 10
    train, held_out = load_splits(recipe(train_files=files[:1], eval_size=64))
    assert (train["ground_truth"], held_out["ground_truth"]) == (["3"], ["0", "1", "2"])


def test_all_held_out_rows_are_taken_where_no_number_is_given(tmp_path: Path) -> None:
    files = {name: [parquet(tmp_path / f"{name}.parquet", 70)] for name in ("train_files", "val_files")}
    assert len(load_splits(recipe(**files, eval_size=None))[1]) == 70
    with pytest.raises(ValueError, match="eval_size must be a number where there are neither val_files nor"):
        load_splits(recipe(train_files=files["train_files"], eval_size=None))
    with pytest.raises(ValueError, match="eval_size must be a number with reasoning-gym/chain_sum"):
        load_splits(recipe(dataset_name="reasoning-gym/chain_sum", train_size=9, eval_size=None))


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(verl_row(i)) + "\n" for i in range(5)))
    train, _ = load_splits(recipe(train_files=[str(tmp_path / "a.jsonl")]))
    assert train["ground_truth"] == ["3", "4"] and train[0]["prompt"] == verl_row(3)["prompt"]


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train_files must be existing files, but there is no .*none\.parquet"):
        load_splits(recipe(train_files=[str(tmp_path / "none.parquet")]))
    with pytest.raises(ValueError, match=r"train_files must end with \.parquet, .*but got 'a\.csv'"):
        load_splits(recipe(train_files=["a.csv"]))
    with pytest.raises(ValueError, match="val_files must come with train_files"):
        load_splits(recipe(val_files=["a.parquet"]))
    for changed, said in (
        ({"reward_model": {"style": "rule"}}, "must have the columns prompt .* and reward_model with ground_truth"),
        ({"prompt": "a text"}, "must have the columns prompt"),
        ({"images": ["a.png"]}, "must hold prompts of text alone, but its rows have images"),
    ):
        with pytest.raises(ValueError, match=said):
            load_splits(recipe(train_files=[parquet(tmp_path / "wrong.parquet", 2, **changed)]))


COLUMNS = {"data_source": ["words"] * 2, "ground_truth": ["5", "7"], "extra_info": [{"index": 0}, {"index": 1}]}
REPLIES = [[{"role": "assistant", "content": "abc"}], [{"role": "assistant", "content": "d"}]]


def test_verls_function_scores_each_response(score: Path) -> None:
    found = reward_function(f"{score}:letters")
    assert found.__name__ == "letters"
    assert found(completions=REPLIES, prompts=["x", "y"], **COLUMNS) == [8.0, 8.0]  # 3 + 5, 1 + 7
    doubled = reward_function(f"{score}:letters", {"factor": 2.0})
    assert doubled(completions=["abc", "de"], **COLUMNS) == [16.0, 18.0]
    assert asyncio.run(reward_function(f"{score}:later")(completions=REPLIES, **COLUMNS)) == [8.0, 8.0]
    asking, without = reward_function(f"{score}:asks"), {key: COLUMNS[key] for key in ("data_source", "ground_truth")}
    assert asking(completions=REPLIES, **without, extra_info=[None, {"bonus": 3.0}]) == [2.0, 3.0]
    assert asking(completions=REPLIES, **without) == [2.0, 2.0]
    with pytest.raises(ValueError, match="needs the columns data_source, ground_truth"):
        found(completions=REPLIES, answer=["1", "2"])


def test_a_function_of_trls_form_or_of_a_module_is_taken_as_it_is(score: Path) -> None:
    assert reward_function("graded_number") is graded_number is reward_function("recipes.tasks:graded_number")
    plus = reward_function(f"{score}:of_trl", {"bonus": 1.0})
    assert plus(completions=["abc"], ground_truth=["2"], other=[0]) == [6.0] and plus.__name__ == "of_trl"


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("graded_numbr", ValueError, r"reward must be one of .*but got 'graded_numbr'\. Did you mean 'graded_number'"),
        ("none.py:letters", FileNotFoundError, r"there is no 'none\.py'"),
        ("{score}:leters", ValueError, r"must name a function of .*but got 'leters'\. Did you mean 'letters'"),
        ("{score}:number", ValueError, "must name a function, but .* is a int"),
        ("{score}:batched", ValueError, "one response at a time, but .* takes verl.s batches"),
        ("{score}:other", ValueError, r"must take TRL's arguments .* takes text\."),
        ("no.such.module:f", ValueError, "reward must name a module that can be imported"),
    ],
)
def test_a_wrong_function_is_named(name: str, kind: type[Exception], said: str, score: Path) -> None:
    with pytest.raises(kind, match=said):
        reward_function(name.format(score=score))


VERL = """
actor_rollout_ref:
  model: {{path: {model}}}
  actor: {{optim: {{lr: 1e-4}}, ppo_mini_batch_size: 2, ppo_micro_batch_size_per_gpu: 8, use_kl_loss: false}}
  rollout: {{name: hf, n: 4, temperature: 1.0}}
algorithm: {{adv_estimator: grpo}}
data: {{train_files: {train}, val_files: [{val}], train_batch_size: 2, max_response_length: 5}}
custom_reward_function: {{path: {score}, name: letters, reward_kwargs: {{factor: 0.5}}}}
trainer: {{nnodes: 1, n_gpus_per_node: 1, total_training_steps: 2, default_local_dir: {run}}}
"""


def test_what_is_still_to_set_stops_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the script's defaults (sums, graded_number) would be trained in place of the user's task."""
    theirs, ours = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    theirs.write_text("actor_rollout_ref: {model: {path: a/b}, rollout: {n: 4}}\n")
    assert main(["migrate", str(theirs), "--output", str(ours)]) == 0
    text = ours.read_text()
    written = yaml.safe_load(text)
    assert {name for name, value in written.items() if value == "TO_SET"} == {"output_dir", "dataset_name", "reward"}
    assert "# to set, reward: file.py:function" in text.split("\nreward: TO_SET")[0].splitlines()[-1]
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--config", str(ours)])
    with pytest.raises(SystemExit, match=r"output_dir, dataset_name, reward must be set in .*; reward: file\.py"):
        grpo.main()
    given = ["--config", str(ours), "--output_dir", "runs/x", "--reward=final_number"]
    with pytest.raises(SystemExit, match=r"^dataset_name must be set in .* or instead train_files"):
        refuse_to_set(given)
    refuse_to_set([*given, "--train_files", "a.parquet"])
    ours.write_text(text + "train_files: [TO_SET]\n")
    with pytest.raises(SystemExit, match=r"^train_files must be set"):
        refuse_to_set(given)


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_migrated_file_of_verl_trains(tmp_path: Path, score: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is set by hand but the machine; transformers samples, as in verl's file."""
    model = save_tiny_model(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
    tokenizer.save_pretrained(model)
    files = {"train": parquet(tmp_path / "t.parquet", 8), "val": parquet(tmp_path / "v.parquet", 4, first=8)}
    theirs, ours = tmp_path / "verl.yaml", tmp_path / "ours.yaml"
    theirs.write_text(VERL.format(model=model, score=score, run=tmp_path / "run", **files))
    assert main(["migrate", str(theirs), "--output", str(ours)]) == 0
    said = capsys.readouterr().out
    assert "still to set" not in said and yaml.safe_load(ours.read_text())["max_steps"] == 2
    cpu = "--use_cpu true --bf16 false --gradient_checkpointing false --report_to none --logging_steps 1"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "recipes/grpo.py"]
    done = run_command([*command, "--config", ours, *cpu.split()], seconds=500, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 2 and all(row["rewards/letters/mean"] > 0 for row in steps)
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["train_files"] == [files["train"]]


def test_train_size_holds_for_files_too(tmp_path: Path) -> None:
    files = [parquet(tmp_path / "a.parquet", 9)]
    train, held_out = load_splits(recipe(train_files=files, train_size=2))
    assert (train["ground_truth"], held_out["ground_truth"]) == (["3", "4"], ["0", "1", "2"])
    with pytest.raises(ValueError, match="train_size must be 1 or more, but got 0"):
        load_splits(recipe(train_files=files, train_size=0))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dataset_options": {"seed": 1}}, "dataset_options must leave out seed"),
        ({"dataset_options": {"bad": 1}}, r"dataset_options must be options of reasoning-gym/chain_sum, but got .*bad"),
        ({"question_template": "What {nope}?"}, r"question_template must name .*expression.*'nope'"),
    ],
)
def test_wrong_options_of_a_task_are_one_sentence(changed: dict[str, Any], said: str) -> None:
    pytest.importorskip("reasoning_gym")
    given = {
        "dataset_name": "reasoning-gym/chain_sum", "dataset_options": None, "question_template": "{question}",
        "train_size": 4, "system_prompt": None, **changed,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        load_splits(recipe(**given))


def test_a_task_whose_metadata_has_a_question_is_read() -> None:
    pytest.importorskip("reasoning_gym")
    given = {"dataset_name": "reasoning-gym/needle_haystack", "dataset_options": None, "system_prompt": None}
    train, _ = load_splits(recipe(**given, question_template="{question}", train_size=2, eval_size=1))
    assert len(train) == 2
