"""Writing files of which there is never half."""

import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Writes a file such that there is never half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
