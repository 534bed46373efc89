"""The model card of an export, ``README.md``: casts, training, coverage, parity and versions."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_lowbit.export.formats.base import Format
from lightning_lowbit.export.source import Source
from lightning_lowbit.report.blocks import Table
from lightning_lowbit.report.tables import as_markdown

if TYPE_CHECKING:
    from lightning_lowbit.export.checkpoint import Exported

_PACKAGES = ("lightning_lowbit", "torch", "transformers", "compressed-tensors")
_SHOWN = 200  # rows of layers


def write_card(exported: "Exported", source: Source, format: Format, folder: Path) -> None:
    (folder / "README.md").write_text(card(exported, source, format))


def card(exported: "Exported", source: Source, format: Format) -> str:
    """The card as markdown."""
    total, few = exported.parameters
    facts = {name: source.facts.get(name) for name in ("checkpoint", "step", "phase", "casts", "tokenizer")}
    library = "pytorch" if source.config is None else "transformers"
    blocks = [
        f"---\nlibrary_name: {library}\ntags: [lightning_lowbit, quantized]\n---",
        f"# {exported.folder.name}",
        f"Trained in few bits with lightning_lowbit, and exported as `{format.name}` ({format.about}).",
        f"{few:,} of {total:,} parameters ({few / total:.0%}) are in few bits, those of {len(exported.rows)} layers; "
        "the rest is in high precision.",
        "## Training",
        _table(("", ""), [(name, value) for name, value in facts.items() if value is not None]),
        _table(("hyper-parameter", "value"), list(source.facts.get("hyper_parameters", {}).items())),
        _table(("of the run", ""), list(source.facts.get("run", {}).items())),
        "## Parity with the training",
        f"```text\n{exported.compared()}\n```",
        "## Layers",
        layers_table(exported),
        "## Versions",
        _table(("package", "version"), [(name, _version(name)) for name in _PACKAGES]),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def layers_table(exported: "Exported") -> str:
    """A row for each layer: its cast, its bytes, and how far its weight is from that of the training."""
    shown = exported.rows[:_SHOWN]
    rows = [(row.name, row.cast, f"{row.bytes:,}", f"{row.error:.3g}") for row in shown]
    table = _table(("layer", "weight", "bytes", "difference from the training"), rows)
    left = len(exported.rows) - len(shown)
    return f"{table}\n\n{left} more layers are left out here." if left else table


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    return as_markdown(Table(head, [[str(cell) for cell in line] for line in rows])) if rows else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
