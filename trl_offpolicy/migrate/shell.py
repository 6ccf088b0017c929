"""The options in a launch script: variables are filled in, nothing is run.

Of the environment only HOME and PWD are known: where files are on the machine of who asks. All else may differ there.

Read are assignments, arrays, ``${NAME:-default}``, ``$((1024 * 2))`` and the words of commands. Which branch of an
``if`` or ``case`` runs is not known here. So inside them, and behind ``&&`` and ``||``, an assignment counts only if
the variable has no value yet and the other branches give it the same one. It is then told, unless the branch asks for
just that (``[ -z "$X" ]``): without the branch the variable would be empty.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from trl_offpolicy.migrate.nested import Unresolved

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+)?=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"[A-Za-z_]\w*|[@*#?0-9]")
_ARITHMETIC = re.compile(r"[\d\s+*/()%-]+")
_OPENS = ("if", "case", "for", "while", "until", "{", "(")
_CLOSES = ("fi", "esac", "done", "}", ")")
_CONDITIONS = ("if", "elif", "for", "while", "until", "case")
_UNSURE = ("if", "for", "while", "until", "case")
"""What follows may not run; a function's body and { } do."""
_TESTS = ("[", "[[", "test")
_WORDS_BEFORE = ("then", "else", "elif", "do", "!", "export", "declare", "local", "readonly", "exec", "time", "-x")
_REDIRECTION = re.compile(r"\d*[<>]")
_SEPARATORS = ";&|\n"
_SHELLS = ("bash", "sh", "source", ".")
_PROGRAMS = ("swift", "megatron", "trl")
"""Programs whose first argument is a command of theirs."""
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
MACHINE = ("HOME", "PWD")
"""Variables of the environment that are filled in."""
_UNKNOWN = "\0"
"""Put into a word in place of what cannot be known."""
_DOLLAR = "\1"
"""Put into a word in place of a $ that names no variable."""


@dataclass(frozen=True)
class Script:
    """What a launch script starts.

    Args:
        entry: the program, e.g. ``-m verl.trainer.main_ppo`` or ``swift rlhf``.
        words: its arguments, with variables filled in. A word with an unknown part is an ``Unresolved`` text.
        branches: variables that a branch would set to another value than the one that was taken.
        guessed: variables of the command that a branch alone sets, whose value was taken.
        script: another script that is started with the arguments (``bash run.sh a.b=c``); empty if none.
        others: further commands of the script that look like a training.
        processes: ``NPROC_PER_NODE`` times ``NNODES``, by which ms-swift counts the devices; None if unset.
        exported: variables that a script which is started from this one knows.
    """

    entry: str
    words: tuple[str, ...]
    branches: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    script: str = ""
    others: int = 0
    processes: int | None = None
    exported: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Word:
    """A word while it is read: its raw text, and whether a part of it is quoted."""

    text: str = ""
    quoted: bool = False


@dataclass(frozen=True)
class _Command:
    """Raw words, and whether they stand behind ``&&`` or ``||``."""

    words: list[_Word]
    chained: bool = False


