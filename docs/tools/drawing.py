"""A few shapes of SVG, in a light and a dark palette."""

from __future__ import annotations

from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
PALETTES: dict[str, dict[str, str]] = {
    "light": {
        "text": "#1f2328",
        "muted": "#57606a",
        "line": "#57606a",
        "paper": "#ffffff",
        "gpu": "#ddf0ff",
        "gpu-line": "#2f7fc8",
        "host": "#ffeacc",
        "host-line": "#b86e00",
        "tail": "#d3f3da",
        "tail-line": "#1a7f37",
        "index": "#eadcff",
        "index-line": "#7443c9",
        "step": "#f0f2f4",
        "step-line": "#8c959f",
        "band-gpu": "#f3f9ff",
        "band-host": "#fff8ee",
    },
    "dark": {
        "text": "#e6edf3",
        "muted": "#a6b1bd",
        "line": "#a6b1bd",
        "paper": "#1e2129",
        "gpu": "#173a5e",
        "gpu-line": "#58a6ff",
        "host": "#4d3208",
        "host-line": "#e0a03c",
        "tail": "#153d22",
        "tail-line": "#4ac26b",
        "index": "#382560",
        "index-line": "#b48cff",
        "step": "#2d333b",
        "step-line": "#768390",
        "band-gpu": "#16222f",
        "band-host": "#2a2215",
    },
}


class Drawing:
    """Collects shapes; `svg` gives the file.

    Args:
        width: of the drawing in user units; height likewise.
        palette: "light" or "dark".
        title: what a screen reader says.
    """

    def __init__(self, width: int, height: int, palette: str, title: str) -> None:
        self.size, self.colours, self.title = (width, height), PALETTES[palette], title
        self.shapes: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str, radius: float = 6) -> None:
        """A filled rectangle in the colours of `kind`."""
        fill, line = self.colours[kind], self.colours[kind.removeprefix("band-") + "-line"]
        weight = 1 if kind.startswith("band") else 1.5
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{line}" stroke-width="{weight:g}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        bold: bool = False,
        colour: str = "text",
        anchor: str = "start",
    ) -> None:
        """One line of text whose baseline begins, is centred or ends at (x, y)."""
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight} '
            f'fill="{self.colours[colour]}">{escape(words)}</text>'
        )

    def lines(
        self, x: float, y: float, words: list[str], step: float = 17, **style: object
    ) -> None:
        """Several lines of text, the first at y."""
        for number, line in enumerate(words):
            self.text(x, y + number * step, line, **style)  # type: ignore[arg-type]

    def arrow(
        self,
        points: list[tuple[float, float]],
        colour: str = "line",
        dashed: bool = False,
        head: bool = True,
    ) -> None:
        """A line through points, with a head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        style = ' stroke-dasharray="5 4"' if dashed else ""
        end = f' marker-end="url(#{colour})"' if head else ""
        self.shapes.append(
            f'<path d="{path}" fill="none" stroke="{self.colours[colour]}" stroke-width="1.6"'
            f"{style}{end}/>"
        )

    def number(self, x: float, y: float, value: int) -> None:
        """A number in a circle, which the text of the page explains."""
        self.shapes.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="{self.colours["text"]}"/>'
            f'<text x="{x:g}" y="{y + 4.5:g}" font-size="13" font-weight="600" '
            f'text-anchor="middle" fill="{self.colours["paper"]}">{value}</text>'
        )

    def svg(self) -> str:
        """The whole file."""
        width, height = self.size
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L10 5 L0 10 z" '
            f'fill="{self.colours[name]}"/></marker>'
            for name in sorted(x for x in self.colours if x.endswith("line"))
        )
        body = "\n".join(self.shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="{FONT}">\n<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n'
            f"{body}\n</svg>\n"
        )
