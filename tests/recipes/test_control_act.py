"""The recipe of the controllers: its model begins to sort, its prompts are disjoint, its reward knows what is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recipes.control_act import make_model
from recipes.control_act.task import LENGTH, solution, sorted_letters


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "sorter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_model.py", "--output", str(folder), "--accuracy", "0"])
        assert make_model.main() == 0
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_model_and_tokenizer_load_and_write_a_letter_with_a_token(made: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(made), AutoModelForCausalLM.from_pretrained(made)
    asked = rows(made / "prompts" / "train.jsonl")[0]["prompt"]
    ids = tokenizer(asked, return_tensors="pt")["input_ids"]
    assert ids.shape == (1, LENGTH + 1) and tokenizer.decode(ids[0]) == asked
    assert model(input_ids=ids).logits.shape == (1, LENGTH + 1, len(tokenizer))
    assert model.config.head_dim % 32 == 0  # vLLM's kernels for a CPU
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_held_out_prompts_are_no_training_prompts(made: Path) -> None:
    held_out, train = (rows(made / "prompts" / f"{split}.jsonl") for split in ("test", "train"))
    assert len({row["prompt"] for row in held_out + train}) == make_model.HELD_OUT + make_model.TRAIN
    assert all(row["answer"] == solution(row["prompt"]) for row in held_out + train)


def test_a_supervised_step_makes_right_answers_likelier() -> None:
    torch.manual_seed(0)
    tokenizer = make_model.make_tokenizer()
    model = make_model.make_model(tokenizer)
    ids = make_model.encoded(tokenizer, ["b a c d e f g h i j |"], answers=True)
    before = model(input_ids=ids, labels=ids).loss
    make_model.warm_up(model, tokenizer, accuracy=0.0, seed=0)
    assert model(input_ids=ids, labels=ids).loss < before - 0.1


def test_the_reward_counts_places_and_the_whole() -> None:
    said = ["a b c d", "a b d c", "a b c d d", "b a d c", "", "a b c"]
    assert sorted_letters(said, ["a b c d"] * 6) == [1.0, 0.25, 0.5, 0.0, 0.0, 0.375]


def test_another_model_is_not_taken_for_the_one_asked_for(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_model.py", "--output", str(made), "--accuracy", "0"])
    assert make_model.main() == 0
    monkeypatch.setattr(sys, "argv", ["make_model.py", "--output", str(made), "--accuracy", "0", "--seed", "1"])
    with pytest.raises(SystemExit):
        make_model.main()


def test_an_unfinished_model_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sorter.partial").mkdir()
    monkeypatch.setattr(make_model, "MOST_STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["make_model.py", "--output", str(tmp_path / "sorter"), "--accuracy", "1"])
    with pytest.raises(RuntimeError, match=r"--accuracy must be reached in 1 steps"):
        make_model.main()
    assert not (tmp_path / "sorter").exists()
