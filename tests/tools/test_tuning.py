"""Tables of blocks and chunks: how they are looked up, whose comes first, and how moecomm tune makes one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from moecomm.base.protocol import MAX_BLOCKS
from moecomm.errors import BadInput
from moecomm.gpu import tuning
from moecomm.gpu.tuning import Choice, Entry, Table
from moecomm_bench.case import RoundsCase, model_sizes
from moecomm_bench.tune import rounds as tune

H200 = "NVIDIA H200"


pytestmark = pytest.mark.usefixtures("own_tables")


def write(gpu: str, entries: list[Entry]) -> None:
    path = tuning.users_path(gpu)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(json.dumps(tuning.content(gpu, Table(tuple(entries)))))
    path.chmod(0o644)


def test_the_shipped_table_has_every_kind_of_round() -> None:
    table = tuning.shipped(H200).entries
    kinds = {(entry.op, entry.layout) for entry in table}
    assert kinds == {(op, layout) for op in tuning.OPS for layout in tuning.LAYOUTS}
    for ranks in {entry.ranks for entry in table}:
        for kind in kinds:
            bounds = [entry.tokens for entry in table if (entry.op, entry.layout) == kind and entry.ranks == ranks]
            assert bounds == sorted(set(bounds))
    assert json.loads((Path(tuning.__file__).parent / "h200.json").read_text())["gpu"] == H200


def test_an_entry_holds_up_to_its_tokens_and_the_last_for_all_others() -> None:
    table = Table((Entry("combine", "flat", 4, 100, 8, 4), Entry("combine", "flat", 4, 16, 2, 1)))
    with tuning.use(table):
        found = [tuning.choose(H200, 4, "combine", "flat", tokens) for tokens in (0, 1, 16, 17, 100, 101, 10**6)]
    assert found == [Choice(2, 1)] * 3 + [Choice(8, 4)] * 4


def test_sums_that_are_cast_take_all_multiprocessors_and_the_chunks_of_the_table() -> None:
    table = Table((Entry("combine", "flat", 4, 100, 8, 4), Entry("combine", "flat", 4, 16, 2, 1)))
    with tuning.use(table):
        for ranks in (2, 64):
            found = [tuning.choose(H200, ranks, "combine", "flat", tokens, casts=True) for tokens in (1, 16, 17, 9999)]
            assert found == [Choice(2, 1)] * 2 + [Choice(MAX_BLOCKS, 4)] * 2


def test_the_nearest_number_of_ranks_counts() -> None:
    table = Table(tuple(Entry("dispatch", "expert", ranks, 9999, ranks, 1) for ranks in (2, 4, 8)))
    with tuning.use(table):
        found = [tuning.choose(H200, ranks, "dispatch", "expert", 7).blocks for ranks in (1, 2, 3, 4, 5, 6, 7, 8, 64)]
    assert found == [2, 2, 4, 4, 4, 8, 8, 8, 8]


def test_an_unknown_gpu_takes_the_table_of_the_h200() -> None:
    for tokens in (1, 128, 4096):
        assert tuning.choose("GPU 9000", 4, "dispatch", "flat", tokens) == tuning.choose(
            H200, 4, "dispatch", "flat", tokens
        )
    assert [tuning.slug(name) for name in (H200, "NVIDIA GB200 NVL", "cpu")] == ["h200", "gb200-nvl", "cpu"]


def test_a_users_own_table_comes_first_for_what_it_has() -> None:
    shipped = tuning.choose(H200, 4, "combine", "flat", 5)
    tuning.forget()
    write(H200, [Entry("dispatch", "flat", 4, 9999, 77, 16)])
    assert tuning.choose(H200, 4, "dispatch", "flat", 5) == Choice(77, 16)
    assert tuning.choose(H200, 4, "combine", "flat", 5) == shipped
    assert tuning.choose("GPU 9000", 4, "dispatch", "flat", 5) != Choice(77, 16)


def test_a_table_in_use_comes_before_all_others_until_it_is_over() -> None:
    write(H200, [Entry("dispatch", "flat", 4, 9999, 77, 16)])

    def now() -> int:
        return tuning.choose(H200, 4, "dispatch", "flat", 5).blocks

    assert now() == 77
    with tuning.use(Table((Entry("dispatch", "flat", 4, 9999, 5, 1),))):
        assert now() == 5
        with contextlib.suppress(LookupError), tuning.use(Table((Entry("dispatch", "flat", 4, 9999, 6, 1),))):
            assert now() == 6
            raise LookupError
        assert now() == 5
    assert now() == 77


def line(**other: Any) -> str:
    fine = {"op": "dispatch", "layout": "flat", "ranks": 4, "tokens": 9, "blocks": 8, "chunk_tokens": 4}
    return json.dumps({"entries": [fine | other]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"entries": 3}',
        '{"entries": [{"op": "dispatch"}]}',
        line(chunk_tokens=3),
        line(blocks=999),
        line(blocks=8.5),
        line(tokens=0),
        line(op="moe"),
        line(speed=7),
        "[" * 100_000,
        line() + " " * (1 << 20),
    ],
)
def test_a_table_that_is_none_is_said_and_not_used(text: str) -> None:
    shipped = tuning.choose(H200, 4, "dispatch", "flat", 5)
    tuning.forget()
    write(H200, [])
    tuning.users_path(H200).write_text(text)
    with pytest.warns(RuntimeWarning, match=r"tuning-h200\.json is not used"):
        assert tuning.choose(H200, 4, "dispatch", "flat", 5) == shipped


@pytest.mark.parametrize("doubt", ["writable by the group", "in a directory writable by all", "a link", "a pipe"])
def test_a_table_that_others_may_have_written_is_not_used(doubt: str, tmp_path: Path) -> None:
    shipped = tuning.choose(H200, 4, "dispatch", "flat", 5)
    tuning.forget()
    write(H200, [Entry("dispatch", "flat", 4, 9999, 77, 16)])
    path = tuning.users_path(H200)
    if doubt == "writable by the group":
        path.chmod(0o664)
    elif doubt == "in a directory writable by all":
        path.parent.chmod(0o777)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if doubt == "a link" else os.mkfifo(path, 0o600)
    with pytest.warns(RuntimeWarning, match=r"tuning-h200\.json is not used"):
        assert tuning.choose(H200, 4, "dispatch", "flat", 5) == shipped != Choice(77, 16)


def test_the_table_that_counts_is_named() -> None:
    assert tuning.source(H200) == "shipped"
    assert tuning.source("GPU 9000") == "shipped of the NVIDIA H200, because GPU 9000 has none"
    write(H200, [Entry("dispatch", "flat", 4, 9999, 77, 16)])
    assert tuning.source(H200) == f"{tuning.users_path(H200)} (entries: 1), then shipped"
    tuning.users_path(H200).write_text("{}")
    assert tuning.source(H200).startswith(f"shipped; {tuning.users_path(H200)} is not used: ")


def test_a_table_without_the_newer_lists_is_read() -> None:
    older = tuning.parse(line())
    assert (len(older.entries), older.gemms, older.fused_gemms, older.layers) == (1, (), (), ())


CASE = RoundsCase(
    model="",
    hidden=64,
    topk=2,
    experts=4,
    ranks=2,
    backend="host",
    tokens=[8, 64],
    layouts=["flat", "batched"],
    payloads=["bf16"],
    sms=[1, 2, 4],
    mode="eager",
)


def rows(op: str, layout: str, tokens: int, times: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Return rows of one kind, by (chunk, blocks)."""
    about = {"op": op, "layout": layout, "tokens": tokens}
    return [{**about, "chunk_tokens": chunk, "blocks": blocks, "us": us} for (chunk, blocks), us in times.items()]