@dataclass
class _State:
    """What is known while the script is read.

    Args:
        variables: values by name.
        before: the values before the outermost branch that is being read.
        branch: what that branch has set.
        depth: how many ``if``, ``case``, ``for``, ``{`` are open.
        other: names that a branch would set to another value.
        unsure: how many of these may not run.
        guessed: names that have their value from a branch alone.
        condition: the last test, as written.
        read: names whose value was read since it was emptied.
        depends: for each name the names that its value was made of.
        exported: names that the commands of the script know.
    """

    variables: dict[str, list[str]] = field(default_factory=dict)
    before: dict[str, list[str]] = field(default_factory=dict)
    branch: dict[str, list[str]] = field(default_factory=dict)
    depth: int = 0
    other: dict[str, None] = field(default_factory=dict)
    unsure: int = 0
    guessed: dict[str, None] = field(default_factory=dict)
    condition: str = ""
    read: set[str] = field(default_factory=set)
    depends: dict[str, set[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)

    def made_of(self, names: set[str]) -> set[str]:
        """These names and all that their values were made of."""
        known: set[str] = set()
        while names:
            known |= names
            names = {one for name in names for one in self.depends.get(name, ())} - known
        return known

    def enter(self, by: int) -> None:
        """Open or close a branch."""
        if self.depth == 0 and by > 0:
            self.before, self.branch = dict(self.variables), {}
        self.depth = max(self.depth + by, 0)


def machine() -> dict[str, str]:
    """The variables of ``MACHINE`` that the environment has."""
    return {name: os.environ[name] for name in MACHINE if name in os.environ}


def read_script(text: str, environment: Mapping[str, str] | None = None) -> Script:
    """The command of a script that has the most options.

    Args:
        text: the script.
        environment: variables that are set before it begins; None = :func:`machine`.

    Raises:
        ValueError: no command has an option.
    """
    given = machine() if environment is None else environment
    state = _State({name: [value] for name, value in given.items()})
    commands: list[tuple[list[str], set[str]]] = []
    for command in _commands(text):
        state.read.clear()
        if words := _run(command, state):
            commands.append((words, state.made_of(set(state.read))))
    counted = [(sum(_is_option(word) for word in words), words) for words, _ in commands]
    most, words = max(counted, key=lambda pair: pair[0], default=(0, []))
    if most == 0:
        raise ValueError("file must start a training with options (--a b or a.b=c), but no command in it has any.")
    alike = [found for number, found in counted if number * 2 > most and found is not words]
    known = {name: values[0] for name, values in state.variables.items() if len(values) == 1}
    used = next(names for command, names in commands if command is words)
    script = _split_entry(words, tuple(state.other))
    if len(words) > 1 and words[0] in _SHELLS and words[1].endswith((".sh", ".bash")):
        script = replace(script, entry="", words=tuple(words[2:]), script=words[1])
    return replace(
        script,
        guessed=tuple(name for name in state.guessed if name in used and name not in state.other),
        others=sum(bool(_split_entry(found, ()).entry) for found in alike),
        processes=_processes(known),
        exported={name: known[name] for name in sorted(state.exported) if name in known},
    )


def _processes(variables: Mapping[str, str]) -> int | None:
    """Devices of all nodes, where both numbers are known."""
    given = (variables.get("NPROC_PER_NODE", ""), variables.get("NNODES", "1"))
    return int(given[0]) * int(given[1]) if all(one.isdecimal() for one in given) else None


def _is_option(word: str) -> bool:
    return word.startswith("--") or re.match(r"(\+\+|\+|~)?[\w/]+(\.[\w/]+)+(=|$)", word) is not None


def _split_entry(words: list[str], branches: tuple[str, ...]) -> Script:
    """Arguments begin after the module (-m) or script that is started, or after ``swift rlhf``."""
    start = 0
    for index, word in enumerate(words):
        before = words[index - 1] if index else ""
        if start and "=" in word and (_is_option(word) or _ASSIGNMENT.match(word)):  # its value may end with .py
            break
        if before in ("-m", "--module") or word.endswith(".py") or (before in _PROGRAMS and not word.startswith("-")):
            start = index + 1
        elif start and _is_option(word):
            break
    # Only `ray job submit ... -- python x.py` has options before the program; it was cut off above.
    entry = " ".join(words[max(start - 2, 0) : start])
    redirected = next((index for index, word in enumerate(words) if _REDIRECTION.match(word)), len(words))
    words = words[:redirected]
    return Script(entry, tuple(word for word in words[start:] if word), branches)


# ------------------------------------------------------------------------------------------------------- interpreter


def _run(command: _Command, state: _State) -> list[str]:
    """Carries out the assignments of a command; the words of a command that is none."""
    raw = list(command.words)
    exports = False
    while raw and not raw[0].quoted and _is_frame(raw[0].text, state):
        word = raw.pop(0).text
        exports = exports or word in ("export", "-x")
        state.enter((word in _OPENS) - (word in _CLOSES))
        state.unsure += (word in _UNSURE) - (word in ("fi", "esac", "done"))
        if word in _CONDITIONS:
            state.condition = " ".join(one.text for one in raw)
            return []
    if raw and raw[-1].text == "{" and len(raw) <= 2:  # a function begins
        state.enter(1)
        return []
    if raw and raw[0].text in _TESTS:
        state.condition = " ".join(one.text for one in raw)
    state.enter(int(command.chained))
    state.unsure += command.chained
    assigned = 0
    for one in raw:
        match = _ASSIGNMENT.match(one.text)
        if match is None:
            break
        assigned += 1
        _assign(match, state)
    state.enter(-int(command.chained))
    state.unsure -= command.chained
    if exports or assigned < len(raw):  # `export A=1 B`, and `A=1 command`, whose A counts from then on here
        names = raw if exports else raw[:assigned]
        state.exported |= {one.text.partition("=")[0].removesuffix("+") for one in names}
    if assigned == len(raw) or exports:
        return []
    return [text for word in raw[assigned:] for text in _expanded(word.text, state)]


def _is_frame(word: str, state: _State) -> bool:
    """True for a keyword, and for the pattern of a ``case``, as ``gpu)``."""
    pattern = state.depth > 0 and word.endswith(")") and "(" not in word
    return word in (*_WORDS_BEFORE, *_OPENS, *_CLOSES) or pattern


def _assign(match: re.Match[str], state: _State) -> None:
    name, before = match["name"], state.before.get(match["name"])
    reading = state
    if state.depth > 0:  # X=${X:-8} in a branch reads the X before the branch
        reading = _State({**state.variables, name: before or [""]})
    outside = set(state.read)
    reading.read.clear()
    found = _assigned(match["value"], reading)
    state.depends[name] = (state.depends.get(name, set()) if match["more"] else set()) | reading.read
    state.read = outside
    if state.depth == 0:
        state.variables[name] = [*(state.variables.get(name, []) if match["more"] else []), *found]
        state.guessed.pop(name, None)
        return
    known = before is not None and before != [""] and not any(isinstance(one, Unresolved) for one in before)
    if known or match["more"]:
        if found != before:
            state.other[name] = None
    elif state.branch.setdefault(name, found) != found:
        state.variables[name] = [Unresolved("${" + name + "}")]
    else:
        state.variables[name] = found
        fills_in = re.search(rf"-z\s+\"?\$\{{?{name}\b", state.condition) is not None  # set where it is not set
        if state.unsure > 0 and not fills_in:
            state.guessed[name] = None


def _assigned(value: str, state: _State) -> list[str]:
    """The values of a variable, several for an array."""
    if not value.startswith("("):
        return _expanded(value, state, split=False) or [""]
    inner = [word for command in _commands(value[1:-1]) for word in command.words]
    return [text for word in inner for text in _expanded(word.text, state)]


def _expanded(text: str, state: _State, *, split: bool = True) -> list[str]:
    """The words that a raw word becomes; quotes are taken off."""
    words, current, quote, index, empty = [], "", "", 0, True
    while index < len(text):
        letter = text[index]
        if letter == "\\" and quote != "'":
            current, index, empty = current + text[index + 1 : index + 2], index + 2, False
        elif letter in "'\"" and quote in ("", letter):
            quote, index, empty = ("" if quote else letter), index + 1, False
        elif letter == "$" and quote != "'":
            values, index = _value(text, index, state)
            if quote or not split:
                whole = len(values) > 1 and split
                head = [current + values[0], *values[1:-1]] if whole else []
                words += head
                current = values[-1] if whole else current + " ".join(values)
                empty = empty and not values
            else:
                pieces = [piece for value in values for piece in (value.split() if len(values) == 1 else [value])]
                if pieces:
                    words += [current + pieces[0], *pieces[1:-1]] if len(pieces) > 1 else []
                    current = pieces[-1] if len(pieces) > 1 else current + pieces[0]
                    empty = False
        elif letter == "`" and quote != "'":
            end = text.find("`", index + 1)
            current, index, empty = current + _UNKNOWN, (end if end > 0 else len(text)) + 1, False
        else:
            literal = _DOLLAR if letter == "$" else letter  # in single quotes, as in '${a.b}' of OmegaConf
            current, index, empty = current + literal, index + 1, False
    if not empty:
        words.append(current)
    unknown = [_is_unknown(word) for word in words]
    texts = [word.replace(_UNKNOWN, "$(...)").replace(_DOLLAR, "$") for word in words]
    return [Unresolved(text) if is_unknown else text for text, is_unknown in zip(texts, unknown, strict=True)]


def _is_unknown(word: str) -> bool:
    return _UNKNOWN in word or isinstance(word, Unresolved) or re.search(r"\$[A-Za-z_{(]", word) is not None


def _value(text: str, index: int, state: _State) -> tuple[list[str], int]:
    """(the values, the index behind it) of what begins with ``$`` at ``index``."""
    if text.startswith("$((", index):
        end = _closing(text, index + 1, "(", ")")  # of the outer bracket
        return [_arithmetic(text[index + 3 : end - 1], state)], end + 1
    if text.startswith("$[", index):  # the older $[1 + 2]
        end = _closing(text, index + 1, "[", "]")
        return [_arithmetic(text[index + 2 : end], state)], end + 1
    if text.startswith("$(", index):
        return [_UNKNOWN], _closing(text, index + 1, "(", ")") + 1
    if text.startswith("${", index):
        end = _closing(text, index + 1, "{", "}")
        return _parameter(text[index + 2 : end], state), end + 1
    match = _VARIABLE.match(text, index + 1)
    if match is None:
        return ["$"], index + 1
    return _parameter(match[0], state), match.end()


def _parameter(expression: str, state: _State) -> list[str]:
    """The values of NAME, NAME[@], NAME:-default."""
    match = re.fullmatch(r"(?P<name>\w+|[@*#?])(?P<all>\[[^\]]*\])?(?P<rest>.*)", expression, re.DOTALL)
    if match is None:
        return [_UNKNOWN]
    name, rest = match["name"], match["rest"]
    if name in ("@", "*"):
        return []
    state.read.add(name)
    found = state.variables.get(name)
    default = re.fullmatch(r":?[-=](.*)", rest, re.DOTALL)
    if default is not None and (found is None or (rest.startswith(":") and "".join(found) == "")):
        values = _expanded(default[1], state, split=False) or [""]
        if "=" in rest[:2]:
            state.variables[name] = values
        return values
    if found is None:
        return ["${" + name + (match["all"] or "") + "}"]
    if rest and default is None and not rest.startswith(":?"):
        return [_UNKNOWN]
    return list(found) if match["all"] else found[:1]


def _arithmetic(expression: str, state: _State) -> str:
    state.read |= set(re.findall(r"[A-Za-z_]\w*", expression))
    filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: (state.variables.get(match[1]) or ["?"])[0], expression)
    if not _ARITHMETIC.fullmatch(filled) or "**" in filled:
        return _UNKNOWN
    try:
        return str(int(eval(filled.replace("/", "//"), {"__builtins__": {}})))
    except (SyntaxError, ZeroDivisionError, TypeError):
        return _UNKNOWN


