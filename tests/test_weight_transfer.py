"""Weights of experts move from the ranks that train them to those that serve them, all of them or none."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import moecomm
from moecomm import Placement, _native
from moecomm.errors import (
    BadInput,
    Closed,
    Mismatch,
    Unsupported,
)
from moecomm.ranks.board import KeptBoard, StoreBoard
from moecomm.transfer import WeightTransfer, ranks_over
from moecomm.transfer.routes import routes_of

from .backends.conftest import all_ranks, run_ranks
from .few import few
from .weight_transfers import (
    APART,
    CASTS,
    EXPERTS,
    SHAPES,
    Model,
    beside,
    opened,
    passed,
    transfers,
)


@pytest.mark.parametrize("seed", few(range(60), 3, 8, 10))
def test_random_transfers_leave_what_the_specification_casts(seed: int) -> None:
    """Sets of ranks overlap or not, experts have replicas on both sides, and shapes divide by nothing."""
    rng = random.Random(f"transfer {seed}")
    of = rng.randint(2, 5)
    trainers, servers = (sorted(rng.sample(range(of), rng.randint(1, of))) for _ in range(2))
    cast = CASTS[seed % len(CASTS)]
    even = cast in ("nvfp4", "mxfp4")
    shapes: dict[str, tuple[int, ...]] = {
        f"w{n}": (rng.choice([1, 3, 40, 130]), rng.choice([2, 34, 136, 200]) - (0 if even else rng.randint(0, 1)))
        for n in range(rng.randint(1, 3))
    }
    if cast is None:
        shapes |= {"bias": (rng.randint(1, 9),), "scalar": (), "empty": (0, 3)}
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    if cast is None:
        dtype = rng.choice([dtype, torch.float8_e4m3fn, torch.int64])
    model = Model(shapes, dtype, cast, seed)
    source = beside(trainers, of, 2 * seed, -(-EXPERTS // len(trainers)) + rng.randint(0, 2))
    target = beside(servers, of, 2 * seed + 1, -(-EXPERTS // len(servers)) + rng.randint(0, 2))
    steps = rng.randint(1, 4)
    skips = {step for step in range(1, steps) if rng.random() < 0.3}  # nobody commits these

    def body(group: Any) -> None:
        have, want = source.held[group.rank], target.held[group.rank]
        found, now = model.room(want), 0
        how: dict[str, Any] = {"source": source, "target": target, "dtype": dtype, "cast": cast}
        with WeightTransfer(group, shapes, **how, backend="host", timeout_s=20) as transfer:
            for step in range(1, steps + 1):
                transfer.stage(model.given(step, have))
                if now:
                    model.check(found, want, now)
                if step in skips:
                    continue
                transfer.commit(passed(want, found))
                assert not transfer.staged or passed(want, found) is None
                now = step
                model.check(found, want, now)

    all_ranks(of, body)


@pytest.mark.parametrize("seed", range(200))
def test_a_rank_reads_only_what_it_lacks_and_an_expert_is_cast_once_for_all_readers(seed: int) -> None:
    rng = random.Random(seed)
    of = rng.randint(1, 6)
    trainers, servers = (sorted(rng.sample(range(of), rng.randint(1, of))) for _ in range(2))
    source = beside(trainers, of, 2 * seed, -(-EXPERTS // len(trainers)) + rng.randint(0, 2))
    target = beside(servers, of, 2 * seed + 1, -(-EXPERTS // len(servers)) + rng.randint(0, 2))
    routes = routes_of(source, target)
    senders: dict[int, set[int]] = {}
    for rank, route in enumerate(routes):
        assert set(route.reads) == set(target.held[rank]) - {-1} == set(route.slots) == set(route.places)
        assert sorted(route.places.values()) == list(range(len(route.places)))
        for expert, sender in route.reads.items():
            assert (sender == rank) == (expert in source.held[rank])
            assert expert in routes[sender].casts and (sender == rank) == (
                rank not in routes[sender].readers.get(expert, ())
            )
            if sender != rank:
                senders.setdefault(expert, set()).add(sender)
        for expert, row in route.casts.items():
            assert source.held[rank][row] == expert
            home, readers = route.homes[expert], route.readers.get(expert, [])
            assert expert in routes[home].slots and home in ({rank} if expert in route.slots else set(readers))
        first = [expert in route.readers for expert in route.casts]
        assert first == sorted(first, reverse=True)  # what others wait for comes first
    assert all(len(some) == 1 for some in senders.values())
    for rank, route in enumerate(routes):  # a rank casts for itself, or for the readers of an expert
        for expert in route.casts:
            assert expert in route.slots or senders[expert] == {rank}


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("shapes", {"w13": (6, 40), "w2": (40, 4)}),
        ("shapes", {"w2": (40, 3), "w13": (6, 40)}),
        ("shapes", {"w13": (6, 40), "w3": (40, 3)}),
        ("dtype", torch.float16),
        ("cast", "fp8"),
        ("cast", {"w2": torch.float32}),
        ("source", Placement([[0, 1, 2], [3, 5, 4], [], []])),
        ("target", Placement([[], [], [0, 1, 2, 3], [3, 4, 5]])),
    ],
)
def test_ranks_that_want_different_transfers_are_told_the_field(field: str, other: Any) -> None:
    found = run_ranks(4, lambda group: opened(group, **({field: other} if group.rank == 2 else {})))
    for error in found:
        assert isinstance(error, Mismatch) and field in str(error), error
    assert found[2].field == field


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("shapes", {}),
        ("shapes", {"w": 3}),
        ("shapes", {"w": (-1,)}),
        ("dtype", {"w13": torch.bfloat16}),
        ("dtype", {"w": torch.bfloat16}),
        ("dtype", torch.complex64),
        ("cast", "bf16"),
        ("cast", {"w": "fp8"}),
        ("cast", torch.int8),
        ("shapes", {"w13": (6, 40), "w2": (41,)}),
        ("source", None),
        ("source", Placement([range(EXPERTS)])),
        ("target", Placement([[], [], [0, 1, 2, 3], [3, 4, 5, 6]])),
        ("timeout_s", 0),
        ("shapes", {"w": (2**31, 2**10)}),
    ],
)
def test_what_cannot_be_opened_is_named_on_all_ranks(argument: str, given: Any) -> None:
    more = {"cast": "fp8"} if argument == "shapes" and given.get("w2") == (41,) else {}
    found = run_ranks(4, lambda group: opened(group, **({argument: given, **more} if group.rank != 1 else more)))
    if argument == "shapes" and "w" in given and isinstance(given["w"], tuple) and given["w"][0] > 0:
        found = run_ranks(4, lambda group: opened(group, **{argument: given}))
    for error in found:
        assert isinstance(error, BadInput) and error.argument == argument, error


def test_odd_columns_have_no_four_bits() -> None:
    with pytest.raises(BadInput, match="an even number of columns with cast='mxfp4'"):
        opened("self", source=Placement([range(6)]), target=Placement([range(6)]), cast="mxfp4")


def test_tensors_that_do_not_fit_are_named_on_all_ranks_and_the_next_call_works() -> None:
    model = Model(SHAPES, torch.bfloat16, None, 0)

    def bad(group: Any, nth: int) -> Any:
        given = model.given(1, APART[0].held[group.rank])
        if group.rank == 1 and given is not None:
            return [
                None,
                {"w13": given["w13"]},
                {**given, "w13": given["w13"][:2]},
                {**given, "w2": given["w2"].float()},
                {**given, "w2": given["w2"][..., :2]},
                {**given, "w2": given["w2"].tolist()},
                {**given, "w2": (given["w2"], given["w2"])},
                {**given, "w2": given["w2"].to_sparse()},
                {**given, "w2": torch._neg_view(given["w2"])},
                {**given, "w2": given["w2"].to("meta")},
                {**given, "w2": None},
            ][nth]
        return given

    def body(group: Any) -> list[str]:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        found, said = model.room(want), []
        with opened(group) as transfer:
            if group.rank >= 2:
                with pytest.raises(BadInput, match="nothing to commit"):
                    transfer.commit(found)
            for nth in range(11):
                with pytest.raises(BadInput) as caught:
                    transfer.stage(bad(group, nth))
                said.append(str(caught.value))
                assert not transfer.staged
            if group.rank >= 2:
                with pytest.raises(BadInput, match=r"nothing to commit"):
                    transfer.commit(found)
            transfer.stage(model.given(2, have))
            if group.rank >= 2:
                shared = torch.zeros(4, 40, 1, dtype=torch.bfloat16).expand(4, 40, 3)
                for into in (
                    None,
                    {"w13": found["w13"]},
                    {**found, "w2": (found["w2"][0][:3],)},
                    {**found, "w2": shared},
                ):
                    with pytest.raises(BadInput, match="into"):
                        transfer.commit(into if group.rank == 3 else found)
            else:
                with pytest.raises(BadInput, match="into"):
                    transfer.commit(found)
            transfer.commit(passed(want, found))
            model.check(found, want, 2)
        return said

    for said in all_ranks(4, body):
        assert all(text.startswith("tensors") for text in said)


def test_one_rank_moves_to_itself_in_any_mode_of_torch() -> None:
    model = Model(SHAPES, torch.bfloat16, "mxfp8", 4)
    found = model.room(range(EXPERTS))
    same = Placement([range(EXPERTS)])
    with WeightTransfer("self", SHAPES, source=same, target=same, cast="mxfp8", backend="host") as transfer:
        for step in range(1, 5):
            with torch.inference_mode(step % 2 == 0):
                given = model.given(step, range(EXPERTS))
                assert given is not None
                transfer.stage({name: torch.nn.Parameter(w) if step == 3 else w for name, w in given.items()})
                transfer.commit(found)
                model.check(found, range(EXPERTS), step)
        with pytest.raises(Unsupported):
            transfer.__reduce_ex__(2)
    transfer.close()
    with pytest.raises(Closed):
        transfer.commit(found)


def test_slots_of_expert_weights_take_them() -> None:
    """A Buffer's layer gives the sums of the trainer's weights from the commit on."""
    engine = Placement([[0, 1, 2, -1], [3, 4, 5, 0]])
    target = Placement([[], *engine.experts.tolist()])
    model = Model({"w13": (16, 8), "w2": (8, 8)}, torch.float32, None, 5)
    engines = moecomm.local_ranks(2)

    def body(group: Any) -> list[torch.Tensor]:
        source = Placement([range(EXPERTS), [], []])
        about: dict[str, Any] = {"source": source, "target": target, "dtype": torch.float32, "backend": "host"}
        with WeightTransfer(group, model.shapes, **about) as transfer:
            if group.rank == 0:
                for step in (1, 2):
                    transfer.stage(model.given(step, range(EXPERTS)))
                return []
            sizes: dict[str, Any] = {"hidden": 8, "num_experts": EXPERTS, "topk": 2, "max_tokens": 8}
            mine = engines[group.rank - 1]
            with moecomm.Buffer(mine, **sizes, dtype=torch.float32, backend="host", placement=engine) as buffer:
                weights = moecomm.ExpertWeights(buffer, model.shapes, dtype=torch.float32)
                x, ids = torch.ones(4, 8), torch.tensor([[0, 5], [1, 4], [2, 3], [0, 1]])
                outs = []
                for _ in (1, 2):
                    transfer.stage()
                    transfer.commit({name: weights[name] for name in model.shapes})
                    outs.append(buffer.moe(x, ids, None, weights["w13"], weights["w2"]))
                weights.close()
                return outs

    _, *found = all_ranks(3, body)
    for outs in found:
        for step, out in enumerate(outs, 1):
            w = model.weights(step)
            gate, up = torch.einsum("eij,j->ei", w["w13"].double(), torch.ones(8).double()).chunk(2, dim=1)
            y = torch.einsum("eij,ej->ei", w["w2"].double(), torch.nn.functional.silu(gate) * up)
            ids = torch.tensor([[0, 5], [1, 4], [2, 3], [0, 1]])
            torch.testing.assert_close(out.double(), y[ids].sum(1), rtol=1e-4, atol=1e-4)


def test_transfers_of_other_placements_switch_together() -> None:
    """Dense weights are one expert, with a replica on each rank.  Nothing switches unless all parts are staged."""
    dense = Model({"norm": (7,), "head": (5, 3)}, torch.float32, torch.bfloat16, 8)
    model = Model(SHAPES, torch.bfloat16, "mxfp8", 7)
    whole = Placement([[0], [0], [], []]), Placement([[], [], [0], [0]])

    def body(group: Any) -> None:
        have, want = APART[0].held[group.rank], APART[1].held[group.rank]
        experts, others, trains = model.room(want), dense.room([0]), group.rank < 2
        about: dict[str, Any] = {"source": whole[0], "target": whole[1], "cast": torch.bfloat16, "dtype": torch.float32}
        with opened(group, shapes=dense.shapes, **about) as closed:
            pass
        with opened(group, cast="mxfp8") as transfer, opened(group, shapes=dense.shapes, **about) as also:
            if experts and not trains:
                scales = experts["w13"][1].view(torch.uint8)  # as engines have them
                into = {**experts, "w13": (experts["w13"][0], scales)}
            for step in (1, 2):
                transfer.stage(model.given(step, have))
                if not trains:
                    with pytest.raises(BadInput, match="nothing to commit"):
                        transfer.commit(into, also={also: others})
                    assert transfer.staged
                    if step == 2:
                        model.check(experts, want, 1)
                also.stage({name: w[:1] for name, w in dense.weights(step).items()} if trains else None)
                for bad in ({closed: others}, {transfer: into if not trains else None}, [also], {"also": others}):
                    if not trains:
                        with pytest.raises(BadInput, match=r"^also( \(rank 0\))?: got"):  # the first of the receivers
                            transfer.commit(into, also=bad if group.rank == 2 else {also: others})  # type: ignore[arg-type]
                transfer.commit(*([] if trains else [into]), also={also: None if trains else others})
                if not trains:
                    model.check(experts, want, step)
                    dense.check(others, [0], step)
            elsewhere = {"source": Placement([[0], [], [], []]), "target": Placement([[], [], [0], []])}
            with opened(group, shapes={"w": (2,)}, **elsewhere) as third:
                third.stage({"w": torch.ones(1, 2).bfloat16()} if group.rank == 0 else None)
                transfer.stage(model.given(3, have))
                if not trains:
                    room = {"w": torch.zeros(1, 2).bfloat16()} if group.rank == 2 else None
                    with pytest.raises(BadInput, match="also"):
                        transfer.commit(into, also={third: room})

    all_ranks(4, body)


def test_ranks_of_separate_jobs_meet_over_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls share one board of each rank, and its thread, which end with the transfer."""
    model = Model(SHAPES, torch.bfloat16, "fp8_token", 6)
    store, made = HashStore(), list[StoreBoard]()
    init = StoreBoard.__init__

    def counted(board: StoreBoard, *given: Any) -> None:
        init(board, *given)
        made.append(board)

    def body(group: Any) -> None:
        with transfers(ranks_over(store, group.rank, 4, timeout_s=20), model, *APART) as (transfer, found, have, want):
            for step in (1, 2, 3):
                transfer.stage(model.given(step, have))
                if step == 1:
                    monkeypatch.setattr(StoreBoard, "__init__", counted)  # every rank has its board
                transfer.commit(passed(want, found))
                model.check(found, want, step)

    all_ranks(4, body)
    assert not made


