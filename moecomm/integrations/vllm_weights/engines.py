"""Engines of vLLM's weight transfer over moecomm.transfer: MoecommWorker in the engine, MoecommTrainer in the trainer.

Both open the same transfers, by one description of the layout, which rank 0 of the trainer sends to the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from moecomm.base.formats import FORMATS
from moecomm.base.placement import Placement
from moecomm.errors import BadInput
from moecomm.integrations.vllm_weights import NAME
from moecomm.transfer import WeightTransfer, ranks_over


@dataclass(kw_only=True)
class _Layout:
    """Layout of a transfer, the same for trainers and workers, in types of JSON.

    Attributes:
        master_address, master_port: of the store, which rank 0 of the trainers opens.
        source: for each trainer, the experts of the rows of its tensors.
        target: for each worker, in the order of global worker ranks, the experts of its slots, -1 for none.
        shapes: of one expert's tensors, by name.
        parameters: a worker's parameters for each of these names: values, then scales, then factors.
        dtype: name in torch of the dtype of the trainer's tensors; one for all of them, or by name.
        cast: see moecomm.transfer.WeightTransfer; a dtype by its name in torch.
        dense: shapes of tensors that every trainer and every worker has whole, by the name of the parameter.
        dense_dtype: of the dense tensors.
        timeout_s: how long a rank waits for the others.
    """

    master_address: str
    master_port: int
    source: list[list[int]]
    target: list[list[int]]
    shapes: dict[str, list[int]]
    parameters: dict[str, list[str]]
    dtype: Any = "bfloat16"
    cast: Any = None
    dense: dict[str, list[int]] = field(default_factory=dict)
    dense_dtype: str = "bfloat16"
    timeout_s: float = 300.0


@dataclass(kw_only=True)
class InitInfo(_Layout, WeightTransferInitInfo):  # type: ignore[misc]
    """Layout of a transfer, as a worker gets it from the trainer."""


@dataclass(kw_only=True)
class TrainerInfo(_Layout, TrainerInitInfo):  # type: ignore[misc]
    """Layout of a transfer, as a trainer passes it, with its `rank` among trainers.

    Attributes:
        device: of the trainer's tensors; None: see moecomm.Window.
    """

    backend: ClassVar[str] = NAME
    device: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty description of an update: opening the transfer settles what moves."""