def test_the_chunk_is_best_for_both_and_blocks_are_few() -> None:
    measured = [
        *rows("dispatch", "flat", 8, {(1, 1): 30.0, (1, 2): 10.0, (1, 4): 9.9, (8, 1): 20.0, (8, 2): 8.0, (8, 4): 8.0}),
        *rows("combine", "flat", 8, {(1, 1): 9.0, (1, 2): 9.0, (1, 4): 8.0, (8, 1): 30.0, (8, 2): 20.0, (8, 4): 20.0}),
    ]
    table = tune.choose(tune.Candidates(dataclasses.replace(CASE, tokens=[8]), [1, 8]), measured)
    flat = [entry for entry in table if entry.layout == "flat"]
    assert flat == [Entry("combine", "flat", 2, 8, 4, 1), Entry("dispatch", "flat", 2, 8, 2, 1)]


def test_a_layout_without_room_takes_what_expert_takes() -> None:
    case = dataclasses.replace(CASE, tokens=[8], layouts=["expert", "batched"])
    measured = [*rows("dispatch", "expert", 8, {(1, 2): 1.0}), *rows("combine", "expert", 8, {(1, 4): 1.0})]
    table = tune.choose(tune.Candidates(case, [1]), measured)
    assert [(e.op, e.layout, e.blocks) for e in table] == [
        ("combine", "batched", 4),
        ("combine", "expert", 4),
        ("dispatch", "batched", 2),
        ("dispatch", "expert", 2),
    ]


def test_the_slowest_rank_counts_and_what_had_no_room_does_not() -> None:
    def rank(us: list[float] | None) -> list[dict[str, Any]]:
        about = {"op": "dispatch", "layout": "flat", "tokens": 8, "blocks": 1, "chunk_tokens": 1}
        return [{**about, "us": [1.0] * 3}, {**about, "blocks": 2, "us": us}]

    assert [row["us"] for row in tune.merge([rank([1.0] * 3), rank([4.0] * 3)])] == [1.0, 4.0]
    assert [row["us"] for row in tune.merge([rank(None), rank(None)])] == [1.0]


