"""Writes fields of structs and values of enumerations, as macros that apply another one to each name.

    #define FIELDS_DispatchArgs(X) X(ctx) X(route) X(x) ...
    #define HEADER_DispatchArgs "csrc/protocol/args.h"

setup.py runs it before it compiles the bindings, which make Python's classes, tables of offsets and docstrings of them.
A struct is thus written once, in its header.  structs.cpp asserts that no field is missing.
"""

from __future__ import annotations

import re
from pathlib import Path

HEADERS = (
    *("protocol/args.h", "protocol/layout.h", "protocol/record.h", "device/between_rounds_args.h"),
    *("elementwise/args.h", "elementwise/copy_rows_args.h", "window/window.h", "window/call_args.h"),
    *("gemm/tiles.h", "gemm/args.h", "fused/layer_args.h", "overlap/args.h"),
)
_COMMENT = re.compile(r"//[^\n]*")
_STRUCT = re.compile(r"^struct (?:alignas\(\d+\) )?(\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^ {4}\w+ (\w+(?:\[[^\]]+\])?(?:, \w+)*);", re.MULTILINE)  # bodies of methods are further in
_ENUM = re.compile(r"^enum class (\w+) : \w+ \{(.*?)\};", re.MULTILINE | re.DOTALL)


def names(header: str) -> dict[str, list[str]]:
    """Return the fields of each struct of a header, and the values of each enumeration."""
    text = _COMMENT.sub("", header)
    found = {name: re.findall(r"(\w+) = \d+", body) for name, body in _ENUM.findall(text)}
    for name, body in _STRUCT.findall(text):
        found[name] = [one.partition("[")[0] for group in _FIELD.findall(body) for one in group.split(", ")]
    return found


def write(csrc: Path, into: Path) -> None:
    """Write the macros of all headers to a file."""
    lines = ["// Written by csrc/bindings/fields.py.\n#pragma once\n"]
    for header in HEADERS:
        for name, fields in names((csrc / header).read_text()).items():
            lines.append(f"#define FIELDS_{name}(X) {' '.join(f'X({field})' for field in fields)}\n")
            lines.append(f'#define HEADER_{name} "csrc/{header}"\n')
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text("".join(lines))
