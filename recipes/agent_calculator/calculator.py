"""A calculator that a language model may call: arithmetic in Python's notation, in a process of its own with limits.

    python recipes/agent_calculator/calculator.py "(17 + 25) * 3"

Two fences. The text is parsed and every node of its syntax tree must be on a list of arithmetic ones: no names, calls,
attributes, strings, loops. What is left runs in a subprocess without environment, files (it may write none and opens
none), network or children, with limits on time, memory and output.
"""

from __future__ import annotations

import ast
import resource
import subprocess
import sys

LONGEST = 200
"""Characters of an expression."""
SECONDS = 2
"""Of the processor, and of the wall clock."""
MEMORY = 256 * 2**20
"""Bytes of address space."""
DIGITS = 64
"""Characters of the answer; longer ones are refused."""
LARGEST_EXPONENT = 64

_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.Pow, ast.UAdd, ast.USub,
)  # fmt: skip

# The child: limits first, then the arithmetic. -I -S: no site, no environment, no current folder on the path.
_CHILD = """
import resource, sys
for kind, most in {limits!r}:
    resource.setrlimit(kind, (most, most))
try:
    value = eval(compile(sys.argv[1], "expression", "eval"), {{"__builtins__": {{}}}}, {{}})
    text = repr(value)
except Exception as error:
    text = "error: " + type(error).__name__
sys.stdout.write(text[:{digits} + 1])
"""


class Refused(ValueError):
    """The expression is not arithmetic, or too much of it."""


def calculator(expression: str) -> str:
    """Work out an arithmetic expression such as (3 + 4) * 2.

    Args:
        expression: Numbers, + - * / // % ** and brackets.

    Returns:
        The value, or what is wrong with the expression.
    """
    try:
        check(expression)
    except Refused as refused:
        return f"error: {refused}"
    return run(expression.strip())


def check(expression: object) -> None:
    """Raise unless this is arithmetic on a few numbers.

    Raises:
        Refused: with the reason, for the model to read.
    """
    if not isinstance(expression, str) or not expression.strip():
        raise Refused("an expression is needed, for example 3 + 4")
    if len(expression) > LONGEST:
        raise Refused(f"at most {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Refused("not an arithmetic expression") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise Refused(f"{type(node).__name__} is not allowed, only numbers, + - * / // % ** and brackets")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float):
            raise Refused(f"{node.value!r} is not a number")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _small(node.right):
            raise Refused(f"exponents must be whole numbers up to {LARGEST_EXPONENT}")


def _small(exponent: ast.expr) -> bool:
    """True for a literal exponent, with sign or without, that cannot make a huge number by itself."""
    inner = exponent.operand if isinstance(exponent, ast.UnaryOp) else exponent
    return isinstance(inner, ast.Constant) and type(inner.value) is int and inner.value <= LARGEST_EXPONENT


def run(expression: str) -> str:
    """The value of a checked expression, worked out in a process of its own."""
    limits = (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, 0),  # no byte into any file
        (resource.RLIMIT_NOFILE, 3),  # stdin, stdout, stderr: no file, no socket
        (resource.RLIMIT_NPROC, 0),  # no children (not for root)
        (resource.RLIMIT_CORE, 0),
    )
    code = _CHILD.format(limits=[(int(kind), most) for kind, most in limits], digits=DIGITS)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code, expression],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS + 3, env={}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "error: took too long"
    if done.returncode != 0:
        return "error: took too long or too much memory"
    return done.stdout if len(done.stdout) <= DIGITS else f"error: more than {DIGITS} digits"


if __name__ == "__main__":
    print(calculator(" ".join(sys.argv[1:])))
