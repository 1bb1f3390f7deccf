"""The table of the most tokens that travel in packets."""

from pathlib import Path

from moecomm.tools.few_tokens import few_tokens, lines

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_the_document_has_the_table() -> None:
    rows = few_tokens()
    cells = [
        ["ranks", "memory", *rows[0].tokens],
        *([r.ranks, f"{r.nbytes >> 20} MiB", *r.tokens.values()] for r in rows),
    ]
    heading, *table = [f"| {' | '.join(map(str, row))} |" for row in cells]
    assert f"{heading}\n" in PAGE.read_text()
    assert "\n".join(table) in PAGE.read_text()


def test_128_tokens_go_in_packets_both_ways_at_64_ranks() -> None:
    widest = few_tokens()[-1]
    assert widest.ranks == 64 and widest.nbytes == 256 << 20
    assert widest.tokens["dispatch bf16"] >= 128 and widest.tokens["combine bf16"] >= 128
    assert len(lines([widest])) == 2
