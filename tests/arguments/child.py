"""child.py PART [CASES SEED]: puts values of values.py in the place of arguments of calls.py, and prints the outcome.

It puts every value in the place of every argument; with CASES, so many times some in the place of several, as a seed
draws.  A line is printed before each call, too, for a parent that wants to know in which one this process ended.
"""

from __future__ import annotations

import json
import os
import random
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

MOST_AT_A_TIME, RIGHT_EVERY = 4, 10
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


def some_of_several(table: dict[str, list[calls.Call]], cases: int, seed: int) -> None:
    """Also whether the right ones still do, after some calls."""
    draw = random.Random(seed)
    all_calls = [(name, call) for name, some in table.items() for call in some if len(call.arguments) > 1]
    values: dict[int, dict[str, list[tuple[str, Any]]]] = {}
    for case in range(cases):
        at = draw.randrange(len(all_calls))
        name, call = all_calls[at]
        if at not in values:
            values[at] = {argument: list(bad(good)) for argument, good in call.arguments.items()}
        arguments = draw.sample(sorted(call.arguments), draw.randint(2, min(MOST_AT_A_TIME, len(call.arguments))))
        changed = {argument: draw.choice(values[at][argument]) for argument in arguments}
        words = (", ".join(arguments), ", ".join(value_name for value_name, _ in changed.values()))
        say(name, *words)
        say(name, *words, outcome(call, **{argument: value for argument, (_, value) in changed.items()}))
        if case % RIGHT_EVERY == 0:
            say(name, "", "right, afterwards", outcome(call))


def every_one(table: dict[str, list[calls.Call]]) -> None:
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
    part, *random_cases = sys.argv[1:]
    of_part = {"moecomm": calls.of_moecomm, "compat": calls.of_compat}[part]()
    some_of_several(of_part, *map(int, random_cases)) if random_cases else every_one(of_part)
    os._exit(0)
