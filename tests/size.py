"""The size of the code, room by room, beside `.ci/budget.json`, whose numbers only fall.

`python -m tests.size` prints what each room has and what it may have; `python -m tests.size lower` lowers the budget.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGET = ROOT / ".ci" / "budget.json"
FOLDERS = ("bench", "csrc", "examples", "moecomm", "moecomm_bench", "rma_plugin", "tests")
ROOMS = ("csrc", "moecomm")  # folders whose own folders have numbers, too
C_SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
PACKAGES = ("moecomm", "moecomm_bench")  # whose functions are counted
MANY_PARAMETERS = 9
EMPTY_NAMES = frozenset(("found", "given", "about", "one", "at", "of", "here", "made", "how"))

_C_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\w+|[^\s\w]', re.DOTALL)
# A string of three quotes that begins a line is a docstring.
_PYTHON_TOKEN = re.compile(
    r'#[^\n]*|^ *r?"""(?:\\.|[^\\])*?"""|'
    r'[a-z]*(?:"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|'
    r"\d[\w.]*|\w+|->|\*\*|[-+*/%&|^=!<>:]=|[^\s\w]",
    re.DOTALL | re.MULTILINE,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def tokens_of_c(text: str) -> int:
    """Count tokens without comments."""
    return sum(not token.startswith(("//", "/*")) for token in _C_TOKEN.findall(text))


def tokens_of_python(text: str) -> int:
    """Count tokens without comments, docstrings and line ends."""
    return sum(not token.lstrip(" r").startswith(("#", '"""')) for token in _PYTHON_TOKEN.findall(text))


def functions(text: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the number of parameters of each function, and the names that it binds itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _FUNCTIONS):
            parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = (name for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store))
            yield len(parameters), {name.id for name in names}


def sizes() -> dict[str, int]:
    """Count tokens by room, and in PACKAGES functions of many parameters and functions that bind an empty name."""
    counts: Counter[str] = Counter()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix not in (".py", *C_SUFFIXES) or "build" in path.relative_to(ROOT).parts:
            continue
        folder, *inner = path.relative_to(ROOT).parent.parts
        text = path.read_text()
        tokens = tokens_of_python(text) if path.suffix == ".py" else tokens_of_c(text)
        for room in (folder, f"{folder}/{inner[0]}") if folder in ROOMS and inner else (folder,):
            counts[room] += tokens
        if folder in PACKAGES and path.suffix == ".py":
            for parameters, bound in functions(text):
                counts[f"functions of {MANY_PARAMETERS} parameters or more"] += parameters >= MANY_PARAMETERS
                counts["functions that bind an empty name"] += not EMPTY_NAMES.isdisjoint(bound)
    return dict(sorted(counts.items()))


def main(words: list[str]) -> None:
    """Print the sizes beside the budget, or lower the budget."""
    now, budget = sizes(), json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    for name, size in now.items():
        print(f"{size:9,} of {budget.get(name, size):9,}  {name}")
    if words == ["lower"]:
        lowered = {name: min(size, budget.get(name, size)) for name, size in now.items()}
        BUDGET.write_text(json.dumps(lowered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
