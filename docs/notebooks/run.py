"""Runs the notebooks and keeps their outputs, without what differs from machine to machine.

python -m docs.notebooks.run              runs all and writes them
python -m docs.notebooks.run your_model   runs one
"""

import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# What a program says of this machine: its folder, its CPU's speed.
OF_MACHINE = re.compile(r"(?:Native|Left out) on this CPU: .*?\n\n", re.DOTALL)


def executed(name: str, folder: Path, timeout: int = 170) -> nbformat.NotebookNode:
    """Returns a notebook with the outputs of a run in a folder; ``timeout`` are seconds for a cell."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    return cleaned(notebook, folder)


def cleaned(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Drops warnings, times and the folder from outputs."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.metadata, cell.execution_count = {}, number
        cell.outputs = _joined([output for output in cell.outputs if output.get("name") != "stderr"])
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = _neutral(output.text, folder)
            elif output.output_type == "execute_result":
                output.execution_count = number
    return notebook


def _neutral(text: str, folder: Path) -> str:
    return OF_MACHINE.sub("", text).replace(f"{folder}/", "")


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Joins texts that a program wrote one after the other."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main(names: list[str]) -> None:
    """Runs notebooks and writes them with their outputs."""
    for name in names or NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(name, Path(folder)), FOLDER / f"{name}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
