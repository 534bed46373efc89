"""A picture in SVG that reads on light and dark pages, and on a phone: 440 units wide, no text below 13."""

from html import escape

WIDTH = 440
PAD = 16

# Colors by what they mean: light page, dark page. x, w and g are the operands.
COLORS = {
    "paper": ("#ffffff", "#1f2129"),
    "ink": ("#1f2328", "#e6e8ee"),
    "soft": ("#57606a", "#a3a9b8"),
    "line": ("#c4cad1", "#4a4f5e"),
    "x": ("#1f6feb", "#79b0ff"),
    "w": ("#b35900", "#f0a35e"),
    "g": ("#1a7f37", "#63cf80"),
    "error": ("#cf222e", "#ff8078"),
}
_RULES = """\
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--ink)}
.soft{fill:var(--soft)}.bold{font-weight:600}.x{fill:var(--x)}.w{fill:var(--w)}.g{fill:var(--g)}.error{fill:var(--error)}
.code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}"""


class Canvas:
    """Collects shapes from top to bottom; ``svg`` is the file."""

    def __init__(self, title: str, description: str) -> None:
        self.title, self.description = title, description
        self.shapes: list[str] = []

    def text(
        self, x: float, y: float, text: str, kind: str = "", size: float = 13, anchor: str = "start", turn: float = 0
    ) -> None:
        """Writes a line, turned by degrees; ``kind`` are classes of the style: soft, bold, code, x, w, g, error."""
        names = f' class="{kind}"' if kind else ""
        side = "" if anchor == "start" else f' text-anchor="{anchor}"'
        turned = f' transform="rotate({_n(turn)} {_n(x)} {_n(y)})"' if turn else ""
        place = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
        self.shapes.append(f"<text {place}{side}{names}{turned}>{escape(text)}</text>")

    def box(
        self, x: float, y: float, width: float, height: float, color: str = "line", fill: float = 0, corner: float = 6
    ) -> None:
        """Draws a rectangle with a border; ``fill`` is the opacity of its inside."""
        self.shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(corner)}"'
            f' fill="var(--{color})" fill-opacity="{_n(fill)}" stroke="var(--{color})"/>'
        )

    def bar(
        self, x: float, y: float, width: float, height: float, color: str, fill: float = 1, corner: float = 2
    ) -> None:
        """Draws a rectangle without a border."""
        self.shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(corner)}"'
            f' fill="var(--{color})" fill-opacity="{_n(fill)}"/>'
        )

    def line(self, points: list[tuple[float, float]], color: str = "line", width: float = 1, dashes: str = "") -> None:
        """Draws a line through points."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="var(--{color})" stroke-width="{_n(width)}"{dashed}/>'
        )

    def area(self, points: list[tuple[float, float]], color: str, fill: float) -> None:
        """Fills a polygon."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.shapes.append(f'<polygon points="{path}" fill="var(--{color})" fill-opacity="{_n(fill)}"/>')

    def arrow(self, x: float, top: float, bottom: float) -> None:
        """Draws an arrow downwards."""
        self.line([(x, top), (x, bottom)], "soft", 1.5)
        self.line([(x - 5, bottom - 6), (x, bottom), (x + 5, bottom - 6)], "soft", 1.5)

    def dot(self, x: float, y: float, radius: float, color: str, fill: float = 1) -> None:
        """Draws a circle; ``fill`` is the opacity of its inside."""
        self.shapes.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="var(--{color})" fill-opacity="{_n(fill)}"'
            f' stroke="var(--{color})" stroke-width="1.5"/>'
        )

    def half(self, x: float, y: float, radius: float, color: str) -> None:
        """Draws a circle whose left half is filled."""
        self.dot(x, y, radius, color, 0)
        path = f"M{_n(x)},{_n(y - radius)} A{_n(radius)},{_n(radius)} 0 0 0 {_n(x)},{_n(y + radius)} Z"
        self.shapes.append(f'<path d="{path}" fill="var(--{color})"/>')

    def svg(self, height: float) -> str:
        """Returns the file."""
        schemes = ["".join(f"--{name}:{colors[i]};" for name, colors in COLORS.items()) for i in (0, 1)]
        light, dark = (f":root{{{scheme}}}" for scheme in schemes)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(height)}" width="560" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description)}</desc>",
                f"<style>\n{light}\n@media (prefers-color-scheme:dark){{{dark}}}\n{_RULES}\n</style>",
                f'<rect width="{WIDTH}" height="{_n(height)}" rx="8" fill="var(--paper)"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".") if number % 1 else str(int(number))
