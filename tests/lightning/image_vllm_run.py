"""Two steps on images with vLLM in this process (run by test_images_vllm.py): prints what was logged, as JSON.

The tiny LLaVA runs in vLLM's transformers backend: its own Qwen2-VL and LLaVA need torchvision.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightning_runs import Watch, data, module, trainer
from tiny_images import image_rows, last_word, save_tiny_llava
from transformers import LlamaModel

LlamaModel.do_not_compile = True  # vLLM 0.31 forgets to set it in this backend


def run(folder: Path) -> None:
    watch = Watch()
    engine = {
        "type": "vllm", "dtype": "float32", "max_model_len": 64, "enforce_eager": True, "model_impl": "transformers",
    }  # fmt: skip
    ours = module(
        engine, model=str(save_tiny_llava(folder / "model")), tokenizer=None, reward_funcs=last_word,
        learning_rate=0.01, sync_check=True, check_token_ids="raise",
    )  # fmt: skip
    texts = [[{"role": "user", "content": f"w{i} w{i + 1}"}] for i in range(8)]  # a sync is proved on two words or more
    rows = [{**row, "prompt": text} for row, text in zip(image_rows(8, column="images"), texts, strict=True)]
    rows[1]["images"] = [*rows[1]["images"], *rows[2]["images"]]
    rows[2]["images"] = None
    trainer(folder, callbacks=[watch], max_steps=3).fit(ours, data(rows, steps_per_generation=1))
    print(json.dumps([{name: float(value) for name, value in log.items()} for log in watch.logs]))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
