"""Two gaps of Triton's interpreter, closed."""

from __future__ import annotations

from functools import cache, partial
from typing import Any


@cache
def close_gaps() -> None:
    """A plugin of vLLM.

    The interpreter counts ``tl.range`` in Python numbers; vLLM's top-k and top-p want tensors. It stores with masks of
    bool alone; vLLM's sampling mask combines comparisons, which come out as integers of 0 and 1.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_core

    def patched(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        numbers = lang.range
        tensor = partial(interpreter.interpreter_semantic.to_tensor, check_type=False)
        scope.set_attr(lang, "range", lambda *args, **kwargs: map(tensor, numbers(*args, **kwargs)))

    interpreter._patch_lang_core = patched
    store = interpreter.InterpreterBuilder.create_masked_store

    def stored(builder: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return store(builder, ptrs, value, interpreter.TensorHandle(mask.data.astype(bool), mask.dtype), cache_policy)

    interpreter.InterpreterBuilder.create_masked_store = stored