def test_a_board_whose_store_has_not_answered_is_not_kept() -> None:
    answers, stores = threading.Event(), [HashStore(), HashStore()]
    boards = [StoreBoard(store, "") for store in stores]
    boards[0].limit_s = 0.01
    left = iter(boards)
    kept = KeptBoard(lambda: next(left))
    part = kept.part("a/")
    part.limit_s = 20
    part.write("x", b"1")
    part.close()
    assert stores[0].get("a/x") == b"1" and kept.part("b/").read(["x"]) is None and not boards[0].stuck
    part.limit_s = 0.01
    with pytest.raises(TimeoutError):
        boards[0]._call(answers.wait)
    assert boards[0].stuck
    again = kept.part("a/")
    again.limit_s = 20
    again.write("y", b"2")
    again.erase(["y"])
    assert again.read(["y"]) is None
    kept.close()
    assert not any(thread.is_alive() for thread in [boards[1]._thread] if thread)
    answers.set()


def test_a_board_closes_while_its_store_does_not_answer() -> None:
    """Nobody waits for erased values, but the thread does."""
    answers = threading.Event()

    class Silent(HashStore):
        def delete_key(self, key: str) -> bool:
            return answers.wait()

    board = StoreBoard(Silent(), "")
    board.limit_s = 0.01
    board.erase(["x"])
    board.close()
    thread = board._thread
    assert thread is not None and thread.is_alive()
    answers.set()
    thread.join()


def test_words_of_a_peer_are_whole() -> None:
    words = torch.zeros(3, dtype=torch.int64)
    _native.store_u64(words[1:].data_ptr(), (1 << 64) - 2)
    assert _native.load_words(words.data_ptr(), 3) == [0, (1 << 64) - 2, 0]
