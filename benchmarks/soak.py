"""A long run in server mode with a random fault every minute: what it loses, and whether it grows.

    python benchmarks/soak.py --minutes 60 --every 60 --folder runs/soak [--model FOLDER] [--seed 0]

A trainer talks to a real server through a proxy. In the first half of the time only faults that promise the same run
are put in: the server is stopped and continued, answers come late, requests are lost before they reach it.
The loss of that half must equal, digit for digit, that of a run without faults, which follows with a server of its own.
One sequence runs at a time (``--max-num-seqs 1``, one prompt a step), so that the server's random numbers are drawn in
the same order. In the second half every fault of the list may come: a server or a trainer that is killed and started
again. Then no step may be lost or doubled, and the server must agree with the trainer after every sync.

Writes ``soak.json`` and ``soak.svg`` (reward, gradient, faults, memory) into the folder; exits with 1 if a promise is
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from trl_offpolicy.engines.server.client import Patience, ServerClient

START = Patience(start_timeout=600.0)
GROWTH = 1.1
"""Largest ratio of the medians of the last and the first third of a process's memory, files and threads."""
AGREES = 0.999
RATE = 1e-6
MOVES = 0.9
"""Least share of the steps whose gradient is not 0: where the weights stand still, a lost sync would not be seen."""
GROUP = 4


# ------------------------------------------------------------------------------------------------------------ training


def train(options: argparse.Namespace) -> None:
    """The trainer, in a process of its own; ends at ``--steps``, or after the step in which FOLDER/stop appears."""
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl_offpolicy.config import OffPolicyGRPOConfig
    from trl_offpolicy.trainer import OffPolicyGRPOTrainer

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with (options.folder / "steps").open("a") as file:
                file.write(f"{state.global_step} {time.time()}\n")
            control.should_training_stop |= (options.folder / "stop").exists()

    prompts = [f"What is {i % 10} + {i // 10} ?" for i in range(100)]
    args = OffPolicyGRPOConfig(
        output_dir=str(options.folder / "run"), use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to="none", use_vllm=True, vllm_mode="server", vllm_server_base_url=options.url,
        vllm_server_timeout=600.0, engine={"transfer": "folder", "retries": 8, "timeout": 60.0}, offpolicy="paper/tis",
        per_device_train_batch_size=GROUP, num_generations=GROUP, max_completion_length=8, max_steps=options.steps,
        logging_steps=1, learning_rate=RATE, lr_scheduler_type="constant", save_steps=5, save_total_limit=2,
        write_report=False, noise_floor_steps=0, control=None, disable_tqdm=True, seed=options.seed,
    )  # fmt: skip
    trainer = OffPolicyGRPOTrainer(
        options.model, arbitrary, args, train_dataset=Dataset.from_dict({"prompt": prompts}), callbacks=[Watch()]
    )
    saved = list((options.folder / "run").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if saved else None)


def arbitrary(completions: list[str], **_: Any) -> list[float]:
    """A reward without a pattern, so that the run does not learn it by heart and stand still."""
    return [float(zlib.crc32(text.encode()) % 7) for text in completions]


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    """The logged row of each step; of a step that was trained again, the last one."""
    path = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {int(row["step"]): row for row in rows if "loss" in row}


# ------------------------------------------------------------------------------------------------------------- the pair


