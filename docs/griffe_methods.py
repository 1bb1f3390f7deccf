"""Extension of griffe: methods that a class takes from another module (`moe = layer.moe`) are documented as methods."""

from __future__ import annotations

import copy
from typing import Any

import griffe


class Methods(griffe.Extension):
    """Replace such attributes of Buffer by the functions that they name."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Read what was loaded statically; nothing is imported."""
        buffer = pkg["Buffer"].final_target
        for name, attribute in list(buffer.attributes.items()):
            path = getattr(attribute.value, "canonical_path", None)
            if path is None or not path.startswith(f"{pkg.name}."):
                continue
            found = pkg[path.removeprefix(f"{pkg.name}.")]
            if found.is_function:
                method = copy.copy(found.final_target if found.is_alias else found)
                method.name = name
                buffer.set_member(name, method)
