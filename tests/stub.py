"""Generate moecomm/_native.pyi, the stub of the native module, from the module itself.

    python -m tests.stub write
    python -m tests.stub check

pybind11-stubgen (extra `test`) reads signatures and docstrings; here the text is made short and neutral to versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from moecomm import _native

STUB = Path(__file__).parents[1] / "moecomm" / "_native.pyi"


def generated() -> str:
    """The text of the stub for the module that is installed."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "pybind11_stubgen", "moecomm._native", "--output-dir", out]
        # In a folder without a moecomm of its own: the one that is installed has a native module.
        subprocess.run([*command, "--exit-code"], check=True, capture_output=True, text=True, cwd=out)
        text = (Path(out) / "moecomm" / "_native.pyi").read_text()
    # The module converts numbers strictly enough that callers should pass what comes back.
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    text = text.replace("typing.SupportsFloat | typing.SupportsIndex", "float")
    text = re.sub(r"__all__: list\[str\] = \[.*?\]\n", "", text, flags=re.DOTALL)
    # A readable and writable property is an attribute.
    getter = r'    @property\n    def (\w+)\(self\) -> ([^\n]+):\n        (\.\.\.|"""(?:(?!""").)*""")\n'
    setter = r"    @\1\.setter\n    def \1\(self, [^\n]+\) -> None:\n        \.\.\.\n"
    text = re.sub(getter + setter, attribute, text, flags=re.DOTALL)
    constant = r"    @property\n    def (\w+)\(self\) -> (\w+):\n        \.\.\.\n"
    text = re.sub(constant, r"    \1: typing.Final[\2]\n", text)
    text = re.sub(r":\n +\.\.\.\n", ": ...\n", text)
    # A type of Python's C interface, whose constructor has no signature that a program can read.
    made = "(self, owner: typing.Any, rounds: int, note: object = None, outer: bool = False, /) -> None: ..."
    new = r"(?:    @staticmethod\n    def __new__\(type, \*args, \*\*kwargs\):\n {8}\"\"\"[^\"]*\"\"\"\n)?"
    text = re.sub(rf"(?ms)(^class Call:\n.*?){new}(    def __enter__)", rf"\1    def __init__{made}\n\2", text)
    text = re.sub(r'(:\n +)"""\n +([^\n"]+)\n +"""', r'\1"""\2"""', text)  # docstrings of a line
    text = re.sub(r"(?:    @classmethod\n)?    def __(?:new|format)__\(\w+, [a-z_]+\): \.\.\.\n", "", text)  # of enums
    text = re.sub(r"^class (\w+)\(enum\.IntEnum\):\n(.*?)(?=^\w)", enumeration, text, flags=re.DOTALL | re.MULTILINE)
    for command in (["check", "--fix-only", "--quiet"], ["format"]):
        tidy = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(tidy, check=True, capture_output=True, text=True, input=text).stdout
    return text


def attribute(found: re.Match[str]) -> str:
    """`name: type`, with the docstring if there is one."""
    name, kind, doc = found.groups()
    return f"    {name}: {kind}\n" + ("" if doc == "..." else f"    {doc}\n")


def enumeration(found: re.Match[str]) -> str:
    """An enumeration with its values, in their order."""
    name, body = found.groups()
    members = "".join(f"    {member.name} = {member.value}\n" for member in getattr(_native, name))
    doc = "".join(line for line in body.splitlines(keepends=True) if "ClassVar" not in line)
    return f"class {name}(enum.IntEnum):\n{doc.rstrip()}\n{members}\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        STUB.write_text(generated())
    elif sys.argv[1:] != ["check"]:
        sys.exit(__doc__)
    elif STUB.read_text() != generated():
        sys.exit(f"{STUB} is not that of the module: python -m tests.stub write")