class Proxy:
    """Stands before the server. ``fault`` is asked first: 0 loses the request, another number the answer to it."""

    def __init__(self, target: str) -> None:
        self.fault: Callable[[], int | None] = lambda: None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._pass("GET", None)

            def do_POST(self) -> None:
                self._pass("POST", self.rfile.read(int(self.headers["Content-Length"])))

            def _pass(self, method: str, body: bytes | None) -> None:
                refused = proxy.fault() if self.path == "/v1/completions" else None
                if refused == 0:
                    self.close_connection = True
                    return
                try:
                    kind = {"Content-Type": "application/json"}
                    found = requests.request(method, target + self.path, data=body, headers=kind, timeout=600)
                    status, content = found.status_code, found.content
                except requests.RequestException:
                    status, content = 502, b""
                if refused:
                    status, content = refused, b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def first(self, count: int, answer: Callable[[], int | None]) -> None:
        """Let ``answer`` decide on the next ``count`` requests."""
        left = [count]

        def fault() -> int | None:
            left[0] -= 1
            return answer() if left[0] >= 0 else None

        self.fault = fault

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Pair:
    """A server, its proxy and a trainer, with what was seen of their memory, open files and threads."""

    options: argparse.Namespace
    folder: Path
    steps: int
    port: int = 0
    server: Any = None
    trainer: Any = None
    proxy: Any = None
    begun: int = 0
    """The last step before the present trainer was started."""
    seen: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def start(self) -> Pair:
        """Start both."""
        import socket

        self.folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.start_server()
        self.proxy = Proxy(f"http://127.0.0.1:{self.port}")
        self.start_trainer()
        return self

    def start_server(self) -> None:
        """Start the server and wait for it."""
        command = [sys.executable, "-m", "trl_offpolicy", "serve", "--beside-leftovers", "--port", str(self.port)]
        command += ["--model", self.options.model, "--max-model-len", "64", "--", "--max-num-seqs", "1"]
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        ServerClient(f"http://127.0.0.1:{self.port}", patience=START).wait_until_up()

    def start_trainer(self) -> None:
        """Start the trainer, from the last checkpoint if there is one."""
        self.begun = self.step
        command = [sys.executable, __file__, "--train", "--folder", str(self.folder), "--url", self.proxy.url]
        command += ["--model", self.options.model, "--steps", str(self.steps), "--seed", str(self.options.seed)]
        with (self.folder / "trainer.log").open("ab") as log:
            self.trainer = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def step(self) -> int:
        """The last step that the trainer has ended."""
        path = self.folder / "steps"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return int(lines[-1].split()[0]) if lines else 0

    def look(self) -> None:
        """Note memory (MB), open files and threads of both and of the server's workers."""
        for name, process in (("trainer", self.trainer), ("server", self.server)):
            if name == "trainer" and self.step <= self.begun:
                continue  # it is still loading, and would seem to grow
            group = [pid for pid in _processes() if _group(pid) == process.pid]
            key = f"{name} {process.pid}"
            if group and process.poll() is None:
                self.seen.setdefault(key, []).append({"time": time.time(), **_sizes(group)})

    def close(self) -> None:
        """End all of it."""
        for process in (self.trainer, self.server):
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.proxy.close()


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def _sizes(pids: list[int]) -> dict[str, float]:
    megabytes = files = threads = 0.0
    for pid in pids:
        try:
            lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            files += len(list((Path("/proc") / str(pid) / "fd").iterdir()))
        except OSError:
            continue
        megabytes += int(status.get("VmRSS", "0").split()[0]) / 1000
        threads += int(status.get("Threads", "0"))
    return {"megabytes": megabytes, "files": files, "threads": threads}


# --------------------------------------------------------------------------------------------------------------- faults


def stopped(pair: Pair) -> None:
    """The server is stopped for 5 s and goes on."""
    os.killpg(pair.server.pid, signal.SIGSTOP)
    time.sleep(5.0)
    os.killpg(pair.server.pid, signal.SIGCONT)


def slow(pair: Pair) -> None:
    """The next three answers come 3 s late."""

    def wait() -> None:
        time.sleep(3.0)

    pair.proxy.first(3, wait)


def lost(pair: Pair) -> None:
    """The next two requests are lost before they reach the server."""
    pair.proxy.first(2, lambda: 0)


def server_killed(pair: Pair) -> None:
    """``kill -9`` of the server's pid; it is started again."""
    pair.server.kill()
    pair.server.wait()
    pair.start_server()


def trainer_killed(pair: Pair) -> None:
    """``kill -9`` of the trainer; it is started again and resumes."""
    pair.trainer.kill()
    pair.trainer.wait()
    pair.start_trainer()


def answer_lost(pair: Pair) -> None:
    """The next answer is lost on its way back: the server has drawn numbers for it, so the run differs from now on."""
    pair.proxy.first(1, lambda: 503)


SAME: tuple[Callable[[Pair], None], ...] = (stopped, slow, lost)
"""Faults after which the run is the one that it would have been."""
ANY = (*SAME, answer_lost, server_killed, trainer_killed)


# ----------------------------------------------------------------------------------------------------------------- soak


@dataclass
class Result:
    """What a soak has shown; ``broken`` holds the promises that were not kept, in words."""

    minutes: float
    steps: int
    compared: int
    faults: list[dict[str, Any]]
    broken: list[str] = field(default_factory=list)


def disturbed(pair: Pair, *, seconds: float, every: float, numbers: random.Random) -> list[dict[str, Any]]:
    """Run for so long with a fault every so often; returns the faults. In the first half only those of ``SAME``."""
    while pair.step == 0:
        assert pair.trainer.poll() is None, (pair.folder / "trainer.log").read_text()[-3000:]
        time.sleep(0.5)
    begin, faults = time.time(), []
    due = begin + every
    while time.time() < begin + seconds:
        time.sleep(min(5.0, every / 4))
        pair.look()
        if time.time() < due:
            continue
        first_half = time.time() < begin + seconds / 2
        fault = numbers.choice(SAME if first_half else ANY)
        faults.append({"name": fault.__name__, "time": time.time(), "step": pair.step, "same": first_half})
        print(f"step {pair.step}: {fault.__name__}", flush=True)
        fault(pair)
        due = time.time() + every
    (pair.folder / "stop").touch()
    pair.trainer.wait(timeout=1200)
    return faults


