"""The notebooks of the documentation run, hold outputs that say nothing of a machine, and read easily."""

import json
import re
from itertools import chain
from pathlib import Path

import pytest

from tests.tables import each

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
# What a run of each must print.
PRINTED = {
    "fine_tune_and_ship": r"Who are you\? +A small model\.",
    "pretrain": r"equal to the bit: True",
    "study_numerics": r"wgrad_x, stochastic +0\.0",
    "your_model": r"weights, largest difference: 0",
}
assert set(NOTEBOOKS) == set(PRINTED)


def cells(name, kind):
    """The cells of a kind, code or markdown, as the file has them."""
    return [cell for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"] if cell["cell_type"] == kind]


@each("name", NOTEBOOKS)
def test_all_cells_were_run_in_order_and_tell_no_folder_time_or_processor(name):
    code = cells(name, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = chain.from_iterable(cell["outputs"] for cell in code)
    texts = ["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs]
    assert re.search(PRINTED[name], "\n".join(texts))
    machine = r"(?<!\w)/(tmp|home|root|usr|work|Users|opt)/|\bit/s\b|tokens/s|this CPU|site-packages"
    assert not [text for text in texts if re.search(machine, text)]


@each("name", NOTEBOOKS)
def test_sentences_have_at_most_16_words_on_average_and_links_exist(name):
    prose = "\n\n".join("".join(cell["source"]) for cell in cells(name, "markdown"))
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", prose):
        assert (FOLDER / link).exists(), f"{name} links to {link}, which does not exist"
    lines = re.sub(r"```.*?```", "", prose, flags=re.DOTALL).splitlines()
    prose = "\n".join(line for line in lines if not line.startswith(("|", "#")))
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.:?])\s+", prose) if len(sentence.split()) > 1]
    assert sum(map(len, sentences)) / len(sentences) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_and_shows_what_it_holds(name, tmp_path):
    from docs.notebooks.run import executed

    shown = [[shape(output) for output in cell["outputs"]] for cell in cells(name, "code")]
    code = [cell for cell in executed(name, tmp_path).cells if cell.cell_type == "code"]
    assert [[shape(output) for output in cell.outputs] for cell in code] == shown
    printed = "\n".join(output.text for cell in code for output in cell.outputs if output.output_type == "stream")
    assert re.search(PRINTED[name], printed)


def shape(output):
    """The kind of an output, and of its data."""
    return output["output_type"], sorted(output.get("data", ()))
