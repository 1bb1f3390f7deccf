"""The plugin under AddressSanitizer and UndefinedBehaviorSanitizer: its random operations, its failures, its liars."""

from __future__ import annotations

from pathlib import Path

import pytest

from .build import ASAN, build_watched
from .conftest import Drive, run_driver
from .test_failures import LIES, LIES_BY_MAIL, LIES_IN_CARDS

pytestmark = pytest.mark.sanitized

WAYS = ("loopback", "tcp")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_watched(tmp_path_factory.mktemp("asan"), ASAN)


@pytest.fixture
def drive(watched: tuple[Path, Path], fake_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Runs a scenario; both the driver and the plugin are sanitized."""
    # The driver never frees the windows of its ranks.  Leaks of the plugin are errors, where ranks are threads:
    # processes end by _exit.
    known = tmp_path / "known_leaks"
    known.write_text("leak:cuMemCreate\n")
    monkeypatch.setenv("LSAN_OPTIONS", f"suppressions={known}:print_suppressions=0")
    monkeypatch.setenv("UBSAN_OPTIONS", "print_stacktrace=1")

    def run(scenario: str, **options: object) -> str:
        return run_driver(*watched, fake_cuda, scenario, **options)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("memory", ["host", "cuda"])
@pytest.mark.parametrize("table", [14, 16])
def test_random_operations(drive: Drive, way: str, memory: str, table: int) -> None:
    drive("random", way=way, memory=memory, ranks=3, table=table, seed=table, slice=200_000)


@pytest.mark.parametrize("way", WAYS)
def test_long_queues(drive: Drive, way: str) -> None:
    drive("random", way=way, queue=256, contexts=8, ops=256, slice=200_000, epochs=1, memory="cuda")


def test_ranks_of_one_process(drive: Drive) -> None:
    drive("random", mode="threads", memory="cuda", ranks=3, slice=100_000)


@pytest.mark.parametrize("memory", ["host", "cuda"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", ["again", "killed", "killed_while_watched", "left"])
def test_what_comes_and_goes(drive: Drive, scenario: str, way: str, memory: str) -> None:
    drive(scenario, way=way, memory=memory)


@pytest.mark.parametrize("way", WAYS)
def test_a_silent_peer(drive: Drive, way: str) -> None:
    drive("silent", way=way, memory="cuda", timeout_ms=700)


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_who_asks_for_nonsense(drive: Drive, way: str) -> None:
    drive("misuse", way=way, memory="cuda")


@pytest.mark.parametrize("scenario", ["strangers", "full_door", "wrong_secret"])
def test_strangers(drive: Drive, scenario: str) -> None:
    drive(scenario, way="tcp", timeout_ms=1000 if scenario == "wrong_secret" else 20000)


def test_a_gpu_that_ends_no_copy(drive: Drive) -> None:
    drive("crowded", way="loopback", memory="cuda", queue=256)


def test_a_registration_that_fails(drive: Drive) -> None:
    drive("half_registered", way="loopback", memory="cuda", ranks=3, timeout_ms=3000)


@pytest.mark.parametrize("memory", ["host", "cuda"])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie(drive: Drive, lie: str, memory: str) -> None:
    assert LIES[lie] in drive(f"liar-{lie}", way="tcp", memory=memory)


@pytest.mark.parametrize("lie", {**LIES_BY_MAIL, **LIES_IN_CARDS})
def test_a_lie_within_a_host(drive: Drive, lie: str) -> None:
    assert (LIES_BY_MAIL | LIES_IN_CARDS)[lie] in drive(f"liar-{lie}", way="loopback", memory="cuda")
