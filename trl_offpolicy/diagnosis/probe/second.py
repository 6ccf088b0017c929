"""The second engine of ``probe --against``, in a process of its own: its variables differ, and one process builds one.

python -m trl_offpolicy.diagnosis.probe.second JOB.json ANSWER.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trl_offpolicy.diagnosis.probe.against import Answer
from trl_offpolicy.diagnosis.probe.options import ProbeOptions
from trl_offpolicy.diagnosis.probe.setting import Setting, parse_setting
from trl_offpolicy.diagnosis.probe.sides import ROWS, open_sides
from trl_offpolicy.engines.exact import exact_engine

_OWN = {"dtype": "engine_dtype"}
"""vLLM's arguments that are options of the probe."""


def second_options(options: ProbeOptions) -> ProbeOptions:
    """The options of a probe whose only engine is the second one.

    Raises:
        ValueError: the setting has a value that the probe does not take.
    """
    setting = parse_setting(str(options.against))
    plain = replace(options, against=None, explain=False, exact=False)
    if setting.url:
        return replace(plain, engine=setting.url, quantization=None, weight_rounding=None, engine_arguments={})
    base = dict(options.engine_arguments)
    if options.exact:  # the second engine differs from the exact one by its setting alone
        base = exact_engine(base, dtype=options.trainer_dtype, rows=ROWS, where="").arguments
        base.pop("dtype")
    own = {_OWN[name]: value for name, value in setting.arguments.items() if name in _OWN}
    others = {name: value for name, value in setting.arguments.items() if name not in _OWN}
    return replace(plain, **own, engine_arguments={**base, **others})


def answer_of_second(
    options: ProbeOptions, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Answer:
    """Start the second engine, or ask the second server, and have it score the tokens of the first.

    Args:
        options: options of the probe; ``against`` names the setting.
        prompts: token ids of the prompt of each completion.
        completions: token ids that the first engine sampled.

    Raises:
        ValueError: the engine does not start with this setting; the message holds vLLM's last words.
    """
    setting = parse_setting(str(options.against))
    job = {"options": asdict(second_options(options)), "prompts": prompts, "completions": completions}
    with TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "job.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", __spec__.name, str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(setting))
        if done.returncode != 0 or not answered.exists():
            raise ValueError(
                f"against must be a setting with which the engine starts, but got {setting.text}: {_last_words(done)}"
            )
        found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return Answer(**{**found, "to_trainer": tuple(found["to_trainer"])})


def _environment(setting: Setting) -> dict[str, str]:
    """The variables of the child: this process's, those of the setting, and the folders that Python imports from."""
    known = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    return {**known, **setting.environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of the child's errors that names one."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines or [f"it ended with status {done.returncode}"])[-1][:400]


def answer(job: Mapping[str, Any]) -> Answer:
    """Score the tokens of a job in this process."""
    options = ProbeOptions(**{**job["options"], "prompts": tuple(job["options"]["prompts"])})
    return open_sides(options).answer(job["prompts"], job["completions"])


def main() -> None:
    """Read the job, answer it, write the answer."""
    asked, answered = map(Path, sys.argv[1:])
    found = answer(json.loads(asked.read_text(encoding="utf-8")))
    answered.write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
