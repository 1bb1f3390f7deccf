"""Programs in C++, each built once for all tests of it and for its mutants."""

from __future__ import annotations

import pytest

from .build import INTERLEAVINGS, PLAIN, TSAN, Workshop


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="session")
def tsan(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("tsan"), TSAN)


@pytest.fixture(scope="session")
def interleavings(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("interleavings"), PLAIN, INTERLEAVINGS)


@pytest.fixture(scope="session")
def watched_interleavings(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Interleavings under ThreadSanitizer."""
    return Workshop(tmp_path_factory.mktemp("watched_interleavings"), TSAN, INTERLEAVINGS)
