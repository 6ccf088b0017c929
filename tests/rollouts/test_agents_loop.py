"""The agent loop against TRL's own ``_tool_call_loop`` on the same answers of the engine, and what it adds to that."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_agents import REPLIES, Script, ScriptedEngine, add, byte_tokenizer, call, later
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from trl_offpolicy.engines.engine import Rollouts, Sampling
from trl_offpolicy.rollouts.agents import AgentEngine, Chat, RecordedEngine, answer_calls
from trl_offpolicy.rollouts.agents.background import _loop
from trl_offpolicy.rollouts.token_ids import first_drift

TOOLS = [add, later]
PROMPTS = [[{"role": "user", "content": f"What is {i} + 4?"}] for i in range(8)]


def trls_loop(script: Script, *, length: int, most: int | None, context: int) -> dict[str, Any]:
    """What TRL's loop makes of the script."""
    tokenizer = byte_tokenizer()

    def turn(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        answers = [script(ids, length) for ids in prompt_ids]
        return [ids for ids, _ in answers], [logps for _, logps in answers]

    owner: Any = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={},
        max_completion_length=length, max_tool_calling_iterations=sys.maxsize if most is None else most,
        use_vllm=False, model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=context)),
        environment_factories=None, tools=TOOLS, async_loop=_loop(), _generate_single_turn=turn,
        _sync_tool_dicts=[{"add": add}] * 32, _async_tool_dicts=[{"later": later}] * 32,
    )  # fmt: skip
    owner._get_tool_suffix_ids = partial(GRPOTrainer._get_tool_suffix_ids, owner)
    prompts = [list(prompt) for prompt in PROMPTS for _ in range(4)]
    prompt_ids = tokenizer.apply_chat_template(
        conversation=prompts, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    ids, logps = turn(prompt_ids)
    messages = [[parse_response(tokenizer, i, prefix=p, tools=TOOLS)] for i, p in zip(ids, prompt_ids, strict=True)]
    mask, messages, ids, logps, calls, failures, _ = GRPOTrainer._tool_call_loop(
        owner, prompts, prompt_ids, ids, messages, logps, None, {}
    )
    return {
        "prompt_ids": prompt_ids, "mask": mask, "messages": messages, "ids": ids, "logps": logps, "calls": calls,
        "failures": failures,
    }  # fmt: skip


def ours(script: Script, *, length: int, most: int | None, context: int) -> tuple[dict[str, Any], ScriptedEngine]:
    """The same by this kit's loop."""
    engine, chat = ScriptedEngine(script), Chat(tokenizer=byte_tokenizer())
    agent = AgentEngine(engine, chat, TOOLS, max_iterations=most, context_length=context)
    found = agent.converse(chat.encode(PROMPTS, TOOLS), Sampling(max_tokens=length), n=4)
    return {
        "prompt_ids": found.rollouts.prompt_ids, "mask": found.rollouts.tool_mask, "messages": found.messages,
        "ids": found.rollouts.completion_ids, "logps": found.rollouts.sampling_per_token_logps,
        "calls": sum(found.tool_calls), "failures": sum(found.tool_failures),
    }, engine  # fmt: skip


@pytest.mark.parametrize(
    ("length", "most", "context"),
    [(600, None, 5000), (600, 1, 5000), (600, 0, 5000), (230, None, 5000), (140, 3, 5000), (60, None, 5000),
     (600, None, 420)],
)  # fmt: skip
def test_the_loop_is_that_of_trl(length: int, most: int | None, context: int) -> None:
    theirs = trls_loop(Script(), length=length, most=most, context=context)
    found, engine = ours(Script(), length=length, most=most, context=context)
    for name, value in theirs.items():
        assert found[name] == value, name
    rounds = len(engine.requests) - 1
    assert (rounds == 0) if most == 0 else (rounds <= (most or 99))
    if length == 600 and most is None and context == 5000:
        assert rounds > 2 and theirs["calls"] > theirs["failures"] > 5
        assert {len(one) for one in theirs["messages"]} >= {1, 3, 5}


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_tool_output_that_just_fits(more: int) -> None:
    """With no token left the answers stay, and the turn after them is empty; with one token less they are dropped."""
    one = [call("add", a=3, b=4) + "<|im_end|>"]
    ids = ours(Script(one), length=600, most=1, context=5000)[0]
    exact = sum(ids["mask"][0][: ids["mask"][0].index(0)]) + ids["mask"][0].count(0) + more
    theirs = trls_loop(Script(one), length=exact, most=None, context=5000)
    found = ours(Script(one), length=exact, most=None, context=5000)[0]
    assert {name: found[name] for name in theirs} == theirs
    assert len(found["messages"][0]) == 2 + more and found["calls"] == 32 * (1 + (more == 1) * 0)


def test_every_turn_fits_what_is_left() -> None:
    found, engine = ours(Script(), length=230, most=None, context=5000)
    assert engine.requests[0] == (8, 4, 230)  # one request for a prompt with its four completions
    assert all(n == 1 and most < 230 for _, n, most in engine.requests[1:])
    lengths = [len(ids) for ids in found["ids"]]
    assert max(lengths) == 230 and min(lengths) < 100


def test_no_request_asks_for_more_than_the_engine_takes() -> None:
    """A server refuses a prompt with a limit beyond its context, so episodes of unlike lengths are asked for alone."""
    chat, sampling = Chat(tokenizer=byte_tokenizer()), Sampling(max_tokens=230)
    prompts = chat.encode(PROMPTS, TOOLS)
    context = max(map(len, prompts)) + sampling.max_tokens

    class Strict(ScriptedEngine):
        context_length = context

        def generate(self, prompt_ids: Any, sampling: Sampling, *, n: int = 1) -> Rollouts:
            assert max(map(len, prompt_ids)) + sampling.max_tokens <= context
            return super().generate(prompt_ids, sampling, n=n)

    strict, free = Strict(Script()), ScriptedEngine(Script())
    found = AgentEngine(strict, chat, TOOLS, context_length=context).converse(prompts, sampling, n=4)
    wanted = AgentEngine(free, chat, TOOLS).converse(prompts, sampling, n=4)
    assert found.rollouts == wanted.rollouts and found.messages == wanted.messages
    assert len(strict.requests) > len(free.requests)


def test_a_mask_that_is_shifted_would_be_seen() -> None:
    theirs = trls_loop(Script(), length=600, most=None, context=5000)["mask"]
    found = ours(Script(), length=600, most=None, context=5000)[0]["mask"]
    assert [row[1:] + row[:1] for row in found] != theirs


def test_no_sampled_token_goes_through_text() -> None:
    """Also with a tokenizer whose ids are not those that encoding the text again gives."""
    engine = RecordedEngine(ScriptedEngine(Script()))
    chat = Chat(tokenizer=byte_tokenizer())
    found = AgentEngine(engine, chat, TOOLS).generate(chat.encode(PROMPTS, TOOLS), Sampling(max_tokens=600), n=4)
    for prompt, ids, mask in zip(found.prompt_ids, found.completion_ids, found.tool_mask or [], strict=True):
        assert first_drift(prompt, ids, [bool(one) for one in mask], engine.calls) is None
        changed = [ids[0] + 1, *ids[1:]]
        assert first_drift(prompt, changed, [bool(one) for one in mask], engine.calls) is not None


class Reporting(ScriptedEngine):
    """An engine that also reports routes and kept sets, whose numbers say in which request they were made."""

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        from dataclasses import replace

        import torch

        found = super().generate(*args, **kwargs)
        pairs = zip(found.prompt_ids, found.completion_ids, strict=True)
        routes = [torch.full((len(p) + len(c) - 1, 2, 1), len(self.requests)) for p, c in pairs]
        kept = [[[len(self.requests)]] * len(ids) for ids in found.completion_ids]
        return replace(found, routed_experts=routes, sampling_mask=kept)


def test_what_an_engine_reports_per_token_is_that_of_the_turn() -> None:
    engine, chat = Reporting(Script(REPLIES[:2])), Chat(tokenizer=byte_tokenizer())
    found = AgentEngine(engine, chat, TOOLS).generate(chat.encode(PROMPTS, TOOLS), Sampling(max_tokens=600), n=4)
    row = max(range(len(found)), key=lambda i: len(found.completion_ids[i]))
    prompt, ids, mask = found.prompt_ids[row], found.completion_ids[row], (found.tool_mask or [])[row]
    routes = (found.routed_experts or [])[row][:, 0, 0].tolist()
    first = mask.index(0)
    assert len(routes) == len(prompt) + len(ids) - 1 and max(routes) > 2
    assert routes[: len(prompt) + first - 1] == [1] * (len(prompt) + first - 1)
    assert routes[len(prompt) + first - 1] == 2  # the last token of the first turn is fed by the second request
    kept = (found.sampling_mask or [])[row]
    assert kept[:first].tolist() == [[1]] * first and kept[first : first + 1].tolist() == [[ids[first]]]


@pytest.mark.parametrize(
    ("silent", "turn", "found"), [("first", 1, "none"), ("later", 2, "none"), ("short", 2, r"\d+ of \d+ tokens")]
)
def test_a_turn_whose_routes_are_not_reported_is_an_error_that_names_it(silent: str, turn: int, found: str) -> None:
    class Partly(Reporting):
        def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
            from dataclasses import replace

            rollouts = super().generate(*args, **kwargs)
            is_first = len(self.requests) == 1
            if silent == "short" and not is_first:  # as from a prefix cache
                return replace(rollouts, routed_experts=[routes[5:] for routes in rollouts.routed_experts or []])
            return replace(rollouts, routed_experts=None) if is_first == (silent == "first") else rollouts

    chat = Chat(tokenizer=byte_tokenizer())
    agent = AgentEngine(Partly(Script(REPLIES[:2])), chat, TOOLS)
    wanted = (
        rf"^routed_experts must hold the routing of every turn, but got {found} for turn {turn} of completion \d+\. "
        r"Let the engine report at every request: engine\.return_routing: true \(leave enable_prefix_caching out\)"
    )
    with pytest.raises(ValueError, match=wanted):
        agent.generate(chat.encode(PROMPTS, TOOLS), Sampling(max_tokens=600), n=4)


def test_errors_are_the_tools_answers() -> None:
    def function(name: str, **arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [function("later", word="x"), function("add", a=1, b=2), {"type": "shell", "name": "ls"},
             function("later", word="bad"), function("none")]  # fmt: skip
    found = answer_calls(calls, TOOLS)
    assert [message["content"] for message in found.messages] == [
        "3", "{'error': 'Unsupported tool call type: shell'}", "{'error': 'Tool none not found.'}", "xx",
        "{'error': 'no such word'}",
    ]  # fmt: skip
    assert (found.calls, found.failures) == (5, 3)
    with pytest.raises(NotImplementedError, match="tools must return text, but picture returned an image"):
        answer_calls([function("picture")], [picture])
    assert answer_calls([function("numbers")], [numbers]).messages[0]["content"] == "[1, 2]"


def numbers() -> list[int]:
    """Count."""
    return [1, 2]


def picture() -> list[dict[str, str]]:
    """Draw."""
    return [{"type": "image", "image": "pixels"}]


def test_any_engine_can_be_wrapped() -> None:
    inner = ScriptedEngine(Script([call("add", a=1, b=2) + "<|im_end|>"]))
    agent = AgentEngine(inner, Chat(tokenizer=byte_tokenizer()), [add], max_iterations=2)
    agent.version = 3
    assert inner.version == 3 and agent.requests is inner.requests
    found = agent.generate([[5, 6]], Sampling(max_tokens=600))
    assert found.policy_versions == [[3] * len(found.completion_ids[0])]
    assert [message["content"] for message in agent.converse([[5, 6]], Sampling(max_tokens=600)).messages[0][1::2]] == [
        "3", "3",
    ]  # fmt: skip


def test_a_reply_that_opens_a_thousand_brackets_is_text() -> None:
    chat = Chat(tokenizer=byte_tokenizer())
    ids = chat.tokenizer("<tool_call>\n" + "[" * 3000, add_special_tokens=False)["input_ids"]
    message = chat.parse(ids, [1])
    assert "tool_calls" not in message and message["content"].count("[") == 3000


def test_parts_of_text_reach_a_template_that_takes_only_text() -> None:
    tokenizer = byte_tokenizer()
    chat = Chat(tokenizer=tokenizer)
    parts = [{"role": "tool", "name": "add", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}]
    text = [{"role": "tool", "name": "add", "content": "42"}]
    original = tokenizer.chat_template
    tokenizer.chat_template = original.replace("message.content", "('' + message.content)").replace(
        "message['content']", "('' + message['content'])"
    )
    assert tokenizer.chat_template != original
    assert chat.suffix_ids(parts) == chat.suffix_ids(text)
