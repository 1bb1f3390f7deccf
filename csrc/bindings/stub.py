"""Writes moecomm/_native.pyi, the types of the native module, for type checkers and editors.

    python csrc/bindings/stub.py MODULE STUB

pybind11 puts signatures at the head of docstrings; here they become a stub.  setup.py runs this in a process of its own
after it has built the module, which is loaded without moecomm: that wants torch.
"""

from __future__ import annotations

import enum
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HEAD = "import collections.abc\nimport enum\nimport typing\n\nimport torch\nimport typing_extensions\n"
SHORTER = {
    r"moecomm\._native\.": "",
    r"\bobject\b": "typing.Any",
    # The module converts numbers strictly enough that callers should pass what comes back.
    r"typing\.SupportsInt(?: \| typing\.SupportsIndex)?": "int",
    r"typing\.SupportsFloat(?: \| typing\.SupportsIndex)?": "float",
}
# A type of Python's C interface, whose constructor has no signature that a program can read.
OTHER = {"Call": "(self, owner: typing.Any, rounds: int, note: object = None, outer: bool = False, /) -> None"}
_SIGNATURE = re.compile(r"^(?:\d+\. )?\w*(\(.*\) -> .+)$", re.MULTILINE)


def stub(module: ModuleType) -> str:
    """Return the text of the stub."""
    lines = [f'"""{module.__doc__}"""', HEAD]
    for name, member in vars(module).items():
        if not name.startswith("__"):
            lines += [*(_class(member) if isinstance(member, type) else _function(name, member.__doc__)), ""]
    return "\n".join(lines)


def _class(kind: type) -> Iterator[str]:
    numbers = issubclass(kind, enum.IntEnum)
    own = [base.__name__ for base in kind.__bases__ if base.__module__ == kind.__module__]
    yield f"class {kind.__name__}({', '.join(['enum.IntEnum'] if numbers else own)}):"
    members = (f"{name} = {value}" for name, value in kind.__members__.items()) if numbers else _members(kind)
    yield from _indented([*_doc(kind.__doc__), *members])


def _members(kind: type) -> Iterator[str]:
    if kind.__name__ in OTHER:
        yield f"def __init__{OTHER[kind.__name__]}: ..."
    for name, member in vars(kind).items():
        if isinstance(member, property):
            returned = _shortened(member.fget.__doc__.partition("\n")[0].rpartition(" -> ")[2])
            if member.fset is None:
                yield from ("@property", *_defined(f"{name}(self) -> {returned}", member.__doc__))
            else:
                yield from (f"{name}: {returned}", *_doc(member.__doc__))
        elif isinstance(member, int):
            yield f"{name}: typing.ClassVar[int] = {member}"
        elif name not in ("__doc__", "__module__") and _SIGNATURE.search(getattr(kind, name).__doc__ or ""):
            yield from _function(name, getattr(kind, name).__doc__, isinstance(member, staticmethod))


def _function(name: str, doc: str, static: bool = False) -> Iterator[str]:
    """Yield each overload.  `doc`: signatures, without the type of `self`, each with its text below it."""
    heads = list(_SIGNATURE.finditer(doc))
    overloaded = doc.partition("\n")[2].startswith("Overloaded function.")
    heads = heads if overloaded else heads[:1]
    ends = [head.start() for head in heads[1:]] + [len(doc)]
    for head, end in zip(heads, ends, strict=True):
        yield from (["@typing.overload"] if overloaded else []) + (["@staticmethod"] if static else [])
        signature = re.sub(r"^\(self: [^,)]+", "(self", head[1])
        yield from _defined(name + _shortened(signature), doc[head.end() : end])


def _shortened(types: str) -> str:
    for long, short in SHORTER.items():
        types = re.sub(long, short, types)
    return types


def _defined(signature: str, doc: str | None) -> list[str]:
    below = _indented(_doc(doc))
    return [f"def {signature}:", *below] if below else [f"def {signature}: ..."]


def _doc(text: str | None) -> list[str]:
    text = (text or "").strip()
    return [f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'] if text else []


def _indented(lines: Iterable[str]) -> list[str]:
    return [textwrap.indent(line, "    ") for line in lines]


def load(path: Path) -> ModuleType:
    """Return the module of a file, under the name that its types have."""
    spec: Any = importlib.util.spec_from_file_location("moecomm._native", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(stub(load(Path(sys.argv[1]))), encoding="utf-8")
