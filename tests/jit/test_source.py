"""The text of a kernel is made of numbers and of names that moecomm has."""

from __future__ import annotations

import random
import re
from dataclasses import fields

import pytest

from moecomm.gpu import jit

from ..few import few

GIVEN = {"ranks": 2, "experts": 4, "topk": 2, "hidden": 64, "layout": 0, "type": 0, "row_bytes": 128, "wire": 0}
NAMES = ("op", "transport", "format")
NUMBERS = [field.name for field in fields(jit.KernelSpec) if field.name not in NAMES]
ALPHABET = "0123456789aeflnrstu_ {}();,=.<>:\"'\\/#*&\n\t\0"


def hostile(draw: random.Random) -> str:
    """A number and what may follow it, or any text."""
    text = "".join(draw.choices(ALPHABET, k=draw.randrange(12)))
    return draw.choice(["", "0", "1", "8", "true"]) + text


@pytest.mark.parametrize("strings", few((10_000, 100_000), 10_000))
def test_text_is_no_field(strings: int) -> None:
    draw = random.Random(0)
    for number in range(strings):
        name, op = NUMBERS[number % len(NUMBERS)], ("dispatch", "combine")[number % 2]
        with pytest.raises(ValueError, match=f"{name}="):
            jit.KernelSpec(**{**GIVEN, "op": op, name: hostile(draw)})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_other_names_are_refused(name: str) -> None:
    draw = random.Random(0)
    for _ in range(1000):
        with pytest.raises(ValueError, match=f"{name}="):
            jit.KernelSpec(**{**GIVEN, "op": "combine", name: hostile(draw)})  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_configuration_is_words_and_numbers(op: str) -> None:
    source = jit.source(jit.KernelSpec(**{**GIVEN, "op": op}))  # type: ignore[arg-type]
    config = re.search(r"^constexpr \w+Config config\{(.*)\};$", source, re.MULTILINE)
    assert config is not None
    wrong = [field for field in config[1].split(", ") if not re.fullmatch(r"\.\w+ = [A-Za-z0-9_]+(::\w+)?", field)]
    assert wrong == []
