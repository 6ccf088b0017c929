"""The calculator against attempts to break out, and the recipe that gives it to a model."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import run_command
from tiny_models import save_tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recipes import tasks
from recipes.agent_calculator import calculator as tool

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "agent_calculator"
SPEC: dict[str, Any] = yaml.safe_load((RECIPE / "config.yaml").read_text())

# --------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("expression", "value"),
    [("3 + 4", "7"), ("(17 + 25) * -3", "-126"), ("7 / 2", "3.5"), ("7 // 2", "3"), ("2 ** 10 % 7", "2"), (" 5 ", "5")],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert tool.calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "an expression is needed"),
        ("3 +", "not an arithmetic expression"),
        ("1 / 0", "ZeroDivisionError"),
        ("9" * 201, "at most 200 characters"),
        ("9 ** 64 * 9 ** 64", "more than 64 digits"),
        ("9 ** 65", "exponents must be whole numbers up to 64"),
        ("9 ** 9 ** 9", "exponents must be whole numbers up to 64"),
        ("2 ** 0.5", "exponents must be whole numbers up to 64"),
        ("'a' * 9", "'a' is not a number"),
        ("True + 1", "True is not a number"),
        ("1j", "1j is not a number"),
    ],
)
def test_what_is_no_arithmetic_is_told_to_the_model(expression: str, said: str) -> None:
    assert tool.calculator(expression) == f"error: {said}" or said in tool.calculator(expression)
    assert tool.calculator(expression).startswith("error: ")


def test_arguments_of_another_type_are_answered() -> None:
    assert tool.calculator(7).startswith("error: an expression is needed")  # type: ignore[arg-type]
    assert tool.calculator(["3 + 4"]).startswith("error: ")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- the first fence: the text

ESCAPES = (
    "__import__('os').system('true')",
    "().__class__.__base__.__subclasses__()",
    "[x for x in (1, 2)]",
    "(lambda: 1)()",
    "open('/etc/passwd').read()",
    "a",
    "(x := 5)",
    "{1: 2}",
    "3 if 4 else 5",
    "1 < 2",
    "f'{1}'",
    "(1).real",
    "3; 4",
    "exit()",
    "1 .__class__",
    "1 << 99999",
    "~5",
    "*(1, 2)",
    "await 5",
    "\0",
    "(" * 150 + "1" + ")" * 150,
)


@pytest.mark.parametrize("expression", ESCAPES)
def test_no_text_gets_past_the_list_of_nodes(expression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(tool, "run", lambda text: started.append(text) or "ran")
    assert tool.calculator(expression).startswith("error: ")
    assert started == []


# ----------------------------------------------------------------------------- the second fence: the process by itself

MODULE = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'BuiltinImporter'][0].load_module({!r})"


def test_the_process_writes_and_reads_no_file(tmp_path: Path) -> None:
    target, known = tmp_path / "written", tmp_path / "known"
    known.write_text("secret")
    posix = MODULE.format("posix")
    assert tool.run(f"{posix}.getpid()").isdigit()  # the escape itself works without the first fence
    assert tool.run(f"{posix}.open({str(target)!r}, 65, 511)") == "error: OSError"
    assert tool.run(f"{posix}.open({str(known)!r}, 0)") == "error: OSError"
    assert not target.exists()


def test_the_process_has_no_socket() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        text = (
            f"{MODULE.format('_socket')}.socket(2, 1)" if "_socket" in sys.builtin_module_names
            else f"{MODULE.format('posix')}.dup(1)"  # a socket is a file descriptor, and there is none to be had
        )  # fmt: skip
        assert tool.run(text) == "error: OSError"


def test_the_process_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    assert "A_SECRET" not in tool.run(f"[*{MODULE.format('posix')}.environ]")


@pytest.mark.integration
def test_time_and_memory_end() -> None:
    start = time.monotonic()
    assert tool.run("((((((9**64)**64)**64)**64)**64)**64)**64").startswith("error: ")
    assert tool.run("[0] * 10 ** 9") == "error: MemoryError"
    assert tool.run("'a' * 10 ** 5") == "error: more than 64 digits"
    assert time.monotonic() - start < 3 * (tool.SECONDS + 3)


# ---------------------------------------------------------------------------------------------------------- the recipe


def test_names_of_tools() -> None:
    assert tasks.agent_tools(["calculator"]) == [tool.calculator] and tasks.agent_tools(None) is None
    with pytest.raises(ValueError, match=r"tools must be among \['calculator'\], but got shell"):
        tasks.agent_tools(["shell"])


def conversation() -> Any:
    from transformers import AutoTokenizer

    folder = ROOT / ".cache" / "SmolLM2-135M-Instruct"
    if not folder.exists():
        pytest.skip("the quickstart's model is not there")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (RECIPE / "chat_template.jinja").read_text()
    tokenizer.response_template = json.loads((RECIPE / "response_template.json").read_text())
    return tokenizer


def test_templates_are_what_trl_asks_for() -> None:
    from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

    tokenizer = conversation()
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    messages = [{"role": "system", "content": SPEC["system_prompt"]}, *SPEC["examples"]]
    text = tokenizer.apply_chat_template(messages, tools=[tool.calculator], tokenize=False)
    assert "calculator(expression): Work out an arithmetic expression" in text
    assert "<tool_response>\n7\n</tool_response>" in text
    reply = tokenizer(SPEC["examples"][1]["content"] + "<|im_end|>")["input_ids"]
    prefix = tokenizer("<|im_start|>assistant\n")["input_ids"]
    (call,) = parse_response(tokenizer, reply, prefix=prefix, tools=[tool.calculator])["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": {"expression": "3 + 4"}}
    assert tool.calculator(**call["function"]["arguments"]) == SPEC["examples"][2]["content"]


def test_the_examples_say_what_the_calculator_says() -> None:
    for call, answer in zip(SPEC["examples"][1::4], SPEC["examples"][2::4], strict=True):
        inner = json.loads(call["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert tool.calculator(**inner["arguments"]) == answer["content"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_entry_point_runs_on_a_tiny_model(tmp_path: Path) -> None:
    changes = {
        "model_name_or_path": str(save_tiny_model(tmp_path / "model")),
        "output_dir": str(tmp_path / "run"),
        "vllm_max_model_length": 64,
        "max_completion_length": 6,
        "max_steps": 1,
        "eval_steps": 1,
        "eval_size": 8,
        "use_peft": False,
        "engine": {"dtype": "float32", "enforce_eager": True, "max_model_len": 64},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({key: value for key, value in {**SPEC, **changes}.items() if key != "examples"}))
    command = [sys.executable, "-m", "accelerate.commands.launch", "recipes/grpo.py", "--config", str(config)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = run_command(command, seconds=550, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "tools/call_frequency" in row]  # the others are of the evaluations
    assert row["tools/call_frequency"] == 0 and row["offpolicy/rollout/retokenised_fraction"] == 0
