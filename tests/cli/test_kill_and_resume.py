"""Runs of the installed command that are killed again and again."""

import json
import os

import pytest

from tests.cli import kill_and_resume


@pytest.mark.slow
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path):
    """``LOWBIT_KILLS=50`` takes a quarter of an hour on two cores."""
    number = int(os.environ.get("LOWBIT_KILLS", "6"))
    kill_and_resume.main(str(tmp_path), str(number))
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["died"]) == number
    assert sum(where.startswith("save") for where in report["died"]) >= number // 3
    assert not report["differences"], report
