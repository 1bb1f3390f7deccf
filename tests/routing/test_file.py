"""Files of recorded routing: what is written is read, and what is no such file is refused by name."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moecomm.errors import BadInput
from moecomm.routing import Recorded, join
from moecomm.routing.tensors_file import read as read_tensors
from moecomm.routing.tensors_file import write

from ..few import few

IDS = torch.tensor([[0, 5], [-1, 2], [3, 3], [4, 1], [-1, -1]], dtype=torch.int16)
WEIGHTS = torch.tensor([[0.5, 0.5], [float("nan"), 1], [0.25, 0.75], [2, -1], [0, 0]])
RECORDS = torch.tensor([[0, 0, 2], [1, 0, 1], [0, 1, 0], [1, 1, 2]], dtype=torch.int32)
SMALL = Recorded(6, 2, ("a", "b"), RECORDS, IDS, WEIGHTS, "mixtral", rank=1, ranks=3, notes={"torch": "x"})


def same(a: Recorded, b: Recorded) -> None:
    for field in fields(Recorded):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
            assert left.shape == right.shape
        else:
            assert left == right


def changed(**other: Any) -> Recorded:
    return replace(SMALL, **other)


@pytest.mark.parametrize(
    "recorded",
    [
        SMALL,
        changed(topk_weights=None, model="", source="synthetic", rank=0, ranks=1, notes={}),
        changed(experts=40000, topk_idx=IDS.int() + 30000, layers=("", "é", "[bold]")),
        Recorded(4, 1, (), torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 1, dtype=torch.int16)),
    ],
)
def test_what_is_written_is_read(recorded: Recorded, tmp_path: Path) -> None:
    path = recorded.save(tmp_path / "x.routing")
    same(Recorded.load(path), recorded)
    assert os.listdir(tmp_path) == ["x.routing"]


def test_any_reader_of_safetensors_reads_it(tmp_path: Path) -> None:
    """The layout, byte by byte: length, JSON that ends at a multiple of 8, and tensors without gaps."""
    data = SMALL.save(tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0 and all(isinstance(text, str) for text in header.pop("__metadata__").values())
    end = 0
    for name, dtype, shape in (
        ("records", "I32", [4, 3]),
        ("topk_idx", "I16", [5, 2]),
        ("topk_weights", "F32", [5, 2]),
    ):
        begin, end = header[name]["data_offsets"]
        assert (header[name]["dtype"], header[name]["shape"]) == (dtype, shape)
        found = np.frombuffer(
            data[8 + length + begin : 8 + length + end], {"I32": "i4", "I16": "i2", "F32": "f4"}[dtype]
        )
        assert found.tobytes() == getattr(SMALL, name).numpy().tobytes()
    assert 8 + length + end == len(data)


def test_a_file_is_replaced_or_left_as_it_was(tmp_path: Path) -> None:
    path = SMALL.save(tmp_path / "x")
    before = path.read_bytes()
    with pytest.raises(KeyError):
        write(path, {}, {"double": np.zeros(3)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x"]
    with pytest.raises(BadInput, match="can be written"):
        SMALL.save(tmp_path / "none" / "x")


def refused(path: Path, why: str) -> None:
    with pytest.raises(BadInput, match=why) as caught:
        Recorded.load(path)
    assert caught.value.argument == "routing" and str(path) in str(caught.value)


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    data = SMALL.save(tmp_path / "x").read_bytes()
    for length in range(len(data)):
        (tmp_path / "x").write_bytes(data[:length])
        refused(tmp_path / "x", "header|lies at bytes|bytes behind")
    (tmp_path / "x").write_bytes(data + b"\0")
    refused(tmp_path / "x", "1 bytes behind")


def _header(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A small file with another header."""
    ids = np.zeros((1, 1), np.int16)
    metadata = {
        "format": "moecomm-routing",
        "format_version": "1",
        "model": "",
        "experts": "4",
        "topk": "1",
        "tokens": "1",
        "layers": '["a"]',
        "source": "recorded",
        "rank": "0",
        "ranks": "1",
    }
    header: dict[str, Any] = {
        "__metadata__": metadata,
        "records": {"dtype": "I32", "shape": [1, 3], "data_offsets": [0, 12]},
        "topk_idx": {"dtype": "I16", "shape": [1, 1], "data_offsets": [12, 14]},
    }
    data = np.array([0, 0, 1], np.int32).tobytes() + ids.tobytes()
    other = change(header)
    text = other if isinstance(other, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _meta(**other: str) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header["__metadata__"].update(other)


def _tensor(name: str, **other: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header[name].update(other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda header: b"\xff", "no JSON"),
        (lambda header: b"[" * 100_000, "no JSON"),
        (lambda header: b"[1]", "no JSON object"),
        (lambda header: b'{"a": NaN}', "no number"),
        (lambda header: b'{"a": 1, "a": 2}', "twice"),
        (lambda header: b'{"a": ' + b"9" * 5000 + b"}", "no JSON"),
        (lambda header: header.update(__metadata__=[]), "no map of strings"),
        (lambda header: header["__metadata__"].update(topk=1), "no map of strings"),
        (_meta(format="pt"), "no routing"),
        (lambda header: header.pop("__metadata__"), "no routing"),
        (_meta(format_version="2"), "version '2'"),
        (_meta(experts="0"), "experts '0'"),
        (_meta(experts="-1"), "experts '-1'"),
        (_meta(experts="1e3"), "experts '1e3'"),
        (_meta(experts="9" * 4000), "experts '9"),
        (_meta(experts="\u0664"), "experts"),
        (_meta(experts="40000"), "topk_idx is torch.int16"),
        (_meta(topk="2"), "topk_idx is"),
        (_meta(tokens="2"), "topk_idx is"),
        (_meta(rank="1"), "rank '1'"),
        (_meta(source="guess"), "source 'guess'"),
        (_meta(layers="[]"), "names no layer"),
        (_meta(layers="["), "list of different names"),
        (_meta(layers='["a", "a"]'), "list of different names"),
        (_meta(layers="{}"), "list of different names"),
        (_meta(layers="[" * 100_000), "list of different names"),
        (_tensor("topk_idx", dtype="I64"), "neither of I16"),
        (_tensor("topk_idx", dtype=[]), "neither of I16"),
        (_tensor("topk_idx", shape=[2, 1]), "shape"),
        (_tensor("topk_idx", shape=[1, 1, 1]), "no sizes"),
        (_tensor("topk_idx", shape=[-1, -1]), "no sizes"),
        (_tensor("topk_idx", shape=[True, 1]), "no sizes"),
        (_tensor("topk_idx", shape=[1]), "topk_idx is"),
        (_tensor("topk_idx", shape=[1 << 60, 0]), "no sizes"),
        (_tensor("topk_idx", data_offsets=[10, 12]), "lies at bytes"),
        (_tensor("topk_idx", data_offsets=[13, 15]), "lies at bytes"),
        (_tensor("topk_idx", data_offsets=[14, 12]), "has -2 bytes"),
        (_tensor("topk_idx", more=1), "does not have dtype"),
        (lambda header: header.update(topk_idx=3), "does not have dtype"),
        (lambda header: header.pop("topk_idx"), "bytes behind"),
        (lambda header: header.update(other=header.pop("topk_idx")), "tensors other, records"),
    ],
)
def test_headers_that_are_wrong_are_named(change: Callable[[Any], Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(_header(lambda header: None))
    Recorded.load(tmp_path / "x")
    (tmp_path / "x").write_bytes(_header(change))
    refused(tmp_path / "x", why)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"topk_idx": IDS + 1}, "from 0 to 6 of 6"),
        ({"topk_idx": IDS - 1}, "from -2 to"),
        ({"records": RECORDS - torch.tensor([0, 0, 1], dtype=torch.int32)}, "below 0"),
        ({"records": RECORDS + torch.tensor([1, 0, 0], dtype=torch.int32)}, "names no layer"),
        ({"records": RECORDS[1:]}, "records of 3 tokens, and 5"),
        ({"records": RECORDS[:, :2]}, "records is"),
        ({"topk_weights": WEIGHTS[:4]}, "topk_weights is"),
        ({"topk_idx": IDS.int()}, "topk_idx is torch.int32"),
    ],
)
def test_values_that_cannot_be_are_named(other: dict[str, Any], why: str, tmp_path: Path) -> None:
    refused(changed(**other).save(tmp_path / "x"), why)


