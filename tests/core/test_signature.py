"""The word of a round header: every field comes back, and a difference in any is told by its name."""

from __future__ import annotations

import pytest

from moecomm.rounds import signature

FIELDS = [
    *(("dispatch", name, bits) for name, bits, _ in signature._SHORT_FORM if name),
    *(("dispatch", name, 20) for name in ("scale bytes", "expert_alignment")),
    *(("combine", name, bits) for name, bits, _ in signature._COMBINE),
]


@pytest.mark.parametrize("form", [signature._SHORT_FORM, signature._LONG_FORM, signature._COMBINE])
def test_words_have_63_bits(form: tuple[tuple[str, int, object], ...]) -> None:
    assert sum(bits for _, bits, _ in form) <= 63


@pytest.mark.parametrize(("op", "name", "bits"), FIELDS)
def test_a_difference_in_any_field_is_told(op: str, name: str, bits: int) -> None:
    argument = name.replace(" ", "_")
    last = (1 << bits) - 1
    others = {"layout": 1, "call": 1, "dtype": 2}
    for mine, theirs in ((0, last), (last, 0), (1, last if bits > 1 else 0)):
        ours, their = (signature.pack(op, **{**others, argument: value}) for value in (mine, theirs))
        field, shown, others_shown = signature.difference(ours, their, op)
        assert field == name and shown != others_shown
        if bits > 4:
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
