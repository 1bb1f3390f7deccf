"""Writes fields of structs and values of enumerations, as macros that apply another one to each name.

    #define FIELDS_DispatchArgs(X) X(ctx) X(route) X(x) ...
    #define HEADER_DispatchArgs "csrc/protocol/args.h"
    #define KERNEL_STRUCTS(X) X(LeaveArgs) X(QuiesceArgs) X(PaddingArgs) ...

setup.py runs it before it compiles the bindings, which make Python's classes, tables of offsets and docstrings of them.
A struct is thus written once, in its header.  structs.cpp asserts that no field is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

HEADERS = (
    *("protocol/args.h", "protocol/layout.h", "protocol/record.h", "device/between_rounds_args.h"),
    *("elementwise/args.h", "window/window.h", "window/call_args.h", "gemm/tiles.h", "gemm/args.h"),
    *("fused/layer_args.h", "overlap/args.h"),
)
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"^struct (?:alignas\(\d+\) )?(\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELDS = re.compile(r"^ {4}(\w+) (\w+(?:\[[^\]]+\])?(?:, \w+)*);", re.MULTILINE)  # bodies of methods are further in
_ENUM = re.compile(r"^enum class (\w+) : \w+ \{(.*?)\};", re.MULTILINE | re.DOTALL)


def write(csrc: Path, into: Path) -> None:
    """Write the macros of all headers to a file."""
    lines = ["// Written by csrc/bindings/fields.py.", "#pragma once"]
    structs: list[str] = []  # of kernels
    types: set[str] = set()  # of the fields of their arguments

    def define(name: str, members: Iterable[str], header: str) -> None:
        lines.append(f"#define FIELDS_{name}(X) {' '.join(f'X({member})' for member in members)}")
        lines.append(f'#define HEADER_{name} "csrc/{header}"')

    for header in HEADERS:
        text = _COMMENT.sub("", (csrc / header).read_text())
        for name, body in _ENUM.findall(text):
            define(name, re.findall(r"(\w+) = \d+", body), header)
        for name, body in _STRUCT.findall(text):
            groups = _FIELDS.findall(body)
            define(name, (one.partition("[")[0] for _, group in groups for one in group.split(", ")), header)
            if not header.startswith("protocol/"):
                structs.append(name)
                types.update(kind for kind, _ in groups if name.endswith("Args"))
    kernel = [name for name in structs if name.endswith("Args") or name in types]
    lines.append(f"#define KERNEL_STRUCTS(X) {' '.join(f'X({name})' for name in kernel)}")
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text("\n".join(lines) + "\n")
