"""Other libraries' interfaces over moecomm."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType

from moecomm.base.validation import check_flag
from moecomm.errors import Unsupported

__all__ = ["install_as_deep_ep", "install_as_nixl_ep"]


def install_as_deep_ep(*, replace: bool = False) -> ModuleType:
    """Make `import deep_ep`, `deep_ep.buffer` and `deep_ep.utils` find moecomm.compat.deep_ep, in this process.

    Call it before the frameworks that import deep_ep.  Idempotent.

    Args:
        replace: also where a deep_ep is installed; what has imported that one already keeps it.

    Raises:
        Unsupported: there is another deep_ep, and `replace` was not asked for.
    """
    from moecomm.compat import deep_ep

    return _install_as("deep_ep", deep_ep, deep_ep.MODULES, replace)


def install_as_nixl_ep(*, replace: bool = False) -> ModuleType:
    """Make `import nixl_ep` and `nixl_ep.buffer` find moecomm.compat.nixl_ep, as install_as_deep_ep does for deep_ep.

    Raises:
        Unsupported: there is another nixl_ep, and `replace` was not asked for.
    """
    from moecomm.compat import nixl_ep

    return _install_as("nixl_ep", nixl_ep, nixl_ep.MODULES, replace)


def _install_as(name: str, module: ModuleType, below: Mapping[str, ModuleType], replace: bool) -> ModuleType:
    check_flag("replace", replace)
    if sys.modules.get(name) is module:
        return module
    if not replace and (name in sys.modules or importlib.util.find_spec(name) is not None):
        raise Unsupported(f"install_as_{name}: there is another {name} here; pass replace=True to put moecomm over it")
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(f"{name}.")]:
        del sys.modules[loaded]
    sys.modules[name] = module
    for path, part in below.items():
        sys.modules[f"{name}.{path}"] = part
    return module