def test_chunks_are_tried_where_a_rank_has_several() -> None:
    tried = tune.Candidates(CASE, [1, 4, 16])
    assert [tried.chunks_at(tokens) for tokens in (1, 31, 32, 128)] == [[1], [1], [1, 4], [1, 4, 16]]
    assert tune.Candidates(CASE, [8]).chunks_at(1) == [8]
    for wrong in ({"chunks": [3]}, {"chunks": []}, {"case": dataclasses.replace(CASE, sms=[0])}):
        with pytest.raises(BadInput):
            dataclasses.replace(tried, **wrong).check()


def test_a_table_that_could_not_be_written_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(tune, "on_ranks", lambda *job: pytest.fail("it measures"))
    for argument, path in (("MOECOMM_CACHE_DIR", None), ("out", tmp_path / "cache" / "below" / "table.json")):
        with pytest.raises(BadInput) as caught:
            tune.tune(tune.Candidates(CASE, [1]), path)
        assert caught.value.argument == argument


def test_a_table_is_not_measured_for_a_directory_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setattr(tune, "on_ranks", lambda *job: pytest.fail("it measures"))
    with pytest.raises(BadInput, match=r"MOECOMM_CACHE_DIR.*mode 0777"):
        tune.tune(tune.Candidates(CASE, [1]))


def test_a_table_of_others_does_not_get_into_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASE, tokens=[8], layouts=["expert"])
    measured = [*rows("dispatch", "expert", 8, {(1, 2): 1.0}), *rows("combine", "expert", 8, {(1, 4): 1.0})]
    by_rank = [{"gpu": "cpu", "rows": [{**row, "us": [row["us"]]} for row in measured]}]
    monkeypatch.setattr(tune, "on_ranks", lambda *job: by_rank)
    write("cpu", [Entry("dispatch", "flat", 2, 8, 77, 16)])
    tuning.users_path("cpu").chmod(0o666)
    before = os.umask(0)
    try:
        with pytest.warns(RuntimeWarning, match="is not used"):
            path = tune.tune(tune.Candidates(case, [1]))
    finally:
        os.umask(before)
    assert path == tuning.users_path("cpu") and path.stat().st_mode & 0o777 == 0o600
    assert tuning.users("cpu").entries == (
        Entry("combine", "expert", 2, 8, 4, 1),
        Entry("dispatch", "expert", 2, 8, 2, 1),
    )


@pytest.mark.parametrize("chosen", ["~nobody-of-that-name/cache", ""])
def test_a_home_that_is_not_there_is_named(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOECOMM_CACHE_DIR", chosen)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # users of containers may be nobody's
    with pytest.raises(BadInput, match="MOECOMM_CACHE_DIR"):
        tuning.choose(H200, 4, "dispatch", "flat", 7)


@pytest.mark.long
def test_what_is_measured_becomes_a_table_that_is_then_used(tmp_path: Path) -> None:
    write("cpu", [Entry("dispatch", "flat", 2, 40, 99, 32), Entry("dispatch", "batched", 2, 40, 99, 32)])
    case = RoundsCase(
        *model_sizes("mixtral-8x7b", None, None, None), 2, "host", [2, 40], ["flat"], ["fp8"], [1, 2], "eager"
    )
    candidates = tune.Candidates(dataclasses.replace(case, replays=2), [1, 4])
    assert tune.tune(candidates, measurements=tmp_path / "times.json") == tuning.users_path("cpu")
    written = json.loads(tuning.users_path("cpu").read_text())
    assert {"command", "machine", "versions", "gpu"} <= set(written)
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    tried = {(row["op"], row["tokens"], row["chunk_tokens"], row["blocks"]) for row in rows}
    sizes_of_chunks = [(2, 1), (40, 1), (40, 4)]
    assert tried == {
        (op, tokens, chunk, blocks) for op in tuning.OPS for tokens, chunk in sizes_of_chunks for blocks in (1, 2)
    }
    assert all(row["us"] > 0 for row in rows)
    assert tuning.choose("cpu", 2, "dispatch", "batched", 7) == Choice(99, 32), "what was not measured is kept"
    chosen = [tuning.choose("cpu", 2, op, "flat", tokens) for op in tuning.OPS for tokens in (2, 40)]
    entries = [entry for entry in written["entries"] if entry["layout"] == "flat"]
    entries.sort(key=lambda entry: (tuning.OPS.index(entry["op"]), entry["tokens"]))
    assert chosen == [Choice(entry["blocks"], entry["chunk_tokens"]) for entry in entries]
