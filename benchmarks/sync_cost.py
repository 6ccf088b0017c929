"""What a weight sync costs, by what is trained and how it travels: SmolLM2-135M in float32.

    python benchmarks/sync_cost.py [--model FOLDER] [--syncs 3] [--only WORD ...] [--out FILE]
    python benchmarks/sync_cost.py --tiny            # a model of 74k parameters: does it run?

What is trained: all weights; all but embeddings and the lower half of the layers; LoRA r 16 on q_proj and v_proj, and
on all linear layers, merged for the engine; the same adapter sent alone. How it travels: in this process's memory; to a
vLLM server on this machine through a folder on the disk, through one in memory (/dev/shm), by broadcast. ``all`` sends
every weight each time, ``changed`` what the engine does not have. Printed are bytes and median seconds of the syncs
after the first two (the first one of ``changed`` is whole, and the second one still compares checksums), and seconds to
sample 16 x 24 tokens. ``--only`` measures the rows whose name has all these words; ``--out`` adds a line of JSON for
each row, and leaves out rows that are there already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trl_offpolicy.engines.engine import Sampling
from trl_offpolicy.engines.server import ServerEngine
from trl_offpolicy.engines.server.client import ServerClient
from trl_offpolicy.engines.weights import ModelWeights
from trl_offpolicy.engines.weights.changed import ChangedWeights

PORT = 8765
MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
PROMPTS = [list(range(40 + i, 80 + i)) for i in range(2)]
SAMPLING = Sampling(max_tokens=24, extra={"ignore_eos": True})
TRAINED = ("full", "upper half", "LoRA q v", "LoRA all-linear")
WAYS = ("memory", "folder on disk", "folder in memory", "broadcast")
ADAPTER = "LoRA all-linear, adapter alone"


def rows() -> list[tuple[str, str, str]]:
    """(trained, way, all or changed) of every row."""
    merged = [(trained, way, how) for trained in TRAINED for way in WAYS for how in ("all", "changed")]
    return [*merged, (ADAPTER, "memory", "all"), (ADAPTER, "folder on disk", "all")]


def model_of(base: Any, trained: str) -> Any:
    """A copy of the model, of which only what is trained has gradients."""
    model = deepcopy(base)
    if trained.startswith("LoRA"):
        targets: Any = ["q_proj", "v_proj"] if trained == "LoRA q v" else "all-linear"
        return get_peft_model(model, LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))
    if trained == "upper half":
        half = model.config.num_hidden_layers // 2
        frozen = ("embed", "lm_head", *(f".layers.{number}." for number in range(half)))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
    return model


@torch.no_grad()
def learn(model: Any) -> None:
    """Move what is trained."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)


def measure(engine: Any, model: Any, *, how: str, syncs: int) -> dict[str, Any]:
    """Syncs with a step between them, and generations; every sync counts as proved."""
    engine.bind(ModelWeights(model))
    engine._changed = ChangedWeights(whole_only=how == "all")
    reports = []
    for version in range(2 + syncs):
        reports.append(engine.sync_weights(version))
        engine.confirm(True)
        learn(model)
    engine.generate(PROMPTS, SAMPLING, n=8)
    start = time.perf_counter()
    engine.generate(PROMPTS, SAMPLING, n=8)
    sampling = time.perf_counter() - start
    seconds = [report.seconds for report in reports[2:]]
    return {"bytes": reports[-1].bytes, "seconds": statistics.median(seconds), "all": seconds, "sampling": sampling}


@contextmanager
def server_of(path: str) -> Iterator[str]:
    """A vLLM server that takes adapters; yields its address."""
    command = [sys.executable, "-m", "trl_offpolicy", "serve", "--model", path, "--port", str(PORT)]
    command += ["--lora-rank", "16", "--max-model-len", "128", "--beside-leftovers", "--", "--max-num-seqs", "32"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            ServerClient(f"http://127.0.0.1:{PORT}").wait_until_up()
            yield f"http://127.0.0.1:{PORT}"
        except Exception:
            print((Path(folder) / "log").read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            server.terminate()
            server.wait()


def in_process(path: str, base: Any, wanted: list[tuple[str, str, str]], args: argparse.Namespace) -> None:
    """The rows with an engine in this process; one engine takes adapters, and is made last."""
    from trl_offpolicy.engines.colocate import ColocateEngine

    for rank in (0, 16):
        mine = [row for row in wanted if row[1] == "memory" and (row[0] == ADAPTER) == (rank > 0)]
        if not mine:
            continue
        engine = ColocateEngine(path, dtype="float32", adapter_rank=rank, max_model_len=128, max_num_seqs=32)
        for row in mine:
            noted(row, measure(engine, model_of(base, row[0].split(",")[0]), how=row[2], syncs=args.syncs), args)
        engine.close()


def on_server(url: str, base: Any, wanted: list[tuple[str, str, str]], args: argparse.Namespace) -> None:
    """The rows with a server; the adapter alone comes first, because it needs a server with the base's own weights."""
    for row in sorted(wanted, key=lambda row: row[0] != ADAPTER):
        trained, way, how = row
        if way == "memory":
            continue
        transfer = "adapter" if trained == ADAPTER else "broadcast" if way == "broadcast" else "folder"
        with tempfile.TemporaryDirectory(dir=MEMORY if way == "folder in memory" else None) as folder:
            engine = ServerEngine(url, folder=f"{folder}/w", transfer=transfer)
            found = measure(engine, model_of(base, trained.split(",")[0]), how=how, syncs=args.syncs)
            engine.close()
        noted(row, found, args)


def noted(row: tuple[str, str, str], found: dict[str, Any], args: argparse.Namespace) -> None:
    """Print a row, and keep it."""
    name = ", ".join(row)
    print(
        f"{name:<48} {found['bytes'] / 1e6:9.2f} MB {found['seconds']:7.2f} s a sync {found['sampling']:7.2f} s to "
        "sample",
        flush=True,
    )
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps({"row": name, **found}) + "\n")


def tiny(folder: Path) -> str:
    """A saved model of two layers with a tokenizer-free vocabulary."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape, **heads)).save_pretrained(folder)
    from step_profile import small_model

    small_model()[1].save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Measure all rows that run here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    known = set()
    if args.out is not None and args.out.is_file():
        known = {json.loads(line)["row"] for line in args.out.read_text().splitlines()}
    wanted = [row for row in rows() if ", ".join(row) not in known]
    wanted = [row for row in wanted if all(word in ", ".join(row) for word in args.only)]
    wanted = [row for row in wanted if row[1] != "folder in memory" or MEMORY.is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        path = tiny(Path(folder)) if args.tiny else str(Path(args.model).resolve())
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        in_process(path, base, wanted, args)
        if any(row[1] != "memory" for row in wanted):
            with server_of(path) as url:
                on_server(url, base, wanted, args)


if __name__ == "__main__":
    main()