# -------------------------------------------------------------------------------------------------------------- lexer


def _commands(text: str) -> Iterator[_Command]:
    """The commands of a script, each as its raw words with their quotes."""
    words: list[_Word] = []
    index, word, chained = 0, _Word(), False
    while index < len(text):
        letter = text[index]
        separates = letter in " \t" or letter in _SEPARATORS or text.startswith("\\\n", index)
        if separates and word.text:
            words, word = [*words, word], _Word()
        if text.startswith("\\\n", index):
            index += 2
        elif letter in _SEPARATORS:
            if words:
                yield _Command(words, chained)
                words = []
            doubled = text.startswith(("&&", "||"), index)
            chained = doubled or (chained and letter not in ";\n")
            index += 1 + doubled
        elif separates:
            index += 1
        elif letter == "#" and not word.text:
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        elif (document := _HEREDOC.match(text, index)) is not None:
            closing = re.compile(rf"^\s*{document[1]}\s*$", re.MULTILINE).search(text, document.end())
            index = len(text) if closing is None else closing.end()
        else:
            end_of_unit = _unit(text, index, word)
            word.text += text[index:end_of_unit]
            word.quoted = word.quoted or letter in "'\""
            index = end_of_unit
    if word.text:
        words.append(word)
    if words:
        yield _Command(words, chained)


