"""Recorded: the routing of one rank, or of several, in memory and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moecomm.base.validation import MOST_SIZE, check_integer
from moecomm.errors import BadInput
from moecomm.routing import tensors_file
from moecomm.routing.tensors_file import refuse

RECORDED, SYNTHETIC = "recorded", "synthetic"

_FORMAT, _VERSION = "moecomm-routing", "1"
_MOST = (1 << 31) - 1  # of experts, ranks and tokens of a record
_MOST_TOPK = 1 << 10
_MOST_DIGITS = 18
_SHORT = (1 << 15) - 1  # most experts whose ids are stored in 16 bits


def id_dtype(experts: int) -> torch.dtype:
    """Return the dtype in which ids are stored."""
    return torch.int16 if experts <= _SHORT else torch.int32


@dataclass(frozen=True, eq=False)
class Recorded:
    """The experts that tokens of a model have chosen, call by call.

    Attributes:
        experts: number of experts.
        topk: K, experts of a token.
        layers: names of layers.
        records: int32 `[N, 3]` of (index into `layers`, step, tokens), a row for each call in order of time. The step
            is the number of earlier calls of the layer on the rank.
        topk_idx: int16 or int32 `[T, K]`: the tokens of all calls in this order; -1 chooses none.
        topk_weights: float32 `[T, K]`, or None where none were recorded.
        model: name of the model; "" if it is unknown.
        source: "recorded", or "synthetic" of synthesize().
        rank, ranks: the rank that was recorded, and how many there were; joined files have rank 0 of 1.
        notes: further entries of the header: versions; exponent and seed of a synthetic routing.
    """

    experts: int
    topk: int
    layers: tuple[str, ...]
    records: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None = None
    model: str = ""
    source: str = RECORDED
    rank: int = 0
    ranks: int = 1
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of all calls."""
        return len(self.topk_idx)

    @cached_property
    def layer_of_token(self) -> torch.Tensor:
        """int64 `[T]`: index into `layers`."""
        return self.records[:, 0].long().repeat_interleave(self.records[:, 2].long(), output_size=self.tokens)

    @cached_property
    def _by_layer(self) -> torch.Tensor:
        """int64 `[T]`: tokens in order of layer, step and time."""
        steps = self.records[:, 1].long()
        key = self.records[:, 0].long() * (int(steps.max()) + 1 if len(steps) else 1) + steps
        return key.repeat_interleave(self.records[:, 2].long(), output_size=self.tokens).argsort(stable=True)

    def dealt(self, tokens: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Deal tokens to a rank that has as many as every other rank.

        Tokens are in order of layer, then of step. Rank r gets those from r * `tokens` on; after the last comes the
        first again. So ranks have tokens of one layer as long as that has enough.

        Returns:
            topk_idx int64 `[tokens, K]` and topk_weights float32 `[tokens, K]`, 1/K each if none were recorded.

        Raises:
            BadInput: there are no tokens; arguments below 0.
        """
        check_integer("tokens", tokens, 0, MOST_SIZE)
        check_integer("rank", rank, 0, MOST_SIZE)
        if not self.tokens:
            raise BadInput("routing", "a file without tokens", "one with tokens to replay")
        wanted = self._by_layer[(torch.arange(tokens) + rank * tokens) % self.tokens]
        if self.topk_weights is None:
            return self.topk_idx[wanted].long(), torch.full((tokens, self.topk), 1 / self.topk)
        return self.topk_idx[wanted].long(), self.topk_weights[wanted]

    def save(self, path: str | Path) -> Path:
        """Write a file; returns its path. Raises BadInput if it cannot be written."""
        metadata = {
            **self.notes,
            "format": _FORMAT,
            "format_version": _VERSION,
            "model": self.model,
            "experts": str(self.experts),
            "topk": str(self.topk),
            "tokens": str(self.tokens),
            "layers": json.dumps(self.layers),
            "source": self.source,
            "rank": str(self.rank),
            "ranks": str(self.ranks),
        }
        arrays = {"records": self.records, "topk_idx": self.topk_idx, "topk_weights": self.topk_weights}
        try:
            tensors_file.write(Path(path), metadata, {name: t.numpy() for name, t in arrays.items() if t is not None})
        except (OSError, ValueError) as error:  # ValueError: a null byte in the name
            raise BadInput("routing", f"{str(path)!r}: {error}", "a file that can be written") from None
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Recorded:
        """Read a file. Raises BadInput that names what is wrong with it."""
        if not isinstance(path, (str, Path)):
            raise BadInput("routing", repr(path), "a path")
        return _checked(Path(path), *tensors_file.read(Path(path)))


def join(parts: Sequence[Recorded], layer: str | None = None) -> Recorded:
    """Join routings of the same model, such as those of several ranks; keep one layer only if one is named.

    Raises BadInput for different experts or topk, and for an unknown layer.
    """
    parts = list(parts) if isinstance(parts, Sequence) else []
    if not parts or not all(isinstance(part, Recorded) for part in parts):
        raise BadInput("parts", "no recording, or something else", "one or more of Recorded")
    first = parts[0]
    for part in parts:
        got, want = ((p.experts, p.topk, p.topk_weights is None) for p in (part, first))
        if got != want:
            raise BadInput("routing", _shape(part), f"{_shape(first)}, as the first file")
    layers = tuple(dict.fromkeys(name for part in parts for name in part.layers))
    if layer is not None and not (isinstance(layer, str) and layer in layers):
        raise BadInput("layer", repr(layer), f"one of {', '.join(layers)}")
    places = {name: place for place, name in enumerate(layers if layer is None else (layer,))}
    records, ids, weights = [], [], []
    for part in parts:
        table = torch.tensor([places.get(name, -1) for name in part.layers], dtype=torch.int32)
        renamed = part.records.clone()
        renamed[:, 0] = table[part.records[:, 0].long()]
        kept = table[part.layer_of_token] >= 0
        records.append(renamed[renamed[:, 0] >= 0])
        ids.append(part.topk_idx[kept])
        if part.topk_weights is not None:
            weights.append(part.topk_weights[kept])
    return replace(
        first,
        layers=tuple(places),
        records=torch.cat(records),
        topk_idx=torch.cat(ids),
        topk_weights=torch.cat(weights) if weights else None,
        model=first.model if all(part.model == first.model for part in parts) else "",
        source=RECORDED if all(part.source == RECORDED for part in parts) else SYNTHETIC,
        rank=0,
        ranks=1,
    )


def _shape(part: Recorded) -> str:
    return f"top-{part.topk} of {part.experts} experts, {'no ' if part.topk_weights is None else ''}weights"


def _checked(path: Path, metadata: dict[str, str], arrays: tensors_file.Arrays) -> Recorded:
    if metadata.get("format") != _FORMAT:
        refuse(path, "tensors that are no routing")
    if metadata.get("format_version") != _VERSION:
        refuse(path, f"version {metadata.get('format_version')!r} of the format (this moecomm reads {_VERSION})")
    experts = _whole(path, metadata, "experts", 1, _MOST)
    topk = _whole(path, metadata, "topk", 1, _MOST_TOPK)
    tokens = _whole(path, metadata, "tokens", 0, 1 << 48)
    ranks = _whole(path, metadata, "ranks", 1, _MOST)
    rank = _whole(path, metadata, "rank", 0, ranks - 1)
    if (source := metadata.get("source")) not in (RECORDED, SYNTHETIC):
        refuse(path, f"source {source!r}, which is neither {RECORDED} nor {SYNTHETIC}")
    layers = _names(path, metadata.get("layers", ""))
    if not {"records", "topk_idx"} <= set(arrays) <= {"records", "topk_idx", "topk_weights"}:
        refuse(path, f"tensors {', '.join(sorted(arrays))}")
    wanted = {
        "records": ((arrays["records"].shape[0] if arrays["records"].ndim else 0, 3), torch.int32),
        "topk_idx": ((tokens, topk), id_dtype(experts)),
        "topk_weights": ((tokens, topk), torch.float32),
    }
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        found[name] = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        if (tuple(found[name].shape), found[name].dtype) != wanted[name]:
            refuse(path, f"{name} is {found[name].dtype} {tuple(array.shape)}, not {wanted[name][1]} {wanted[name][0]}")
    _check_values(path, found["records"], found["topk_idx"], len(layers), experts, tokens)
    known = {"format", "format_version", "model", "experts", "topk", "tokens", "layers", "source", "rank", "ranks"}
    notes = {name: text for name, text in metadata.items() if name not in known}
    about: dict[str, Any] = {"model": metadata.get("model", ""), "source": source, "rank": rank, "ranks": ranks}
    return Recorded(experts, topk, layers, **found, **about, notes=notes)


def _check_values(
    path: Path, records: torch.Tensor, topk_idx: torch.Tensor, layers: int, experts: int, tokens: int
) -> None:
    if len(records) and (int(records.min()) < 0 or int(records[:, 0].max()) >= layers):
        refuse(path, "a record that names no layer, or is below 0")
    if (counted := int(records[:, 2].sum(dtype=torch.int64))) != tokens:
        refuse(path, f"records of {counted} tokens, and {tokens} tokens")
    if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < experts:
        refuse(path, f"expert ids from {int(topk_idx.min())} to {int(topk_idx.max())} of {experts} experts")


def _whole(path: Path, metadata: dict[str, str], name: str, least: int, most: int) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS and least <= int(text) <= most):
        refuse(path, f"{name} {text!r} in the header")
    return int(text)


def _names(path: Path, text: str) -> tuple[str, ...]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        refuse(path, "layers in the header that are no list of different names")
    return tuple(names)
