"""Puts every value of values.py in the place of every argument of calls.py, and prints what came of it, a line each.

A line is printed before each call, too, for a parent that wants to know in which one this process ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch

from moecomm.errors import MoecommError
from tests.arguments import calls
from tests.arguments.values import bad

_MOST_BYTES = 64 << 30  # of address space: what asks for more is told so


def outcome(call: calls.Call, **changed: Any) -> str:
    """ "accepted", "named", or the error that is not moecomm's."""
    try:
        call(**changed)
    except MoecommError:
        return "named"
    except Exception as error:  # noqa: BLE001 - that is what is looked for
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return "accepted"


def say(*words: str) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())


def main(table: dict[str, list[calls.Call]]) -> None:
    """Also after each argument whether the right one still does."""
    for name, some in table.items():
        for call in some:
            say(name, "", "right", "accepted" if (found := outcome(call)) == "accepted" else found)
            for argument, good in call.arguments.items():
                for value_name, value in bad(good):
                    say(name, argument, value_name)
                    say(name, argument, value_name, outcome(call, **{argument: value}))
                say(name, argument, "right, afterwards", outcome(call))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main({"moecomm": calls.of_moecomm, "compat": calls.of_compat}[sys.argv[1]]())
    os._exit(0)