def soak(options: argparse.Namespace) -> Result:
    """Both runs, and what they must have in common."""
    numbers = random.Random(options.seed)
    pair = Pair(options, options.folder / "disturbed", steps=1_000_000).start()
    begin = time.time()
    try:
        faults = disturbed(pair, seconds=options.minutes * 60, every=options.every, numbers=numbers)
        status = pair.trainer.returncode
    finally:
        pair.close()
    rows = rows_of(pair.folder)
    later = [fault["step"] for fault in faults if not fault["same"]]
    compared = min([*later, max(rows, default=0)])
    calm = Pair(options, options.folder / "calm", steps=max(compared, 1)).start()
    try:
        calm.trainer.wait(timeout=options.minutes * 60 + 1200)
    finally:
        calm.close()
    result = Result((time.time() - begin) / 60, max(rows, default=0), compared, faults)
    result.broken += [f"the trainer ended with status {status}"] if status else []
    result.broken += broken_promises(rows, rows_of(calm.folder), compared)
    result.broken += grown(pair.seen) if options.minutes >= 10 else []
    (options.folder / "soak.json").write_text(json.dumps({**asdict(result), "sizes": pair.seen}, indent=1))
    draw(options.folder / "soak.svg", rows, rows_of(calm.folder), faults, pair.seen)
    return result


def broken_promises(rows: dict[int, dict[str, float]], calm: dict[int, dict[str, float]], compared: int) -> list[str]:
    """Steps that differ from the undisturbed run, are missing, had no gradient, or a sync that did not agree."""
    broken = []
    different = [
        step
        for step in range(1, compared + 1)
        if any(rows.get(step, {}).get(key) != calm.get(step, {}).get(key) for key in ("loss", "reward", "grad_norm"))
    ]
    if different or not compared:
        broken.append(f"of {compared} steps {len(different)} differ from the undisturbed run, first {different[:1]}")
    moving = sum(row["grad_norm"] > 0 for row in rows.values())
    if moving < MOVES * len(rows):
        broken.append(f"the weights moved in {moving} of {len(rows)} steps only, so that their syncs prove little")
    if missing := set(range(1, max(rows, default=0) + 1)) - rows.keys():
        broken.append(f"{len(missing)} steps are missing, first {min(missing)}")
    worst = min((row.get("offpolicy/rollout/sync_agreement", 1.0) for row in rows.values()), default=0.0)
    if worst < AGREES:
        broken.append(f"after a sync the server agreed only to {worst:.6f}")
    return broken


def grown(seen: dict[str, list[dict[str, float]]]) -> list[str]:
    """Processes whose memory, files or threads grew, of those that were looked at 30 times."""
    broken = []
    for name, looks in seen.items():
        third = len(looks) // 3
        for key in ("megabytes", "files", "threads") if third >= 10 else ():
            first, last = (statistics.median(look[key] for look in part) for part in (looks[:third], looks[-third:]))
            if last > GROWTH * first + 2:
                broken.append(f"{name}: {key} grew from {first:.0f} to {last:.0f}")
    return broken


def draw(path: Path, rows: Any, calm: Any, faults: list[dict[str, Any]], seen: Any) -> None:
    """Reward and gradient norm of both runs with the faults, and the memory of all processes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    *curves, below = figure.subplots(3, 1)
    for axes, key, name in zip(curves, ("reward", "grad_norm"), ("reward", "gradient norm"), strict=True):
        axes.plot(list(rows), [row[key] for row in rows.values()], lw=0.8, label="with faults")
        axes.plot(list(calm), [row[key] for row in calm.values()], "--", lw=0.8, label="without")
        for fault in faults:
            axes.axvline(fault["step"], color="grey" if fault["same"] else "firebrick", lw=0.5)
        axes.set(xlabel="step", ylabel=name)
    curves[0].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    begin = min((look["time"] for looks in seen.values() for look in looks), default=0.0)
    for name, looks in seen.items():
        below.plot([(look["time"] - begin) / 60 for look in looks], [look["megabytes"] for look in looks], label=name)
    below.set(xlabel="minutes", ylabel="memory (MB)", ylim=(0, None))
    below.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Soak, or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--model", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.folder = options.folder.resolve()
    if options.train:
        train(options)
        return 0
    result = soak(options)
    print(
        f"{result.minutes:.1f} min, {result.steps} steps, {len(result.faults)} faults; {result.compared} steps compared"
    )
    for text in result.broken or ["every promise was kept"]:
        print(text)
    return 1 if result.broken else 0


if __name__ == "__main__":
    sys.exit(main())
