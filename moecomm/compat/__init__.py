"""Other libraries' interfaces over moecomm."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from moecomm.core.validation import check_flag
from moecomm.errors import Unsupported

__all__ = ["install_as_deep_ep"]


def install_as_deep_ep(*, replace: bool = False) -> ModuleType:
    """Make `import deep_ep`, `deep_ep.buffer` and `deep_ep.utils` find moecomm.compat.deep_ep, in this process.

    Call it before the frameworks that import deep_ep.  Idempotent.

    Args:
        replace: also where a deep_ep is installed; what has imported that one already keeps it.

    Raises:
        Unsupported: there is another deep_ep, and `replace` was not asked for.
    """
    check_flag("replace", replace)
    from moecomm.compat import deep_ep

    if sys.modules.get("deep_ep") is deep_ep:
        return deep_ep
    if not replace and ("deep_ep" in sys.modules or importlib.util.find_spec("deep_ep") is not None):
        raise Unsupported("install_as_deep_ep: there is another deep_ep here; pass replace=True to put moecomm over it")
    for name in [name for name in sys.modules if name.startswith("deep_ep.")]:
        del sys.modules[name]
    sys.modules["deep_ep"] = deep_ep
    for name, module in deep_ep.MODULES.items():
        sys.modules[f"deep_ep.{name}"] = module
    return deep_ep
