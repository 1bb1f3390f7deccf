"""The experts of one rank among those of all ranks: how state dicts name them, and which state may be loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from moecomm.base.experts import experts_of
from moecomm.base.validation import check_integer
from moecomm.errors import BadInput, Unsupported
from moecomm.ranks.group import Group
from moecomm.ranks.rendezvous import ProcessGroup, rendezvous

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MESH_DIM = "moecomm_experts"  # by which states are known that ExpertShard.pack() has made, also in files
_SAVE = "save with torch.distributed.checkpoint, or torch.save what moecomm.nn.gather_state() returns"


class ExpertShard:
    """The experts of one rank.  Immutable; copies of a layer share it.

    Attributes:
        experts: numbers of this rank's experts.
        num_experts: E, of all ranks together; None: not known.
        group: the ranks that have the other experts; None: not known.
        global_ranks: those ranks in the default process group; empty if they are not of one.
    """

    def __init__(self, experts: range, num_experts: int | None = None, group: Any = None) -> None:
        self.experts, self.num_experts = experts, num_experts
        self.group: Group | None = None if group is None else rendezvous(group)
        if num_experts is not None:
            check_integer("num_experts", num_experts, experts.stop)
        if self.group is not None:
            if num_experts is None:
                raise BadInput("num_experts", "None", "the number of experts of all ranks of the group")
            mine = experts_of(self.group.rank, num_experts, self.group.ranks)
            if experts != mine:
                raise BadInput("experts", repr(experts), f"{mine!r}, those of this rank of the group")
        self.global_ranks = [] if self.group is None or self.group.ranks == 1 else self.group.global_ranks()
        self._meshes: dict[str, DeviceMesh] = {}
        if self.global_ranks:
            _allow_loading()

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.ranks

    def has_entry_each(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is `[E/R, ...]`."""
        return tensor.ndim > 0 and len(tensor) == len(self.experts)

    def pack(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a weight `[E/R, ...]` of this rank for a state dict: a DTensor of all ranks, where they are processes.

        Raises:
            Unsupported: the weight is a DTensor already, as FSDP2 makes one; or it has another shape.
        """
        if is_dtensor(tensor):
            raise Unsupported("a state dict of experts whose weights are DTensors: leave them out of fully_shard()")
        if (self.global_ranks or self.extra() is not None) and not self.has_entry_each(tensor):
            raise Unsupported(
                f"a state dict of experts with {name} of shape {tuple(tensor.shape)}: {self.want_entry_each()}"
            )
        if not self.global_ranks:
            return tensor
        from torch.distributed.tensor import DTensor, Shard

        assert self.num_experts is not None
        shape, stride = torch.Size((self.num_experts, *tensor.shape[1:])), tensor.stride()
        mesh = self._mesh_of(tensor.device.type)
        if not self._is_split_as_chunks():
            tensor = _with_offset(tensor, self.experts.start)
        return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def want_entry_each(self) -> str:
        """Return what parameters and buffers of experts must look like."""
        return (
            f"give it an entry for each of this rank's {len(self.experts)} experts along its first dimension, or put "
            "each expert in a torch.nn.ModuleDict under its number of all ranks, as in "
            "{str(expert): ... for expert in buffer.local_experts}"
        )

    def extra(self) -> dict[str, Any] | None:
        """Return the extra state, which names the experts of plain tensors; None where it is clear without."""
        if self.global_ranks or self.experts == range(self.num_experts or 0):
            return None
        return {"experts": [self.experts.start, self.experts.stop], "num_experts": self.num_experts}

    def unpack(self, name: str, value: torch.Tensor, extra: Any = None) -> torch.Tensor:
        """Return this rank's part `[E/R, ...]` of a weight in a state; a view if the state has other experts, too.

        Args:
            name: of the weight, for errors.
            value: a DTensor; a tensor `[E, ...]`; a tensor `[E/R, ...]`, which is taken for this rank's unless `extra`
                says another; another shape is returned as it is.
            extra: the extra state that was saved with it.

        Raises:
            BadInput: the state does not have all experts of this rank, or has another number of them.
        """
        if is_dtensor(value):
            value, has, total = local_of(name, value)
        elif extra is not None:
            has, total = _read_extra(name, value, extra)
        elif value.ndim and len(value) == self.num_experts:
            return value[self.experts.start : self.experts.stop]
        else:
            return value
        mine = self.experts
        if total is not None and self.num_experts is not None and total != self.num_experts:
            raise BadInput(name, f"a state of {total} experts", f"one of {self.num_experts}")
        if not has.start <= mine.start <= mine.stop <= has.stop:
            raise BadInput(
                name,
                f"a state of experts {_spelled(has)}" + (f" of {total}" if total is not None else ""),
                f"experts {_spelled(mine)}, which this rank owns; {_SAVE}",
            )
        return value[mine.start - has.start : mine.stop - has.start]

    def check_own(self, name: str, weight: torch.Tensor) -> None:
        """Check that a weight has this rank's experts alone.

        Raises:
            BadInput: it has another number of experts, such as all of a state dict, with which functional_call() runs.
        """
        if len(weight) != len(self.experts):
            raise BadInput(
                name,
                f"{len(weight)} experts, as states of all ranks have them",
                f"this rank's {len(self.experts)}: to functional_call(), pass dict(model.named_parameters())",
            )

    def is_mixed_by(self, ranks: Iterable[int]) -> bool:
        """Return whether any of these ranks of the default group owns other experts of the layer than this rank."""
        if self.group is None or not self.global_ranks:
            return False
        return any(rank in self.global_ranks and rank != self.global_ranks[self.group.rank] for rank in ranks)

    def _mesh_of(self, device: str) -> DeviceMesh:
        """Return the ranks as a DeviceMesh.  Makes no communication."""
        if device not in self._meshes:
            from torch.distributed.device_mesh import DeviceMesh

            assert isinstance(self.group, ProcessGroup)
            self._meshes[device] = DeviceMesh.from_group(self.group.process_group, device, mesh_dim_names=(_MESH_DIM,))
        return self._meshes[device]

    def _is_split_as_chunks(self) -> bool:
        """Return whether torch.chunk, by which DTensors are split, gives every rank the experts that it owns."""
        assert self.num_experts is not None
        return self.num_experts % self.ranks in (0, self.ranks - 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertShard:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.ranks > 1:
            refuse_pickle("experts with a process group")
        return super().__reduce_ex__(protocol)


def refuse_pickle(what: str) -> None:
    """Raise the error of an object that only this process can have."""
    want = f"its state_dict(); {_SAVE}.  Then load_state_dict() of a layer that each process makes"
    raise BadInput("layer", f"pickle or torch.save of {what}", want)


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor.  Does not import DTensors, which takes long."""
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh") and hasattr(value, "placements")


def is_packed(value: Any) -> bool:
    """Return whether `value` is a DTensor of experts in a state, and not one of FSDP2."""
    return is_dtensor(value) and value.device_mesh.mesh_dim_names == (_MESH_DIM,)


def _spelled(experts: range) -> str:
    return str(experts.start) if len(experts) == 1 else f"{experts.start} to {experts.stop - 1}"


def _allow_loading() -> None:
    """Have torch.load take DTensors, and shards with an offset; it refuses classes that a process has not imported."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    shard = (metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.TensorStorageMetadata)
    formats = metadata._MEM_FORMAT_ENCODING
    torch.serialization.add_safe_globals([LocalShardsWrapper, *shard, formats])
    if formats.TORCH_CONTIGUOUS_FORMAT.__reduce_ex__(2)[0] is getattr:
        # Python before 3.11.4 pickles members by getattr(), which torch.load refuses; it may reach anything.
        setattr(formats, "__reduce_ex__", lambda self, _: (type(self), (self.value,)))  # noqa: B010


def _with_offset(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Wrap a shard with its offset, for splits that DTensors can't express.

    torch.distributed.checkpoint reads the offset.  Operators of torch that would need it raise NotImplementedError.
    """
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    return LocalShardsWrapper([tensor], [(first, *[0] * (tensor.ndim - 1))])


def local_of(name: str, value: Any) -> tuple[torch.Tensor, range, int | None]:
    """Return the local tensor of a DTensor, its experts, and how many there are.

    A DTensor that was loaded from a file has the coordinates of the rank that saved it.
    """
    local, total = value.to_local(), len(value)
    if hasattr(local, "local_shards"):
        (shard,), (offset,) = local.local_shards(), local.local_offsets()
        return shard, range(offset[0], offset[0] + len(shard)), total
    has = range(total)
    coordinates = value.device_mesh.get_coordinate()
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if coordinates is None or not placement.is_shard(0) or len(has) != total:
            raise BadInput(name, f"a DTensor placed {tuple(value.placements)}", "one that is sharded along the experts")
        chunk = -(-total // value.device_mesh.size(dim))
        first = min(coordinates[dim] * chunk, total)
        has = range(first, min(first + chunk, total))
    if len(local) != len(has):
        raise BadInput(name, f"{len(local)} experts in a shard of {len(has)}", "shards as torch.chunk makes them")
    return local, has, total


def _read_extra(name: str, value: torch.Tensor, extra: Any) -> tuple[range, int | None]:
    try:
        first, stop = extra["experts"]
        has, total = range(first, stop), extra["num_experts"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(name, f"extra state {extra!r}", "the extra state of Experts") from error
    if value.ndim == 0 or len(value) != len(has):
        raise BadInput(name, f"shape {tuple(value.shape)} for experts {_spelled(has)}", f"[{len(has)}, ...]")
    return has, total
