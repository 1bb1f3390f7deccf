"""RoutingRecorder: writes down which experts the tokens of a program choose."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moecomm
from moecomm.base.arrays import as_tensor, check_tensor
from moecomm.base.layers import is_compiled
from moecomm.base.validation import MOST_SIZE, check_flag, check_integer
from moecomm.buffer import Buffer
from moecomm.dispatch import observers
from moecomm.errors import BadInput
from moecomm.rounds.rounds import Rounds
from moecomm.router import MODELS
from moecomm.routing.recorded import Recorded
from moecomm.routing.tape import Tape

log = logging.getLogger("moecomm")

_IDS = (torch.int64, torch.int32)
_WEIGHTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_LAYERS = 1 << 16


class RoutingRecorder:
    """A context manager that records `topk_idx` of dispatches, and writes one file per rank when it ends.

    It sees Buffer.dispatch, dispatch_begin and moe, moecomm.ops, nn.ExpertParallel and the adapters of frameworks. A
    dispatch along a handle repeats a routing, and is not recorded; nor is a replay of a CUDA graph, which runs no
    Python. With `overflow="drop"`, moecomm.ops and nn.ExpertParallel record -1 for entries that found no room.

    The host does not wait for the device: ids of GPUs go to pinned memory behind the dispatch's own work. A program
    that computes a forward pass twice, to save memory, is recorded twice.

    Args:
        path: the file. With several ranks "run.routing" becomes "run-rank3.routing".
        model: name of the model, for the header; one of moecomm.router.MODELS also sets `experts`.
        watch: Buffers, and torch modules whose nn.ExpertParallel layers are recorded under their names. None: every
            Buffer of this process. (): nothing but add(). Layers of a compiled module run no hooks: watch their Buffer.
        layers: calls of a Buffer that make up one pass through the model: call i is of layer i modulo `layers`. Layers
            of modules have names of their own.
        weights: also record `topk_weights`.
        experts: number of experts; default: that of the model, or of the first dispatch that is seen. Dispatches with
            another number are not recorded, nor those with another topk than the first.
        max_tokens: recording of a rank ends before the call that would exceed so many tokens. A token takes 2 bytes for
            each of its topk experts, 6 with weights (up to 32767 experts).

    Attributes:
        files: the files written, once the recorder has ended.

    Raises:
        BadInput: an argument that cannot be used; at the end, a file that cannot be written.
        Unsupported: from a dispatch or add() in the capture of a CUDA graph, before the round.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        model: str = "",
        watch: Buffer | torch.nn.Module | Sequence[Buffer | torch.nn.Module] | None = None,
        layers: int = 1,
        weights: bool = False,
        experts: int | None = None,
        max_tokens: int = 1 << 24,
    ) -> None:
        if not isinstance(model, str):
            raise BadInput("model", repr(model), "a name")
        check_integer("layers", layers, 1, _MOST_LAYERS)
        check_flag("weights", weights)
        check_integer("max_tokens", max_tokens, 1)
        if experts is not None:
            check_integer("experts", experts, 1, MOST_SIZE)
        self.files: list[Path] = []
        self._path = _writable(path)
        self._model, self._layers, self._weights, self._max_tokens = model, int(layers), weights, int(max_tokens)
        self._experts = MODELS[model].num_experts if experts is None and model in MODELS else experts
        self._topk: int | None = None
        self._watched = _watched(watch)
        self._tapes: dict[int, Tape] = {}
        self._others = 0  # dispatches of another shape
        self._lock = threading.Lock()
        self._thread = threading.local()  # .layer: the module whose forward pass this thread is in
        self._running = ExitStack()

    def __enter__(self) -> RoutingRecorder:
        self._running.enter_context(observers.observing(self._saw))
        for name, layer in self._modules():
            before = layer.register_forward_pre_hook(partial(self._enter_layer, name))
            after = layer.register_forward_hook(self._leave_layer, always_call=True)
            self._running.callback(before.remove)
            self._running.callback(after.remove)
        return self

    def __exit__(self, *raised: object) -> None:
        self._running.close()
        with self._lock:
            tapes, self._tapes = self._tapes, {}
        if not tapes:
            log.warning("%s: no routing was recorded, and no file is written", self._path)
        self.files += [self._written(tape) for tape in tapes.values()]

    def add(
        self, layer: str, topk_idx: Any, topk_weights: Any = None, *, rank: int | None = None, ranks: int | None = None
    ) -> None:
        """Record a routing that no Buffer sees, such as that of a model of another library.

        Args:
            layer: name of the layer.
            topk_idx: int64 or int32 `[T, K]`; -1 chooses none.
            topk_weights: floating `[T, K]`, recorded with `weights=True`; None: every weight is 1.
            rank, ranks: default: those of torch.distributed, or 0 of 1.

        Raises:
            BadInput: tensors that are no routing; ids of no expert (CPU tensors; those of a GPU are left out).
            Unsupported: in the capture of a CUDA graph.
        """
        if not isinstance(layer, str):
            raise BadInput("layer", repr(layer), "a name")
        if self._experts is None:
            raise BadInput("experts", "None", "RoutingRecorder(experts=), or a model of moecomm.router.MODELS")
        ids = as_tensor("topk_idx", topk_idx)[0].detach()
        check_tensor("topk_idx", ids, device=ids.device, dtypes=_IDS, shape=(None, self._topk))
        if ids.shape[1] < 1:
            raise BadInput("topk_idx", tuple(ids.shape), "one expert of a token, or more")
        weights = self._weights_of(ids, topk_weights)
        if weights is not None:
            check_tensor("topk_weights", weights, device=ids.device, dtypes=_WEIGHTS, shape=tuple(ids.shape))
        if not ids.is_cuda and ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < self._experts:
            raise BadInput("topk_idx", f"ids from {int(ids.min())} to {int(ids.max())}", f"-1 to {self._experts - 1}")
        here = (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)
        place = tuple(own if given is None else given for given, own in zip((rank, ranks), here, strict=True))
        check_integer("ranks", place[1], 1, MOST_SIZE)
        check_integer("rank", place[0], 0, place[1] - 1)
        with self._lock:
            self._topk = ids.shape[1]
            self._add(self._tape(*place), layer, ids, weights)

    def _saw(self, rounds: Rounds, topk_idx: Any, topk_weights: Any) -> None:
        """Record a dispatch that is about to run; called by every dispatch of the process."""
        name = getattr(self._thread, "layer", None)
        if name is None and not self._watches(rounds):
            return
        ids = as_tensor("topk_idx", topk_idx)[0].detach()
        weights = self._weights_of(ids, topk_weights)
        if ids.dtype not in _IDS or ids.ndim != 2 or ids.shape[1] != rounds.topk:
            return  # the round says what is wrong
        if weights is not None and weights.shape != ids.shape:
            return
        if rounds.experts.ids is not None:  # the ids that callers know, and not those of the experts that are left
            ids = rounds.experts.ids.names(ids)
        with self._lock:
            experts = rounds.experts.count
            self._experts = experts if self._experts is None else self._experts
            self._topk = ids.shape[1] if self._topk is None else self._topk
            if (experts, ids.shape[1]) != (self._experts, self._topk):
                self._others += 1
                return
            tape = self._tape(rounds.rank, rounds.num_ranks)
            if name is None:
                number, calls = tape.turn_of(rounds)
                name = f"buffer{number}" if self._layers == 1 else f"buffer{number}.{calls % self._layers}"
            self._add(tape, name, ids, weights)

    def _add(self, tape: Tape, layer: str, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
        if tape.tokens + len(ids) > self._max_tokens and not tape.full:
            log.warning("rank %d: %d tokens are recorded, and no more will be", tape.rank, tape.tokens)
            tape.full = True
        if not tape.full:
            tape.add(layer, ids, weights)

    def _tape(self, rank: int, ranks: int) -> Tape:
        """Return the tape of a rank.

        A process with one tape keeps it when ranks are numbered anew, or in another group: two processes must not write
        the same file.
        """
        assert self._experts is not None
        if len(self._tapes) == 1:
            (tape,) = self._tapes.values()
            if tape.ranks != ranks:
                return tape
        return self._tapes.setdefault(rank, Tape(rank, ranks, self._experts))

    def _weights_of(self, ids: torch.Tensor, topk_weights: Any) -> torch.Tensor | None:
        if not self._weights:
            return None
        if topk_weights is None:
            return torch.ones(ids.shape, device=ids.device)
        return as_tensor("topk_weights", topk_weights)[0].detach()

    def _watches(self, rounds: Rounds) -> bool:
        if self._watched is None:
            return True
        return any(isinstance(thing, Buffer) and thing.rounds is rounds for thing in self._watched)

    def _modules(self) -> list[tuple[str, torch.nn.Module]]:
        modules = [thing for thing in self._watched or () if isinstance(thing, torch.nn.Module)]
        layers = [item for module in modules for item in module.named_modules() if _is_layer(item[1])]
        return [(name or "layer", layer) for name, layer in layers]

    def _enter_layer(self, name: str, *call: object) -> None:
        self._thread.layer = name

    def _leave_layer(self, *call: object) -> None:
        self._thread.layer = None

    def _written(self, tape: Tape) -> Path:
        assert self._experts is not None
        assert self._topk is not None
        records, ids, weights = tape.finish(self._topk, self._weights)
        if tape.invalid or self._others:
            log.warning(
                "rank %d: not recorded: %d calls with ids of no expert, %d dispatches with other experts or topk",
                *(tape.rank, tape.invalid, self._others),
            )
        found = Recorded(
            self._experts,
            self._topk,
            tuple(tape.layers),
            records,
            ids,
            weights,
            self._model,
            rank=tape.rank,
            ranks=tape.ranks,
            notes={"moecomm": moecomm.__version__, "torch": str(torch.__version__)},
        )
        return found.save(file_of(self._path, tape.rank, tape.ranks))


def file_of(path: Path, rank: int, ranks: int) -> Path:
    """Return the file of a rank."""
    return path if ranks == 1 else path.with_name(f"{path.stem}-rank{rank}{path.suffix}")


def _is_layer(module: torch.nn.Module) -> bool:
    from moecomm.nn import ExpertParallel  # registering operators takes a while

    return isinstance(module, ExpertParallel)


def _watched(watch: Any) -> tuple[Buffer | torch.nn.Module, ...] | None:
    if watch is None:
        return None
    things = tuple(watch) if isinstance(watch, (list, tuple)) else (watch,)
    for thing in things:
        if not isinstance(thing, (Buffer, torch.nn.Module)):
            raise BadInput("watch", type(thing).__name__, "Buffers and torch modules")
        if isinstance(thing, torch.nn.Module) and not any(map(_is_layer, thing.modules())):
            raise BadInput("watch", type(thing).__name__, "a module with a layer of nn.ExpertParallel; else use add()")
        if isinstance(thing, torch.nn.Module) and any(map(is_compiled, thing.modules())):
            raise BadInput("watch", "a compiled module, whose layers run no hooks", "watch=layer.open() with layers=")
    return things


def _writable(path: str | Path) -> Path:
    """Create the folder of the files, so that a recording cannot be lost."""
    try:
        found = Path(path)
        found.parent.mkdir(parents=True, exist_ok=True)
        fine = bool(found.name) and not found.is_dir() and "\0" not in found.name
        why = "" if os.access(found.parent, os.W_OK) else "no permission"
    except (OSError, TypeError, ValueError) as error:
        fine, why = False, str(error)
    if not fine or why:
        raise BadInput("path", repr(path), f"a file that can be written{why and f' ({why})'}")
    return found
