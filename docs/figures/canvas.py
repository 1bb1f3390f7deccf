"""A small SVG canvas.  Colors are readable on white and on black, so that one picture serves both themes."""

from __future__ import annotations

from html import escape

RANKS = ("#2f6feb", "#c4571b", "#2e8b57", "#8a4fbf")  # one for each source rank; white text is readable on all
INK = "#7d8590"  # lines and text beside boxes: as far from white as from black
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


class Canvas:
    """Shapes in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{FONT}">\n<title>{escape(title)}</title>\n'
            f'<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker></defs>\n'
        )
        self._shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        color: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """One line; `y` is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        dash: str = "",
    ) -> None:
        """A rectangle with round corners."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" '
            f'stroke="{stroke}"{dashes}/>'
        )

    def label(self, x: float, y: float, width: float, height: float, text: str, fill: str, *, size: int = 13) -> None:
        """A filled box with white text in its middle."""
        self.box(x, y, width, height, fill=fill)
        self.text(
            x + width / 2, y + height / 2 + size * 0.36, text, size=size, color="#ffffff", anchor="middle", bold=True
        )

    def path(self, points: str, *, color: str = INK, width: float = 1.5, dash: str = "", arrow: bool = True) -> None:
        """An SVG path, with an arrowhead at its end."""
        end = ' marker-end="url(#head)"' if arrow else ""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(f'<path d="{points}" fill="none" stroke="{color}" stroke-width="{width:g}"{dashes}{end}/>')

    def svg(self) -> str:
        """The picture."""
        return self._head + "\n".join(self._shapes) + "\n</svg>\n"
