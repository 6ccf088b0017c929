"""What the learner itself can do on held-out prompts: base model and adapter in float32, no engine, no rounding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tasks import REWARDS, load_splits

SEED = 10**6


def held_out(config: dict[str, Any], size: int) -> Any:
    """``size`` prompts with answers, the same in every run and in no training set."""
    fields = ("dataset_name", "dataset_options", "question_template", "system_prompt")
    recipe = SimpleNamespace(**{name: config.get(name) for name in fields}, eval_size=size, train_size=2000)
    return load_splits(recipe)[1]


@torch.no_grad()
def evaluate(adapter: Path | None, config_file: Path, *, questions: int = 64, samples: int = 8) -> dict[str, float]:
    """Mean reward of sampled answers at temperature 1 (the same seed for all), and of the greedy ones.

    Args:
        adapter: folder of the trained LoRA adapter; None = the model as training begins.
        config_file: the recipe, for model, task and length.
        questions: held-out prompts.
        samples: answers to each.
    """
    config = yaml.safe_load(config_file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(config["model_name_or_path"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(config["model_name_or_path"], dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    rows = held_out(config, questions)
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    length, reward = config["max_completion_length"], REWARDS[config["reward"]]
    asked = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    found = {}
    for name, count, options in (("reward", samples, {"do_sample": True, "top_k": 0, "top_p": 1.0}), ("greedy", 1, {})):
        torch.manual_seed(SEED)
        ids = model.generate(
            **asked, max_new_tokens=length, num_return_sequences=count, pad_token_id=tokenizer.pad_token_id,
            **({"do_sample": False} | options),
        )  # fmt: skip
        said = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        completions = [[{"role": "assistant", "content": text}] for text in said]
        scores = reward(completions, answer=[row["answer"] for row in rows for _ in range(count)])
        found[name] = sum(scores) / len(scores)
    return found
