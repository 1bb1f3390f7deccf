"""Weights of a trainer come to vLLM's workers through vLLM's own weight transfer."""

from __future__ import annotations

import inspect
import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moecomm.errors import BadInput, CorruptWeights
from moecomm.fused import quantize_weights
from moecomm.transfer.records import Leaving
from tests.backends.conftest import run_ranks
from tests.integrations import vllm_weights_stub as stub
from tests.integrations.test_vllm_signatures import Source, methods, parameters

HIDDEN, INNER, EXPERTS = 140, 24, 4
SHAPES = {"layers.0.w13": [2 * INNER, HIDDEN], "layers.0.w2": [HIDDEN, INNER]}
SOURCE, TARGET = [[0, 1], [2, 3]], [[3, 1, 0], [2, 0, -1]]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """moecomm's engines over vLLM's parts in the place of vLLM, installed or not."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    _forget()
    from moecomm.integrations.vllm_weights import engines, register

    register()
    register()
    yield engines
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("moecomm.integrations.vllm_weights")]:
        del sys.modules[name]


def weights(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    found = {name: torch.randn(EXPERTS, *shape, generator=g).bfloat16() for name, shape in SHAPES.items()}
    return {**found, "norm": torch.randn(HIDDEN, generator=g).bfloat16()}


class Experts(torch.nn.Module):
    """The parameters of vLLM's FusedMoE."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        for name, (rows, columns) in zip(("w13", "w2"), SHAPES.values(), strict=True):
            data = torch.zeros(slots, rows, columns, dtype=torch.float8_e4m3fn)
            scales = torch.zeros(slots, -(-rows // 128), -(-columns // 128))
            for end, tensor in (("weight", data), ("weight_scale_inv", scales)):
                self.register_parameter(f"{name}_{end}", torch.nn.Parameter(tensor, requires_grad=False))


class Model(torch.nn.Module):
    def __init__(self, slots: int) -> None:
        super().__init__()
        self.experts, self.norm = Experts(slots), torch.nn.Parameter(torch.zeros(HIDDEN).bfloat16())

    def check(self, held: list[int], step: int) -> None:
        whole = weights(step)
        for name, short in (("layers.0.w13", "w13"), ("layers.0.w2", "w2")):
            data, scales = quantize_weights(whole[name])
            for slot, expert in enumerate(held):
                if expert >= 0:
                    mine = getattr(self.experts, f"{short}_weight")[slot]
                    assert torch.equal(mine.view(torch.uint8), data[expert].view(torch.uint8))
                    assert torch.equal(getattr(self.experts, f"{short}_weight_scale_inv")[slot], scales[expert])
        assert torch.equal(self.norm, whole["norm"])


class Server:
    """The workers of an engine and its control plane: each call reaches all of them, as words of JSON."""

    def __init__(self) -> None:
        factory = sys.modules[stub.FACTORY].WeightTransferEngineFactory
        self.models = [Model(len(held)) for held in TARGET]
        self.workers = [
            factory.create_engine(SimpleNamespace(backend="moecomm"), _config(n), torch.device("cpu"), model)
            for n, model in enumerate(self.models)
        ]
        self.calls: list[str] = []

    def _all(self, call: str, *given: Any) -> None:
        self.calls.append(call)
        with ThreadPoolExecutor(len(self.workers)) as executor:
            for said in [executor.submit(getattr(worker, call), *given) for worker in self.workers]:
                said.result()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        words = json.loads(json.dumps(init_info))
        self._all("init_transfer_engine", self.workers[0].parse_init_info(words))

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", json.loads(json.dumps(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")


def _config(worker: int) -> Any:
    parallel = SimpleNamespace(data_parallel_index=worker, world_size=1, rank=0)
    return SimpleNamespace(parallel_config=parallel, model_config=None)


def layout(**changes: Any) -> dict[str, Any]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    names = {name: f"experts.{name.split('.')[-1]}_weight" for name in SHAPES}
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "source": SOURCE,
        "target": TARGET,
        "shapes": SHAPES,
        "parameters": {name: [first, f"{first}_scale_inv"] for name, first in names.items()},
        "cast": "fp8",
        "dense": {"norm": [HIDDEN]},
        "timeout_s": 20.0,
        **changes,
    }


class Source_:
    """A WeightSource whose pieces are those of a rank."""

    def __init__(self, held: list[int]) -> None:
        self.held, self.step = held, 0

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(self.step).items():
            yield name, tensor if name == "norm" else tensor[self.held]
        yield "optimizer", torch.zeros(1)


