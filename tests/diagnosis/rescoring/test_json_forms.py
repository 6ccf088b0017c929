"""The JSON of prompts in other forms, against the libraries that write it so."""

from __future__ import annotations

import json

import jinja2
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_offpolicy.diagnosis.rescoring.json_forms import FORMS, in_other_forms
from trl_offpolicy.diagnosis.rescoring.renderings import other_renderings

TOOL = {"name": "convert", "description": "a < b & c's ü", "parameters": {"b": "string", "a": [1, 2]}}
TEXT = f"Tools: {json.dumps(TOOL)} and {json.dumps([TOOL, TOOL])}, [1, 2], {{x}} {{}} end"


def test_every_value_is_written_anew_and_nothing_else_changes() -> None:
    found = in_other_forms([TEXT, "no JSON [3] {here}"])
    assert {f"JSON {name}" for name in FORMS} == set(found)
    for name, (text, plain) in found.items():
        write = FORMS[name.removeprefix("JSON ")]
        assert text == f"Tools: {write(TOOL)} and {write([TOOL, TOOL])}, [1, 2], {{x}} {{}} end"
        assert plain == "no JSON [3] {here}"
    assert in_other_forms(["no JSON [3] {here}", "[1, 2] {} {'a': 1}"]) == {}


@pytest.mark.parametrize("value", [TOOL, [TOOL]])
def test_jinjas_form_is_jinjas(value: object) -> None:
    written = jinja2.Environment().from_string("{{ value | tojson }}").render(value=value)
    assert FORMS["sorted and escaped as by Jinja's tojson"](value) == written


def letters() -> PreTrainedTokenizerFast:
    """One token a character, as any tokenizer sees a blank that comes or goes."""
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(32, 127)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def test_they_are_renderings_of_prompts_without_a_chat_template_too() -> None:
    tokenizer = letters()
    texts = ['call {"b": 1, "a": 2}', 'call {"a": 3}']
    ids = [tokenizer(text)["input_ids"] for text in texts]
    found = other_renderings(tokenizer, texts, ids)
    assert "JSON with blanks" not in found  # as it is
    assert found["JSON with sorted keys"] == [tokenizer('call {"a": 2, "b": 1}')["input_ids"], ids[1]]
    assert found["JSON without blanks"][1] == tokenizer('call {"a":3}')["input_ids"]
    assert all(name.startswith("JSON ") for name in found)


def test_texts_that_no_library_writes_are_left_alone() -> None:
    """Nesting beyond what Python reads, half of a surrogate pair, and a row whose ids the tokenizer would not make."""
    assert in_other_forms(["[" * 3000, '{"a":' * 3000]) == {}
    tokenizer = letters()
    half = ['say {"a": "\\ud83d", "b": 1}']
    assert "JSON in ASCII without blanks" in other_renderings(tokenizer, half, [tokenizer(half[0])["input_ids"]])
    texts, ids = ['x {"c": 1}', "ab"], [tokenizer('x {"c": 1}')["input_ids"], [97, 98, 99]]
    found = other_renderings(tokenizer, texts, ids)
    assert "JSON with blanks" not in found and found["JSON without blanks"][1] == [97, 98, 99]
