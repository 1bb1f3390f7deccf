"""The word of a round header: every field comes back, and a difference in any is told by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from moecomm.rounds import signature

PLAIN, COMBINE = signature._PLAIN, signature._COMBINE
FIELDS = [
    *(("dispatch", name, bits) for name, bits, _ in PLAIN if name and name != "scales"),
    *(("dispatch", name, 20) for name in ("scale bytes", "expert_alignment")),
    *(("payload", name, bits) for name, bits, _ in signature._BYTES if name not in ("", signature._DIGEST)),
    *(("payload", name, 20) for name in ("row bytes", "scale bytes", "expert_alignment", "layer")),
    *(("combine", name, bits) for name, bits, _ in COMBINE),
]
OTHERS = {"layout": 1, "call": 1, "dtype": 2}
SPECIAL = {"dtype": signature.ROW_DTYPES, "scales": signature.SCALE_DTYPES}


@pytest.fixture(params=["known", "of another process"])
def knows(request: pytest.FixtureRequest) -> bool:
    """Whether the values of which a word has a digest are known here."""
    return request.param == "known"


def packed(knows: bool, monkeypatch: pytest.MonkeyPatch, *pair: tuple[str, Mapping[str, Any]]) -> tuple[int, int]:
    words = [signature.pack(op, **fields) for op, fields in pair]
    if not knows and signature._kind(words[0]) != signature._kind(words[1]):
        monkeypatch.delitem(signature._packed, signature._kind(words[1]), raising=False)
    return words[0], words[1]


def test_words_have_64_bits() -> None:
    for form in (*signature._FORMS, COMBINE):
        assert sum(bits for _, bits, _ in form) <= 64
    assert sum(bits for _, bits, _ in signature._CAST[:-1]) == signature.SCALE_SHIFT


@pytest.mark.parametrize(("op", "name", "bits"), FIELDS)
def test_a_difference_in_any_field_is_told(op: str, name: str, bits: int) -> None:
    argument = name.replace(" ", "_")
    last = min((1 << bits) - 1, len(SPECIAL[name]) - 1 if name in SPECIAL else 1 << 20)
    for mine, theirs in ((0, last), (last, 0), (1, last if bits > 1 else 0)):
        ours, their = (signature.pack(op, **{**OTHERS, argument: value}) for value in (mine, theirs))
        field, shown, others_shown = signature.difference(ours, their, op)
        assert field == name and shown != others_shown
        if bits > 5:
            assert (shown, others_shown) == (mine, theirs)
        for word, value in ((ours, mine), (their, theirs)):
            said = signature.shown(word, op)
            assert (name in said) == (value > 0 or name in ("layout", "dtype"))


def test_the_first_difference_is_which_call_it_is() -> None:
    word = signature.pack(layout=1, layer=3)
    assert signature.difference(word, signature.pack(layout=2, layer=4))[:1] == ("layer",)
    assert signature.difference(word, signature.pack(layout=2, layer=3, call=3)) == ("call", "dispatch", "moe")
    assert signature.shown(signature.pack("combine", call=1, layer=7), "combine") == {
        "layer": "7",
        "call": "moe",
        "layout": "flat",
        "dtype": "bfloat16",
    }


def test_every_call_has_a_value() -> None:
    for op, calls in (("dispatch", signature.DISPATCHES), ("combine", signature.COMBINES)):
        for number, call in enumerate(calls[1:], start=1):
            assert signature.shown(signature.pack(op, call=number), op)["call"] == call


def test_a_kind_of_scales_is_told_by_its_format_where_rows_are_cast() -> None:
    float32, ue8m0 = map(signature.SCALE_DTYPES.index, (torch.float32, torch.float8_e8m0fnu))
    pair = [signature.pack(quantize=1, scales=scales) for scales in (float32, ue8m0)]
    assert signature.difference(*pair) == ("scale_format", "fp32", "ue8m0")


@pytest.mark.parametrize("quantize", [0, 7])
def test_a_digest_tells_what_has_no_field(knows: bool, monkeypatch: pytest.MonkeyPatch, quantize: int) -> None:
    """Those of another process are told by the name of the digest, beside the values of this rank."""
    texts = ("int64 []", "float64 []", "int64 [2]", "", "int64 [], int64 []")
    for extras in texts[1:]:
        pair = [("payload", {"others": {"extras": text}, "quantize": quantize}) for text in (texts[0], extras)]
        ours, theirs = packed(knows, monkeypatch, *pair)
        assert ours != theirs
        field, mine, other = signature.difference(ours, theirs)
        if knows:
            assert (field, mine, other) == ("extras", "int64 []", extras)
        else:
            assert field == "payload" and "int64 []" in str(mine) and "another" in str(other)


def test_a_digest_beside_a_word_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = signature.pack("payload", {"extras": "int64 []"}), signature.pack(layer=0)
    assert signature.difference(ours, theirs) == ("extras", "int64 []", None)
    monkeypatch.delitem(signature._packed, ours)
    assert signature.difference(theirs, ours) == ("payload", "none", signature._ELSEWHERE)
    assert signature.difference(ours, theirs) == ("payload", "none", signature._ELSEWHERE)


def test_a_global_scale_is_told_with_both_values(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [("payload", {"quantize": 7, "others": {"extras": "int64 []"}})] * 2
    words = packed(knows, monkeypatch, *pair)
    ours, theirs = (word ^ signature.scale_word(scale) for word, scale in zip(words, (0.5, 448.0), strict=True))
    for sign in (0, 1 << 64):  # as the failure record has it: a signed integer
        assert signature.difference(ours, theirs - sign) == ("x_global_scale", 0.5, 448.0)
    other = signature.pack("payload", {"extras": "int64 [1]"}, quantize=7) ^ signature.scale_word(448.0)
    assert signature.difference(ours, other)[0] == "extras"


def test_many_digests_differ() -> None:
    """Of all widths of scales and extras; as many words as there are values."""
    words = {signature.pack("payload", scale_bytes=n) for n in range(4096)}
    words |= {signature.pack("payload", {"extras": f"uint8 [{n}]"}) for n in range(1, 4096)}
    assert len(words) == 2 * 4096 - 1