@pytest.mark.parametrize("seed", few(range(20), 0, 1))
def test_mutated_bytes_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Bytes changed, cut out, doubled and inserted, in the header above all: no other error, and no wrong sizes."""
    rng = random.Random(seed)
    whole = _header(lambda header: None)
    words = [
        b"[",
        b"{",
        b'"',
        b"-1",
        b"0",
        b"1e999",
        b"null",
        b"I32",
        b"18446744073709551616",
        b"\xc3",
        b"\\ud800",
        b":",
    ]
    read = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at, length = rng.randrange(len(data)), rng.randint(1, 12)
            kind = rng.randrange(5)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + length]
            elif kind == 2:
                data[at:at] = data[at : at + length]
            elif kind == 3:
                data[at:at] = rng.choice(words)
            else:
                data[at : at + length] = rng.choice(words)
            data = data or bytearray(1)
        if rng.random() < 0.7 and len(data) > 8:  # a length that fits, so that the rest is looked at
            data[:8] = max(0, len(data) - 8 - rng.choice((14, 14, 14, 12, 0))).to_bytes(8, "little")
        try:
            (tmp_path / "x").write_bytes(data)
            metadata, arrays = read_tensors(tmp_path / "x")
        except BadInput:
            continue
        read += 1
        assert all(isinstance(text, str) for text in metadata.values())
        assert sum(array.nbytes for array in arrays.values()) <= len(data)
    assert read


@pytest.mark.parametrize("seed", few(range(10), 0))
def test_mutated_files_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    """A changed byte of the header or of the tensors: what is read has ids of experts, and records of its tokens."""
    rng, path = random.Random(seed), tmp_path / "x"
    whole, read = SMALL.save(path).read_bytes(), 0
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            found = Recorded.load(path)
        except BadInput:
            continue
        read += 1
        assert found.topk_idx.shape == (found.tokens, found.topk)
        assert int(found.topk_idx.min()) >= -1 and int(found.topk_idx.max()) < found.experts
        assert int(found.records[:, 2].sum()) == found.tokens == len(found.layer_of_token)
    assert read


def test_tokens_are_dealt_by_layer_and_step_and_begin_anew() -> None:
    order = [0, 1, 2, 3, 4]  # layer a: steps 0 (2 tokens) and 1 (none); layer b: steps 0 (1) and 1 (2)
    for tokens in (1, 2, 3, 7):
        for rank in range(4):
            ids, weights = SMALL.dealt(tokens, rank)
            wanted = [order[(rank * tokens + token) % 5] for token in range(tokens)]
            assert ids.dtype == torch.int64 and torch.equal(ids, IDS[wanted].long())
            assert torch.equal(weights.nan_to_num(9), WEIGHTS[wanted].nan_to_num(9))
    late = changed(records=RECORDS[[2, 1, 0, 3]], topk_weights=None)  # now b has the first token, a the next two
    late = replace(late, records=torch.tensor([[1, 0, 1], [0, 0, 2], [1, 1, 2]], dtype=torch.int32))
    ids, weights = late.dealt(5, 0)
    assert torch.equal(ids, IDS[[1, 2, 0, 3, 4]].long()) and torch.equal(weights, torch.full((5, 2), 0.5))
    with pytest.raises(BadInput, match="without tokens"):
        replace(SMALL, records=RECORDS[:0], topk_idx=IDS[:0]).dealt(1, 0)


def test_files_are_joined_by_the_names_of_layers() -> None:
    other = changed(layers=("b", "c"), rank=2, model="mixtral")
    both = join([SMALL, other])
    assert (both.layers, both.rank, both.ranks, both.model) == (("a", "b", "c"), 0, 1, "mixtral")
    assert both.records[:, 0].tolist() == [0, 1, 0, 1, 1, 2, 1, 2]
    assert torch.equal(both.topk_idx, torch.cat([IDS, IDS]))
    only = join([SMALL, other], "b")
    assert only.layers == ("b",) and only.records.tolist() == [[0, 0, 1], [0, 1, 2], [0, 0, 2], [0, 1, 0]]
    assert torch.equal(only.topk_idx, torch.cat([IDS[2:], IDS[:2]]))
    assert only.topk_weights is not None and len(only.topk_weights) == 5
    assert join([SMALL, changed(model="", source="synthetic")]).source == "synthetic"
    for wrong in (changed(experts=7), changed(topk_weights=None)):
        with pytest.raises(BadInput, match="as the first file"):
            join([SMALL, wrong])
    with pytest.raises(BadInput, match="layer"):
        join([SMALL], "d")
    with pytest.raises(BadInput, match="no recording"):
        join([])
