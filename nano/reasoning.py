"""Write out arithmetic for the reasoning of training examples, in steps of one digit.

A calculation becomes a headline (`apples left: 403 - 158`), lines of digit work and a result line
(`= 245`).
"""

from __future__ import annotations

from collections.abc import Sequence

from nano.suites.arithmetic import Step

LABELS = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions")
ORDER_WORDS = ("First", "Then", "Last")


def explain(steps: Sequence[Step]) -> str:
    """Return the reasoning for a whole problem, one block per step."""
    blocks: list[str] = []
    for index, step in enumerate(steps):
        headline = f"{step.left} {'-' if step.operator == '~' else step.operator} {step.right}"
        if step.operator == "~":
            large, small = max(step.left, step.right), min(step.left, step.right)
            headline = f"{step.left} or {step.right}, {large} is larger: {large} - {small}"
        if step.meaning:
            headline = f"{step.meaning}: {headline}"
        if len(steps) > 1:
            headline = f"{ORDER_WORDS[min(index, 1) if index < len(steps) - 1 else 2]} {headline}"
        blocks.append("\n".join([headline, *work(step), f"= {step.result}"]))
    return "\n".join(blocks)


def work(step: Step) -> list[str]:
    """Return the lines between headline and result. A one-digit fact needs no lines."""
    left, right = step.left, step.right
    match step.operator:
        case "+":
            return [] if max(left, right) < 10 else [addition(left, right)]
        case "-":
            return [] if left < 10 else [subtraction(left, right)]
        case "~":
            return (
                [] if max(left, right) < 10 else [subtraction(max(left, right), min(left, right))]
            )
        case "*":
            return [] if max(left, right) < 10 else multiplication(left, right)
        case "/":
            return [division(left, right)]
        case _:
            raise ValueError(f"unknown operator {step.operator!r}")


def _digits(number: int, count: int) -> list[int]:
    """Return the lowest `count` decimal digits, ones first."""
    return [number // 10**place % 10 for place in range(count)]


def addition(left: int, right: int) -> str:
    """Write `347, 586 -> ones 7+6=13, tens 4+8+1=13, hundreds 3+5+1=9`."""
    count = len(str(max(left, right)))
    carry = 0
    parts: list[str] = []
    for label, a, b in zip(LABELS, _digits(left, count), _digits(right, count), strict=False):
        total = a + b + carry
        parts.append(
            f"{label} {a}+{b}={total}" if label == "ones" else f"{label} {a}+{b}+{carry}={total}"
        )
        carry = total // 10
    return ", ".join(parts)


def subtraction(left: int, right: int) -> str:
    """Write `403, 158 -> ones 13-8=5, tens 10-5-1=4, hundreds 4-1-1=2`.

    A borrow shows as ten more on the left.
    """
    count = len(str(left))
    borrow = 0
    parts: list[str] = []
    for label, a, b in zip(LABELS, _digits(left, count), _digits(right, count), strict=False):
        owed = borrow
        borrow = int(a < b + owed)
        top = a + 10 * borrow
        parts.append(
            f"{label} {top}-{b}={top - b}"
            if label == "ones"
            else f"{label} {top}-{b}-{owed}={top - b - owed}"
        )
    return ", ".join(parts)


def times_digit(number: int, digit: int) -> str:
    """Write `347, 6 -> ones 7*6=42, tens 4*6=24+4=28, hundreds 3*6=18+2=20`."""
    carry = 0
    parts: list[str] = []
    for label, a in zip(LABELS, _digits(number, len(str(number))), strict=False):
        product = a * digit
        total = product + carry
        parts.append(
            f"{label} {a}*{digit}={product}"
            if label == "ones"
            else f"{label} {a}*{digit}={product}+{carry}={total}"
        )
        carry = total // 10
    return ", ".join(parts)


def multiplication(left: int, right: int) -> list[str]:
    """Return partial products by the digits of the shorter factor, then their sum."""
    number, factor = (left, right) if len(str(left)) >= len(str(right)) else (right, left)
    if factor < 10:
        return [times_digit(number, factor)]
    lines: list[str] = []
    sums: list[int] = []
    for place, digit in enumerate(_digits(factor, len(str(factor)))):
        if not digit:
            continue
        product, zeros = number * digit, "0" * place
        shifted = f", {product}{zeros}" if zeros else ""
        lines.append(
            f"{number} * {digit}{zeros}: {times_digit(number, digit)} = {product}{shifted}"
        )
        sums.append(product * 10**place)
    total = sums[0]
    for index, part in enumerate(sums[1:], start=2):
        # The last sum is the result line.
        result = f" = {total + part}" if index < len(sums) else ""
        lines.append(f"{total} + {part}: {addition(total, part)}{result}")
        total += part
    return lines


def division(left: int, right: int) -> str:
    """Write a long division: `834, 6 -> 8/6=1 left 2, 23/6=3 left 5, 54/6=9 left 0`."""
    rest = 0
    parts: list[str] = []
    for digit in str(left):
        chunk = rest * 10 + int(digit)
        rest = chunk % right
        parts.append(f"{chunk}/{right}={chunk // right} left {rest}")
    return ", ".join(parts)
