"""Draws the pictures of the documentation beside this file.

python -m docs.pictures.draw
"""

from pathlib import Path

from docs.pictures import cast, checkpoint, gemms, hardware, phases

PICTURES = {module.__name__.rsplit(".", 1)[-1]: module.draw for module in (gemms, cast, phases, hardware, checkpoint)}


def main() -> None:
    """Writes a file for each picture."""
    for name, draw in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
