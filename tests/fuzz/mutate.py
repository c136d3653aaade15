"""Damage bytes, JSON, texts and values, each by draws of one `random.Random`."""

import copy
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 64, 97, 255, 256, 1000, 1025, 65537, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(2**63 - 1, 2**63, -(2**31), -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, 1e-9, 1e9, 1e308),
    *(5e-324, math.nan, math.inf, -math.inf),
]
TEXTS = [
    *(
        "",
        " ",
        "x",
        "the cat",
        "0",
        "-1",
        "1.5",
        "nan",
        "inf",
        "true",
        "none",
        "null",
        "../..",
        "/",
    ),
    *(
        "\x00",
        "\n",
        "a\nb",
        "\ud800",
        "é€\U0001f600",
        "%s%n",
        "{}",
        "{0.__class__}",
        "${HOME}",
        "~",
    ),
    *("a" * 5000, "9" * 5000, "<|end|>", "\u202eabc", "\x1b[31m", "x.py", "x.json", "1x2", "a1+m1"),
]
PLAIN: list[Any] = [
    *(None, True, False, [], {}, [None], [[]], [1], ["x"], {"x": 1}, [1, "x"], [0.5], [True], [-1]),
]
OBJECTS: list[Any] = [
    *(b"", b"x", (), (1, 2), {1}, frozenset({"x"}), object(), Ellipsis, print, int, lambda: 1, 1j),
    *(Fraction(1, 3), Decimal("1.5"), Path("x"), range(3), np.int64(3), np.float32(0.5),
    np.bool_(1)),
    *(np.array([1, 2]), np.array(3), np.array([[1]]), np.array([1.5]), np.array(["x"]),
    np.array([])),
    *(torch.tensor([1, 2]), torch.tensor(3), torch.zeros(0), torch.tensor([[1]]),
    torch.tensor(0.5)),
    *([np.int64(5), 6], [np.array([1])], [b"x"], [[1.5]], [2**70], {"role": "user"},
      [{"role": "user"}]),
    *([{"role": "user", "content": "hi"}], [{"role": 1, "content": None}], memoryview(b"x"),
    "x" * 10**6),
]  # fmt: skip


def draw_json_value(rng: Random) -> Any:
    """A value that JSON can hold, rarely a sensible one."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.randrange(-5, 400)
    if kind == 6:
        return nest(rng.choice([1, 5, 50]))
    return copy.deepcopy(rng.choice(PLAIN))


def draw_value(rng: Random) -> Any:
    """A value of any type."""
    return rng.choice(OBJECTS) if rng.random() < 0.5 else draw_json_value(rng)


def nest(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def damage_json(rng: Random, value: Any) -> Any:
    """A copy with one to three places replaced, removed, doubled, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 2, 3])):
        inner, key = _draw_place(rng, value)
        if inner is None:
            return draw_json_value(rng)
        change = rng.randrange(6)
        if change == 0:
            del inner[key]
        elif change == 1 and isinstance(inner, dict):
            inner[rng.choice([*inner, *TEXTS])] = inner.pop(key)
        elif change == 1:
            inner.insert(key, copy.deepcopy(rng.choice(inner)))
        elif change == 2:
            inner[key] = copy.deepcopy(
                rng.choice([*inner.values()] if isinstance(inner, dict) else inner)
            )
        elif change == 3 and isinstance(inner[key], str):
            inner[key] = damage_text(rng, inner[key])
        elif change == 3 and isinstance(inner[key], (int, float)):
            inner[key] = rng.choice([-inner[key], inner[key] * 2, inner[key] + 1, inner[key] // 2])
        else:
            inner[key] = draw_json_value(rng)
    return value


def _draw_place(rng: Random, value: Any) -> tuple[Any, Any]:
    """A container in `value` and a key of it; (None, None) if there is none."""
    inner, key = None, None
    while isinstance(value, (dict, list)) and value:
        inner, key = (
            value,
            rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value)),
        )
        value = inner[key]
        if rng.random() < 0.3:
            break
    return inner, key


def damage_text(rng: Random, text: str) -> str:
    """A text with one to three pieces removed, doubled, moved or replaced."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        first = rng.randrange(len(text) + 1)
        last = min(len(text), first + rng.choice([0, 1, 1, 2, 5, 20, 200]))
        piece = text[first:last]
        new = rng.choice(
            ["", piece * 2, piece[::-1], rng.choice(TEXTS), chr(rng.randrange(1, 0x2FF))]
        )
        text = text[:first] + new + text[last:]
    return text


def damage_bytes(rng: Random, data: bytes, within: int) -> bytes:
    """Return data with bytes changed among the first `within`, cut short, or with a piece taken out
    or put in.
    """
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(min(within, len(changed)))
        change = rng.randrange(6)
        if change < 2:
            changed[at] ^= 1 << rng.randrange(8)
        elif change == 2:
            changed[at] = rng.choice([0, 1, 127, 128, 255])
        elif change == 3:
            size = rng.choice([4, 8])
            number = rng.choice(
                [0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data), rng.randrange(2**20)]
            )
            changed[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        elif change == 4:
            del changed[at : at + rng.choice([1, 4, 100])]
        else:
            changed[at:at] = rng.randbytes(rng.choice([1, 4, 100]))
        if not changed:
            return b""
    return bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.1 else changed)


def dump_json(value: Any, rng: Random) -> bytes:
    """JSON as bytes; now and then damaged as bytes too, or with half a character in it."""
    data = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return damage_bytes(rng, data, len(data)) if rng.random() < 0.1 else data
