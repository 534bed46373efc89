"""``lowbit inspect`` of what is no checkpoint: a table, or one line; never a traceback, and no code runs."""

import pytest
from matplotlib.figure import Figure

from tests.cli.inspect import damaged
from tests.cli.inspect.models import inspect


@pytest.mark.filterwarnings("ignore")  # what torch says of rare tensors
@pytest.mark.parametrize(
    "cases", [range(60), pytest.param(range(60, 2060), marks=pytest.mark.slow)], ids=["60", "2000"]
)
def test_whatever_is_given_the_answer_is_a_table_or_one_line(cases, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # takes longer than all else
    statuses = []
    for number in cases:
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        try:
            path = damaged.make(number, folder)
            status = inspect(path, "--casts=nvfp4")
        except BaseException as error:
            error.add_note(f"in the case {number}: {[*folder.iterdir()]}")
            raise
        said = capsys.readouterr()
        statuses.append(status)
        assert status in (0, 2), (number, said)
        assert status == 0 or len(said.err.strip().splitlines()) == 1, (number, path, said.err)
        assert "code ran" not in {entry.name for entry in folder.iterdir()}, number
        assert "Traceback" not in said.err
    assert {0, 2} == set(statuses)