def _unit(text: str, index: int, word: _Word) -> int:
    """The index behind a letter, or behind the quoted, substituted or bracketed text that begins there."""
    letter = text[index]
    if letter == "\\":
        return index + 2
    if letter in "'\"":
        return _closing_quote(text, index) + 1
    if text.startswith("${", index):
        return _closing(text, index + 1, "{", "}") + 1
    if text.startswith("$[", index):
        return _closing(text, index + 1, "[", "]") + 1
    if text.startswith("$(", index) or (letter == "(" and word.text.endswith("=")):
        return _closing(text, text.index("(", index), "(", ")") + 1
    if letter == "`":
        end = text.find("`", index + 1)
        return len(text) if end < 0 else end + 1
    return index + 1


def _closing_quote(text: str, index: int) -> int:
    quote, index = text[index], index + 1
    while index < len(text) and text[index] != quote:
        index += 2 if text[index] == "\\" and quote == '"' else 1
    return min(index, len(text) - 1)


def _closing(text: str, index: int, opening: str, closing: str) -> int:
    """The index of the bracket that closes the one at ``index``; comments and quotes are passed over."""
    depth = 0
    while index < len(text):
        letter = text[index]
        if letter == "\\":
            index += 1
        elif letter in "'\"":
            index = _closing_quote(text, index)
        elif letter == "#" and opening == "(" and text[index - 1] in " \t\n":
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
        elif letter == opening:
            depth += 1
        elif letter == closing:
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return len(text) - 1
