"""Messages to token ids and replies to messages, by the templates of the tokenizer, as TRL does it.

What the model sampled never goes through text on its way to the next turn. Only the tool's message is tokenised: as
what a short conversation with it has more than the same one without it.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_offpolicy.rollouts.agents.tools import Message, Tool

Ids = Sequence[int]

_CALLED, _KEY, _VALUE, _ANSWER = "tool_name_a8f3e2b1", "tool_arg_key_b9d4f5c2", "tool_arg_val_d6e7a9f3", "tool_c4f9a8e2"
_KNOWN_MODELS = "For a known model, trl.chat_template_utils.{} gives it."


def chat_tokenizer(tokenizer: Any, chat_template: str | None = None, response_template: Any = None) -> Any:
    """The tokenizer with other templates. The given one is not changed.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        chat_template: how messages are written: a Jinja text or the file that holds it; None = as it is.
        response_template: how replies are read (``parse_response``): a mapping or the JSON file that holds it.

    Raises:
        ValueError: a file does not exist.
    """
    if chat_template is None and response_template is None:
        return tokenizer
    changed = copy.copy(tokenizer)
    if chat_template is not None:
        text = chat_template if "{" in chat_template else _read(chat_template, "chat_template")
        changed.chat_template = text
    if response_template is not None:
        is_file = isinstance(response_template, str)
        made = json.loads(_read(response_template, "response_template")) if is_file else dict(response_template)
        changed.response_template = made
    return changed


def _read(path: str, where: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"{where} must be the template or a file that holds it, but got {path!r}, which is no file.")
    return Path(path).read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A tokenizer with options of its chat template.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        options: further variables of the template, e.g. ``{"enable_thinking": False}``.
        processor: the processor of a vision-language model, for messages with images; None = the model reads text.
    """

    tokenizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = None

    # ------------------------------------------------------------------------------------------------------- to ids

    def encode(self, prompts: Sequence[Any], tools: Sequence[Tool] = ()) -> list[list[int]]:
        """Token ids of prompts. A text is tokenised as it is, messages go through the chat template with the tools."""
        if isinstance(prompts[0], str):
            found = self.tokenizer(text=list(prompts))
        else:
            found = self.tokenizer.apply_chat_template(
                conversation=list(prompts),
                tools=list(tools) or None,  # some templates write something for an empty list
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.options,
            )
        ids: list[list[int]] = found["input_ids"]
        return ids

    def suffix_ids(self, answers: Sequence[Message]) -> list[int]:
        """Ids from the end of the model's turn to the beginning of its next one, with the tools' answers between.

        Args:
            answers: messages of the role "tool", at least one.

        Raises:
            ValueError: the template writes earlier messages in another way once others follow.
        """
        before = _conversation(answers[0]["name"])
        prefix = self._rendered(before)
        try:
            whole = self._rendered([*before, *answers], add_generation_prompt=True)
        except TypeError:  # a template that takes only text
            whole = self._rendered([*before, *map(_as_text, answers)], add_generation_prompt=True)
        # a template may write a line end after the end token, which the model does not sample
        ends = [i for i, token in enumerate(prefix) if token == self.tokenizer.eos_token_id]
        prefix = prefix[: ends[-1] + 1] if ends else prefix
        if whole[: len(prefix)] != prefix:
            raise ValueError(_NOT_PRESERVING)
        return whole[len(prefix) :]

    def _rendered(self, messages: Sequence[Message], **options: Any) -> list[int]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=False, **options, **self.options
        )
        return ids

    # -------------------------------------------------------------------------------------------------- to messages

    @property
    def parses(self) -> bool:
        """True if the tokenizer can read a reply, not only decode it."""
        return getattr(self.tokenizer, "response_template", None) is not None

    def decode(
        self, completions: Sequence[Ids], prompt_ids: Sequence[Ids], prompts: Sequence[Any], tools: Sequence[Any]
    ) -> list[Any]:
        """Completions as reward functions take them: a text, or a list of one message if the prompt is messages.

        Args:
            completions: B completions.
            prompt_ids: B prompts, as ids.
            prompts: the same as text or messages.
            tools: B lists of tools that the model was told of.
        """
        texts = self.tokenizer.batch_decode([list(ids) for ids in completions], skip_special_tokens=True)
        found: list[Any] = []
        for text, ids, before, prompt, known in zip(texts, completions, prompt_ids, prompts, tools, strict=True):
            if isinstance(prompt, str):
                found.append(text)
            elif self.parses:
                found.append([self.parse(ids, before, known)])
            else:
                found.append([{"role": "assistant", "content": text}])
        return found

    def parse(self, reply: Ids, before: Ids, tools: Sequence[Tool] = ()) -> Message:
        """A reply as a message, with ``tool_calls`` if it calls tools; as plain text if it cannot be read.

        Args:
            reply: sampled ids.
            before: all ids before them, which may have begun the message.
            tools: tools that the model was told of; arguments get the types that they declare.
        """
        ids = list(reply)
        if not ids:
            return {"role": "assistant", "content": ""}
        try:
            message = self.tokenizer.parse_response(ids, prefix=list(before), tools=list(tools))
            if message is None:
                raise ValueError("nothing is left of a reply that was cut")
            content = message.get("content")
            # an end token may be left in the content (transformers issue 42249)
            message["content"] = content.removesuffix(self.tokenizer.eos_token) if isinstance(content, str) else content
            message["content"] = message["content"] or ""
            if message.get("tool_calls") is not None:
                _check_calls(message["tool_calls"])
        except (ValueError, TypeError, RecursionError):  # the last one of a reply that opens a thousand brackets
            return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        return dict(message)

    # -------------------------------------------------------------------------------------------------------- check

    def check(self) -> None:
        """Raise unless conversations with tools can be written and read.

        Raises:
            ValueError: the chat template leaves out tool calls or answers, or writes earlier messages in another way
                once others follow; or replies cannot be read.
        """
        if not _writes_tools(self):
            raise ValueError(
                "chat_template must write tool calls and the tools' answers (messages user, assistant with tool_calls, "
                "tool), but the tokenizer's does not. Give chat_template (a text or a file), or another tokenizer."
            )
        before = _conversation("dummy")
        answer = {"role": "tool", "name": "dummy", "content": "dummy"}
        first, whole = self._rendered(before), self._rendered([*before, answer], add_generation_prompt=True)
        if whole[: len(first)] != first:
            raise ValueError(_NOT_PRESERVING)
        if not self.parses:
            raise ValueError(
                "response_template must say how a tool call is read from a reply (transformers' parse_response), but "
                "the tokenizer has none. Give response_template (a mapping or a JSON file). "
                + _KNOWN_MODELS.format("add_response_schema(tokenizer)")
            )
        known = inspect.signature(self.tokenizer.parse_response).parameters
        if "tools" not in known and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            raise ValueError("tools need transformers 5.15 or newer, whose parse_response takes tools.")


