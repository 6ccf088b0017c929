"""A gap of Triton's interpreter, closed."""

from __future__ import annotations

from functools import cache, partial
from typing import Any


@cache
def make_ranges_of_tensors() -> None:
    """The interpreter counts ``tl.range`` in Python numbers; vLLM's top-k and top-p want tensors. A plugin of vLLM."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_core

    def patched(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        numbers = lang.range
        tensor = partial(interpreter.interpreter_semantic.to_tensor, check_type=False)
        scope.set_attr(lang, "range", lambda *args, **kwargs: map(tensor, numbers(*args, **kwargs)))

    interpreter._patch_lang_core = patched
