"""moecomm as deep_ep: the import paths of frameworks, and never over another deep_ep unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fresh_python import run_python


def test_frameworks_find_it() -> None:
    told = run_python(
        "-c",
        """
import importlib.util, sys
import moecomm, moecomm.compat
assert "deep_ep" not in sys.modules
module = moecomm.compat.install_as_deep_ep()
assert module is moecomm.compat.install_as_deep_ep()
assert importlib.util.find_spec("deep_ep") is not None
assert importlib.util.find_spec("deep_ep.buffers").name == "deep_ep.buffers"
assert importlib.util.find_spec("deep_ep.buffers.elastic") is not None
assert importlib.util.find_spec("deep_ep.utils") is not None and importlib.util.find_spec("deep_ep.nothing") is None
import deep_ep.comm.barrier, deep_ep.utils.envs, deep_ep.hybrid_ep_buffer
from deep_ep.utils.envs import get_physical_domain_size
from deep_ep.comm.barrier import barrier
assert get_physical_domain_size("self") == (1, 1) and barrier is deep_ep.comm.barrier
offered = {name: getattr(module, name) for name in (*module.__all__, "indices_to_map")}
for path, names in module.PATHS.items():
    under = importlib.import_module(f"deep_ep.{path}".rstrip("."))
    assert under is (module.MODULES[path] if path else module)
    for name in names.split():
        answer = getattr(under, name)
        if answer in (offered.get(name), vars(module.comm).get(name)):
            continue
        try:
            answer(1, several=2)
        except moecomm.Unsupported as error:
            assert f"deep_ep.{path}".rstrip(".") + f".{name}:" in str(error)
        else:
            raise AssertionError(name)
print("found")
""",
    )
    assert told.stdout == "found\n", told.stderr


@pytest.mark.long
def test_another_deep_ep_is_left_alone_unless_asked(tmp_path: Path) -> None:
    told = run_python(
        "-c",
        """
import pathlib, sys
pathlib.Path("deep_ep").mkdir()
pathlib.Path("deep_ep/__init__.py").write_text("real = True")
pathlib.Path("deep_ep/other.py").write_text("")
sys.path.insert(0, ".")
import moecomm
from moecomm.compat import install_as_deep_ep
for loaded in (False, True):
    try:
        install_as_deep_ep()
    except moecomm.Unsupported as error:
        print("replace=True" in str(error))
    import deep_ep.other
    assert deep_ep.real
install_as_deep_ep(replace=True)
import deep_ep
print(hasattr(deep_ep, "real"), "deep_ep.other" in sys.modules, deep_ep.Buffer.__module__)
""",
        cwd=tmp_path,
    )
    assert told.stdout == "True\nTrue\nFalse False moecomm.compat.deep_ep.buffer\n", told.stderr


def test_nixl_ep_is_found() -> None:
    told = run_python(
        "-c",
        """
import moecomm.compat
module = moecomm.compat.install_as_nixl_ep()
assert module is moecomm.compat.install_as_nixl_ep()
import nixl_ep
from nixl_ep.buffer import Buffer
from nixl_ep.utils import EventOverlap
assert nixl_ep is module and (Buffer, EventOverlap) == (nixl_ep.Buffer, nixl_ep.EventOverlap)
print("found")
""",
    )
    assert told.stdout == "found\n", told.stderr