_NOT_PRESERVING = (
    "chat_template must write earlier messages the same whatever follows them, because sampled turns are not tokenised "
    "again, but the tokenizer's does not. Give chat_template (a text or a file). "
    + _KNOWN_MODELS.format("get_training_chat_template(tokenizer)")
)


def _as_text(answer: Message) -> Message:
    """A tool's answer whose parts are all text as one text."""
    parts = answer["content"]
    if isinstance(parts, str) or not all(isinstance(part.get("text"), str) for part in parts):
        return dict(answer)
    return {**answer, "content": "".join(part["text"] for part in parts)}


def _conversation(name: str, arguments: Mapping[str, Any] | None = None) -> list[Message]:
    """A user's message and a call of the tool ``name``: some templates write the name before the answer too."""
    call = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    return [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _writes_tools(chat: Chat) -> bool:
    """True if every part of a tool call and its answer appears in what the template writes."""
    if chat.tokenizer.chat_template is None:
        return False
    from jinja2.exceptions import TemplateError

    messages = [
        *_conversation(_CALLED, {_KEY: _VALUE}),
        {"role": "tool", "name": _CALLED, "content": _ANSWER},
    ]
    try:
        text = chat.tokenizer.apply_chat_template(messages, tokenize=False, **chat.options)
    except (TemplateError, TypeError):  # it refuses the role, or arguments that are no text
        return False
    return all(part in text for part in (_CALLED, _KEY, _VALUE, _ANSWER))


def _check_calls(calls: Any) -> None:
    """Raise unless these are tool calls. Missing arguments become ``{}``, as some models write calls without any.

    Raises:
        ValueError: a field is missing or has another type.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError("tool_calls must be a list of mappings.")
    for call in calls:
        function = call.get("function", None if call.get("type") == "function" else call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool call must name a function.")
        if function.get("arguments") is None:
            function["arguments"] = {}
