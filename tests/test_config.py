"""Variables of the environment: a name or a value that moecomm does not know is an error that names it."""

from __future__ import annotations

import random

import pytest

import moecomm
from moecomm import config

WITH_VALUES = {name: allowed for name, allowed in config._KNOWN.items() if allowed is not None}
BAD = ("", " ", "0x1", "-1", "yes", "None", "/usr/bin/cc", "../x", "a b", "$(id)", "`id`", "x;y", "é", "\n", "9" * 400)
# Programs, libraries, flags and folders to include: moecomm takes none of them from the environment.
UNKNOWN = ("NVCC", "CXX", "CC", "PLUGIN", "LIBRARY_PATH", "INCLUDE", "FLAGS", "COMPILER", "CACHE", "BACKENDS", "DEBUG")


@pytest.mark.parametrize("name", WITH_VALUES)
def test_values_that_a_variable_cannot_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = WITH_VALUES[name]
    assert allowed is not None
    for value in (*BAD, allowed[0].upper() + "x", f"{allowed[0]} ", f"{allowed[0]},{allowed[-1]}"):
        monkeypatch.setenv(name, value)
        with pytest.raises(moecomm.BadInput) as caught:
            config.check_environment()
        assert (caught.value.argument, caught.value.got) == (name, repr(value))
        assert all(one in str(caught.value.want) for one in allowed)
    for value in allowed:
        monkeypatch.setenv(name, value)
        config.check_environment()


def test_variables_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    random_names = ["".join(draw.choices("ABCDEFGHIJ_", k=8)) for _ in range(50)]
    for name in (*(f"MOECOMM_{name}" for name in (*UNKNOWN, *random_names)), "MOECOMM_", "MOECOMM_backend"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            with pytest.raises(moecomm.BadInput, match="no such variable") as caught:
                config.check_environment()
            assert caught.value.argument == name
            with pytest.raises(moecomm.BadInput, match="no such variable"):
                moecomm.Buffer(hidden=64, num_experts=4, topk=2, max_tokens=8)


def test_words_that_are_no_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "-1", "1.5", "two", "0x2"):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(moecomm.BadInput, match="WORLD_SIZE"):
            config.launched_ranks()