def test_a_trainer_updates_workers_step_by_step(engines: Any) -> None:
    server, about, done = Server(), layout(), threading.Barrier(2)

    def trainer(group: Any) -> None:
        source = Source_(SOURCE[group.rank])
        factory = sys.modules[stub.FACTORY].WeightTransferTrainerFactory
        info = engines.TrainerInfo(rank=group.rank, device="cpu", **about)
        found = factory.trainer_init(info, client=server, source=source)
        pointers = [p.data_ptr() for model in server.models for p in model.parameters()]
        for source.step in (1, 2, 3):
            done.wait()
            found.send_weights()
            done.wait()
            for model, held in zip(server.models, TARGET, strict=True):
                model.check(held, source.step)
        assert pointers == [p.data_ptr() for model in server.models for p in model.parameters()]
        done.wait()
        if group.rank == 1:  # a byte that is not as it was hashed: nobody has other weights
            carrier = found._transfers.experts._carrier
            write = carrier.write

            def broken(leaving: Sequence[Leaving], number: int) -> None:
                write(leaving, number)
                leaving[0].record[5] ^= 1

            carrier.write = broken
        source.step = 4
        with pytest.raises(CorruptWeights, match=r"'layers.0.w13' of expert .* rank 1 sent"):
            found.send_weights()
        done.wait()
        for model, held in zip(server.models, TARGET, strict=True):
            model.check(held, 3)
        if group.rank == 1:
            del carrier.write
        done.wait()
        found.send_weights()
        done.wait()
        for model, held in zip(server.models, TARGET, strict=True):
            model.check(held, 4)
        found.shutdown()

    for error in run_ranks(2, trainer):
        assert error is None, error
    assert server.calls[:4] == [
        "init_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    ]
    for worker in server.workers:
        worker.abort_weight_update()
        worker.shutdown()
        worker.shutdown()
        with pytest.raises(BadInput, match="init_transfer_engine"):
            worker.finish_weight_update()


def test_what_the_engines_refuse(engines: Any) -> None:
    with pytest.raises(BadInput, match="source"):
        engines.MoecommTrainer.trainer_init(engines.TrainerInfo(rank=0, **layout()), client=None)
    for changes, argument in (
        ({"dtype": "bf16"}, "dtype"),
        ({"cast": "e4m3"}, "dtype"),
        ({"target": [[0], []]}, "target"),
    ):
        info = engines.InitInfo(**{**layout(source=[[0, 1, 2, 3]]), **changes})
        with pytest.raises(BadInput) as caught:
            engines._Transfers(info, 0, "cpu")
        assert caught.value.argument == argument
    with pytest.raises(BadInput, match="MoecommTrainer"):
        engines.MoecommWorker.trainer_send_weights(iter(()), {})


def test_a_vllm_without_weight_transfer_is_left_alone(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from moecomm.integrations.vllm_weights import register

    monkeypatch.delitem(sys.modules, stub.FACTORY)
    monkeypatch.delattr(sys.modules["vllm.distributed.weight_transfer"], "factory", raising=False)
    register()


def test_engines_have_the_signatures_of_the_abstract_classes(engines: Any) -> None:
    for kind, base in (
        (engines.MoecommWorker, stub.WeightTransferEngine),
        (engines.MoecommTrainer, stub.TrainerWeightTransferEngine),
    ):
        assert not kind.__abstractmethods__
        for name, theirs in methods(base):
            assert parameters(getattr(kind, name)) == parameters(theirs), name
    trainer = inspect.signature(engines.MoecommTrainer.trainer_init)
    assert list(trainer.parameters) == ["init_info", "client", "source"]


@pytest.mark.parametrize("kind", ["WeightTransferEngine", "TrainerWeightTransferEngine"])
def test_the_stub_has_the_signatures_of_an_installed_vllm(kind: str) -> None:
    source = Source(str(Path("distributed/weight_transfer/base.py")))
    theirs, mine = source.functions(kind), vars(getattr(stub, kind))
    for name, function in theirs.items():
        if name in mine and not name.startswith("__init_sub"):
            args = [
                arg.arg for arg in (*function.args.args, *function.args.kwonlyargs) if arg.arg not in ("self", "cls")
            ]
            found = mine[name].__func__ if isinstance(mine[name], classmethod) else mine[name]
            assert [one for one in inspect.signature(found).parameters if one not in ("self", "cls")] == args, name
    abstract = {n for n, f in theirs.items() if any("abstractmethod" in ast_text(d) for d in f.decorator_list)}
    assert abstract == {n for n, f in mine.items() if getattr(f, "__isabstractmethod__", False)}


def ast_text(node: Any) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))