class _Transfers:
    """The transfer of experts and, if there are dense weights, that of these.  Both switch together.

    Args:
        layout: of the transfer.
        rank: this rank in the group: trainers first, then workers.
        device: of its tensors.
    """

    def __init__(self, layout: _Layout, rank: int, device: torch.device | str | None) -> None:
        trainers, workers = len(layout.source), len(layout.target)
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            layout.master_address,
            layout.master_port,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=layout.timeout_s),
        )
        group = ranks_over(self._store, rank, trainers + workers, timeout_s=layout.timeout_s)
        about: dict[str, Any] = {"device": device, "timeout_s": layout.timeout_s}
        none: list[list[int]] = [[]]
        if layout.dense and any(max(row, default=-1) < 0 for row in layout.target):
            raise BadInput("target", "a worker without experts", "one expert or more on each, beside dense weights")
        self.dense: WeightTransfer | None = None
        held = [*layout.source, *layout.target][rank]
        self.has_experts = any(expert >= 0 for expert in held)  # as a trainer or as a worker
        self.experts = WeightTransfer(
            group,
            layout.shapes,
            source=Placement([*layout.source, *none * workers]),
            target=Placement([*none * trainers, *layout.target]),
            dtype=_by_name(layout.dtype, _dtype),
            cast=_by_name(layout.cast, _cast),
            **about,
        )
        if layout.dense:
            whole = Placement([[0]] * trainers + none * workers), Placement(none * trainers + [[0]] * workers)
            kind = _dtype(layout.dense_dtype)
            self.dense = WeightTransfer(group, layout.dense, source=whole[0], target=whole[1], dtype=kind, **about)

    def stage(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Stage both.  `tensors`: a trainer's, by name; other names are skipped."""
        self.experts.stage(None if tensors is None or not self.has_experts else _some(tensors, self.experts))
        if self.dense is not None:
            dense = None if tensors is None else _some(tensors, self.dense)
            self.dense.stage(dense and {name: tensor[None] for name, tensor in dense.items()})

    def close(self) -> None:
        """Close both."""
        for transfer in (self.experts, self.dense):
            if transfer is not None:
                transfer.close()


class MoecommWorker(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """A worker of vLLM: update_weights() stages, finish_weight_update() switches all workers at one step.

    Parameters keep their addresses.  An update that fails, or is not finished, leaves them as they are.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _transfers: _Transfers | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the transfer, with the trainers and all other workers."""
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._layout = init_info
        self._transfers = _Transfers(init_info, len(init_info.source) + worker, self.device)

    def start_weight_update(self) -> None:
        """Do nothing: weights in use stay until the end of the update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage the weights.  There is no work on the device to wait for."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stage the weights of all experts, and the dense ones, beside those in use."""
        self._opened().stage()

    def finish_weight_update(self) -> None:
        """Switch to what is staged, on all workers or on none."""
        transfers = self._opened()
        experts = {
            name: tuple(map(self._parameter, names, (shape for shape, _ in transfers.experts.arrives[name])))
            for name, names in self._layout.parameters.items()
        }
        dense = {name: self._parameter(name)[None] for name in self._layout.dense}
        also = None if transfers.dense is None else {transfers.dense: dense}
        transfers.experts.commit(experts if transfers.has_experts else None, also=also)

    def abort_weight_update(self) -> None:
        """Do nothing: what is staged is not in use, and the next update takes its place."""

    def shutdown(self) -> None:
        """Close the transfer.  Idempotent."""
        if self._transfers is not None:
            self._transfers.close()
        self._transfers = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise BadInput: older versions of vLLM call this; here a trainer makes a MoecommTrainer."""
        raise BadInput("trainer_send_weights", "a call without an engine", "MoecommTrainer.trainer_init(...)")

    def _opened(self) -> _Transfers:
        if self._transfers is None:
            raise BadInput("init_transfer_engine", "no call", "one before the first update")
        return self._transfers

    def _parameter(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a parameter, viewed with `shape` for each expert: vLLM may have a further dimension of 1."""
        found: torch.Tensor = self.model.get_parameter(name).detach()
        return found if shape is None or found.shape[1:] == shape else found.view(len(found), *shape)


class MoecommTrainer(TrainerWeightTransferEngine[TrainerInfo]):  # type: ignore[misc]
    """A rank of the trainer.  `source.iter_local()` yields its tensors, by the names of the layout."""

    init_info_cls = TrainerInfo
    _transfers: _Transfers

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> MoecommTrainer:
        """Open the transfer.  Rank 0 makes the workers open theirs at the same time."""
        if source is None:
            raise BadInput("source", "None", "a WeightSource with iter_local()")
        found = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        layout = asdict(init_info)
        del layout["rank"], layout["device"]

        def open_own() -> None:
            found._transfers = _Transfers(init_info, init_info.rank, init_info.device)

        found._beside(lambda: client.init_weight_transfer_engine(layout), open_own)
        return found

    def send_weights(self) -> None:
        """Stage on all ranks, then switch all workers."""
        if self.is_sender:
            self.client.start_weight_update()
        tensors = dict(self.source.iter_local())
        self._beside(lambda: self.client.update_weights({}), lambda: self._transfers.stage(tensors))
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Close the transfer."""
        self._transfers.close()

    def _beside(self, of_workers: Callable[[], object], own: Callable[[], object]) -> None:
        """Run this rank's call and, if it is rank 0, the workers' call that meets it at the same time."""
        if not self.is_sender:
            own()
            return
        with ThreadPoolExecutor(max_workers=1) as executor:
            said = executor.submit(of_workers)
            own()
            said.result()


def _some(tensors: Mapping[str, torch.Tensor], transfer: WeightTransfer) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in transfer.arrives if name in tensors}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise BadInput("dtype", repr(name), "the name of a dtype of torch")
    return found


def _cast(name: str | None) -> Any:
    return name if name is None or name in FORMATS else _dtype(name)


def _by_name(given: Any, of: Callable[[Any], Any]) -> Any:
    return {name: of(one) for name, one in given.items()} if isinstance(given, Mapping) else of(given)
