"""Runs of recipes without the charts of their reports."""

import pytest

from lightning_lowbit.report import charts


@pytest.fixture(autouse=True)
def _no_charts(monkeypatch):
    """They have tests of their own, and drawing them takes a third of a run's time."""
    monkeypatch.setattr(charts, "_plot", lambda *_: "")
