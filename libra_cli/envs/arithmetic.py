"""Evaluates arithmetic expressions exactly, and never as Python.

An expression may only hold numbers, operators and the functions below. ``ast`` parses it, and its
nodes are computed with exact fractions; the interpreter evaluates nothing of it. The length of an
expression and the bits of every value are bounded, for powers *before* they are computed, so that
``9**9**9`` is an error at once and no expression takes longer than a few milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from libra_cli.envs.protocol import ToolFailed

LONGEST_EXPRESSION = 300
LARGEST_BITS = 2_048
"""The most bits of a value's numerator and of its denominator; about 600 digits."""
_DIGITS = 12

# A number, and no letter or second point glued to it; or a name; or an operator.
_ALLOWED = re.compile(
    r"(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?(?![\w.])|[a-z]+(?!\w)|[-+*/%(),]|\s)*"
)
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression.

    Raises:
        ToolFailed: it cannot be evaluated; the message tells the model why.
    """
    text = expression.translate(_SPELLINGS).replace("^", "**").replace("$", "").strip()
    if len(text) > LONGEST_EXPRESSION:
        raise ToolFailed(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    if not text.isascii() or not _ALLOWED.fullmatch(text):
        raise ToolFailed("only numbers, + - * / // % ** ( ) and functions are understood")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolFailed("this is not an arithmetic expression") from error
    return _value(tree.body)


def shown(value: Fraction) -> str:
    """Write a value: an integer in full, any other to twelve significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{_DIGITS}g}"
    except OverflowError:
        return str(value.numerator // value.denominator)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _literal(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(type(op), _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return _call(name, [_value(argument) for argument in arguments])
        case _:
            raise ToolFailed(_complaint(node))


def _complaint(node: ast.expr) -> str:
    if isinstance(node, ast.Tuple):
        return "a comma: write 1000, not 1,000"
    if isinstance(node, ast.Call):
        return "write the * of a multiplication: 3*(4), not 3(4)"
    if isinstance(node, ast.Name):
        return f"{node.id!r} is not a number"
    return "this is not an arithmetic expression"


def _literal(number: float) -> Fraction:
    # Through its text, so that 0.1 is a tenth and not the nearest binary fraction.
    text = repr(number)
    if text == "inf":
        raise ToolFailed("the number is too large")
    return _bounded(Fraction(text))


def _binary(kind: type[ast.operator], left: Fraction, right: Fraction) -> Fraction:
    if kind is ast.Pow:
        return _power(left, right)
    if kind not in _OPERATORS:
        raise ToolFailed("only + - * / // % ** are understood")
    if right == 0 and kind in (ast.Div, ast.FloorDiv, ast.Mod):
        raise ToolFailed("division by zero")
    return _bounded(Fraction(_OPERATORS[kind](left, right)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base == 0 and exponent < 0:
        raise ToolFailed("division by zero")
    if exponent.denominator != 1:
        return _root(base, exponent)
    if base in (0, 1, -1):
        return base ** (exponent.numerator % 2 + 2 * (exponent != 0))
    if _bits(base) * abs(exponent) > LARGEST_BITS:
        raise ToolFailed("the result is too large")
    return _bounded(base**exponent.numerator)


def _root(base: Fraction, exponent: Fraction) -> Fraction:
    if base < 0:
        raise ToolFailed("a root of a negative number")
    try:
        approximate = float(base) ** float(exponent)
    except (OverflowError, ZeroDivisionError) as error:  # a tiny base is 0.0 as a float
        raise ToolFailed("the result is too large") from error
    # 9 ** 0.5 is 3 and not 3.0000000000000004; 2 ** 0.5 has no exact value.
    near = Fraction(approximate).limit_denominator(10**6)
    degree = 1 / exponent
    if degree.denominator == 1 and abs(degree) <= 16 and near and near**degree.numerator == base:
        return near
    return Fraction(f"{approximate:.{_DIGITS + 3}g}")


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > LARGEST_BITS:
        raise ToolFailed("the result is too large")
    return value


def _call(name: str, arguments: Sequence[Fraction]) -> Fraction:
    if name not in FUNCTIONS:
        raise ToolFailed(f"there is no function {name!r}; there are {', '.join(sorted(FUNCTIONS))}")
    most, apply = FUNCTIONS[name]
    if not 1 <= len(arguments) <= most:
        raise ToolFailed(f"{name} does not take {len(arguments)} arguments")
    return _bounded(apply(*arguments))


def _round(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if digits.denominator != 1 or abs(digits) > _DIGITS:
        raise ToolFailed(f"round takes at most {_DIGITS} digits")
    # Halves go away from zero, as taught at school; Python's round would send them to even.
    scale = Fraction(10) ** digits.numerator
    magnitude = Fraction(math.floor(abs(value) * scale + Fraction(1, 2))) / scale
    return magnitude if value >= 0 else -magnitude


_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: Mapping[str, tuple[int, Callable[..., Fraction]]] = {
    "abs": (1, abs),
    "ceil": (1, lambda value: Fraction(math.ceil(value))),
    "floor": (1, lambda value: Fraction(math.floor(value))),
    "max": (20, lambda *values: max(values)),
    "min": (20, lambda *values: min(values)),
    "round": (2, _round),
    "sqrt": (1, lambda value: _root(value, Fraction(1, 2))),
}
