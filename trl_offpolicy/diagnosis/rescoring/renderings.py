"""Other renderings of recorded prompts: the chat of each is read back from its text, and rendered in other ways."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from trl_offpolicy.diagnosis.attribution.trials.endings import other_ends
from trl_offpolicy.diagnosis.rescoring.json_forms import in_other_forms
from trl_offpolicy.engines.hf import Ids

_SYSTEM, _USER = "@@system@@", "@@user@@"
Chat = list[dict[str, str]]


def other_renderings(tokenizer: Any, texts: Sequence[str], ids: Ids) -> dict[str, Ids]:
    """Token ids of the prompts in other renderings, by name; of their chats only if each is one with a question.

    Args:
        tokenizer: the model's tokenizer.
        texts: the prompts as they were rendered, special tokens included.
        ids: their token ids.
    """
    found: dict[str, Ids] = _other_json(tokenizer, texts, ids)
    if getattr(tokenizer, "chat_template", None):
        found |= other_ends(tokenizer, ids) | _other_chats(tokenizer, texts)
    return {name: rows for name, rows in found.items() if all(rows) and rows != [list(row) for row in ids]}


def _other_json(tokenizer: Any, texts: Sequence[str], ids: Ids) -> dict[str, Ids]:
    """The JSON of the prompts in other forms; a text that a form does not change keeps its ids."""
    found: dict[str, Ids] = {}
    for name, others in in_other_forms(texts).items():
        try:
            found[name] = [
                list(row) if other == text else list(tokenizer(other, add_special_tokens=False)["input_ids"])
                for text, other, row in zip(texts, others, ids, strict=True)
            ]
        except (TypeError, ValueError):  # a tokenizer refuses half of a surrogate pair
            continue
    return found


def _other_chats(tokenizer: Any, texts: Sequence[str]) -> dict[str, Ids]:
    """The chats that were rendered, rendered in other ways; empty if one text is no chat of a question."""
    chats = [_chat_of(tokenizer, text) for text in texts]
    if any(chat is None for chat in chats):
        return {}
    found: dict[str, Ids] = {}
    twice = [[{"role": "user", "content": text}] for text in texts]
    ways = {**_others([chat for chat in chats if chat is not None]), TWICE: twice}
    for name, others in ways.items():
        try:
            found[name] = [_ids(tokenizer, chat, generation=name != NO_GENERATION) for chat in others]
        except Exception:  # templates are programs, and refuse what their author did not foresee
            continue
    found[NO_TEMPLATE] = [list(tokenizer(chat[-1]["content"])["input_ids"]) for chat in chats if chat is not None]
    return found


NO_GENERATION, NO_TEMPLATE = "no generation prompt", "no chat template"
TWICE = "the chat template twice"


def _others(chats: list[Chat]) -> dict[str, list[Chat]]:
    users = [chat[-1:] for chat in chats]
    empty = [{"role": "system", "content": ""}]
    folded = [[{"role": "user", "content": "\n\n".join(part["content"] for part in chat)}] for chat in chats]
    return {
        NO_GENERATION: chats,
        "no system prompt": users,
        "empty system prompt": [empty + user for user in users],
        "system prompt in the user's turn": folded,
        "quotes and brackets escaped as in HTML": [[_escaped(turn) for turn in chat] for chat in chats],
    }


def _escaped(turn: dict[str, str]) -> dict[str, str]:
    """As Jinja writes a turn when it escapes on its own (``autoescape``)."""
    return {**turn, "content": html.escape(turn["content"])}


def _chat_of(tokenizer: Any, text: str) -> Chat | None:
    """The system prompt, if there is one, and the question of a rendered prompt; None if it is something else."""
    user = {"role": "user", "content": _USER}
    for chat in ([user], [{"role": "system", "content": _SYSTEM}, user]):
        try:
            shape = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception:
            continue
        pattern = re.escape(shape).replace(re.escape(_SYSTEM), "(.*?)", 1).replace(re.escape(_USER), "(.*)", 1)
        if (match := re.fullmatch(pattern, text, re.DOTALL)) is not None:
            return [{**message, "content": part} for message, part in zip(chat, match.groups(), strict=True)]
    return None


def _ids(tokenizer: Any, chat: Chat, *, generation: bool) -> list[int]:
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=generation, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
