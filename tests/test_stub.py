"""The stub of the native module is the one that its generator writes."""

from __future__ import annotations

import pytest

from tests import stub


def test_the_stub_is_that_of_the_module() -> None:
    pytest.importorskip("pybind11_stubgen", reason="needs the extra test: pip install '.[test]'")
    assert stub.STUB.read_text() == stub.generated(), "python -m tests.stub write"
