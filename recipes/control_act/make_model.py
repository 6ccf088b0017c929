"""Make the model and the prompts of this recipe: a Llama of 0.1M parameters that has begun to sort letters.

    python recipes/control_act/make_model.py [--output DIR] [--accuracy 0.1]

It learns from right answers until a tenth of those that it samples are right; the rest is left to GRPO. Half a minute
on a core. The same seed gives the same model on the same machine.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recipes.control_act.task import LENGTH, LETTERS, SEPARATOR, question, solution

CACHE = Path(__file__).resolve().parents[2] / ".cache"
MARKER = "sorter-complete"
END, PAD = "<end>", "<pad>"
TRAIN, HELD_OUT = 4000, 256
BATCH, ASK_EVERY, MOST_STEPS = 256, 10, 2000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    words = {word: number for number, word in enumerate([*LETTERS, SEPARATOR, END, PAD])}
    inner = Tokenizer(models.WordLevel(words, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, pad_token=PAD, padding_side="left")


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Two layers of width 64, with heads of 32 as vLLM's kernels for a CPU want them."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def encoded(tokenizer: PreTrainedTokenizerFast, asked: list[str], *, answers: bool) -> Tensor:
    """(B, 11) ids of the questions, or (B, 22) with their answers and the end."""
    texts = [f"{one} {solution(one)} {END}" if answers else one for one in asked]
    return torch.tensor(tokenizer(texts)["input_ids"])


def warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, accuracy: float, seed: int) -> float:
    """Supervised steps until this share of the sampled answers is right; returns the share.

    Raises:
        RuntimeError: it never is.
    """
    draw = random.Random(seed)
    asked = [question(draw) for _ in range(BATCH)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, MOST_STEPS + 1):
        ids = encoded(tokenizer, [question(draw) for _ in range(BATCH)], answers=True)
        learned = ids.clone()
        learned[:, : LENGTH + 1] = -100  # the question is not learned
        model(input_ids=ids, labels=learned).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % ASK_EVERY == 0 and (reached := sampled_accuracy(model, tokenizer, asked)) >= accuracy:
            return reached
    raise RuntimeError(f"--accuracy must be reached in {MOST_STEPS} steps, but {accuracy} was not.")


@torch.no_grad()
def sampled_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: list[str]) -> float:
    """Share of right answers at temperature 1."""
    ids = encoded(tokenizer, asked, answers=False)
    said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=LENGTH + 1)
    texts = tokenizer.batch_decode(said[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(text == solution(one) for text, one in zip(texts, asked, strict=True)) / len(asked)


def write_prompts(folder: Path, seed: int) -> None:
    """Training and held-out prompts, all of them different, as a dataset in a folder."""
    draw = random.Random(seed)
    asked: dict[str, None] = {}  # a set that keeps the order
    while len(asked) < TRAIN + HELD_OUT:
        asked[question(draw)] = None
    rows = [json.dumps({"prompt": one, "answer": solution(one)}) for one in asked]
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text("\n".join(rows[:HELD_OUT]) + "\n")
    (folder / "train.jsonl").write_text("\n".join(rows[HELD_OUT:]) + "\n")


def main() -> int:
    """Make model and prompts if they are not there; print the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=CACHE / "sorter", help="default: %(default)s")
    parser.add_argument("--accuracy", type=float, default=0.1, help="at which it stops (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    made = f"accuracy {args.accuracy}, seed {args.seed}\n"
    marker = args.output / MARKER
    if args.output.exists() and (not marker.exists() or marker.read_text() != made):
        held = marker.read_text().strip() if marker.exists() else "something else"
        parser.error(f"--output must be a new folder, or one made with {made.strip()}, but {args.output} holds {held}.")
    if not args.output.exists():
        # written beside the target and renamed, so that a part of a model is never taken for one
        partial = args.output.with_name(args.output.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        torch.manual_seed(args.seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        reached = warm_up(model, tokenizer, accuracy=args.accuracy, seed=args.seed)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_prompts(partial / "prompts", args.seed + 1)
        (partial / MARKER).write_text(made)
        partial.rename(args.output)
        print(f"{reached:.2f} of the sampled answers are right")
    print(f"model ready: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
