"""Figures beside the library: written once, whole, and never trusted beyond numbers."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from lightning_lowbit.kernels.cpu import library
from lightning_lowbit.kernels.cpu.library import read_figures, write_figures
from tests.tables import each

FIELDS = "native", "emulated"
FIGURES = {"native": 0.5, "emulated": 0.75}


def file(cache, name="2-threads"):
    return cache / f"{library._name()}-{name}.json"


def test_figures_are_read_as_they_were_written_under_each_name(cache):
    assert read_figures("2-threads", FIELDS) is None
    write_figures("2-threads", FIGURES)
    assert [path.name for path in cache.iterdir()] == [file(cache).name]
    write_figures("1-threads", {"native": 0.25, "emulated": 1.0})
    assert read_figures("2-threads", FIELDS) == FIGURES
    assert read_figures("4-threads", FIELDS) is None


DAMAGED = [
    b"",
    b'{"native": 0.5, "emul',
    b"\xff\xfe",
    b"[" * 100_000,
    b"[0.5, 0.75]",
    b'{"native": 0.5}',
    b'{"native": 0.5, "emulated": 0.75, "more": 1.0}',
    *(b'{"native": 0.5, "emulated": %s}' % n for n in (b"0.0", b"-1.0", b"NaN", b"1e999", b'"1"', b"true", b"[]")),
]


@each("content", DAMAGED)
def test_what_is_damaged_is_not_taken(cache, content):
    cache.mkdir(exist_ok=True)
    file(cache).write_bytes(content)
    assert read_figures("2-threads", FIELDS) is None
    write_figures("2-threads", FIGURES)
    assert read_figures("2-threads", FIELDS) == FIGURES


def test_a_file_that_others_can_write_or_a_link_is_not_taken(cache, tmp_path):
    write_figures("2-threads", FIGURES)
    file(cache).chmod(0o666)
    assert read_figures("2-threads", FIELDS) is None
    victim = file(cache).rename(tmp_path / "victim")
    victim.chmod(0o644)
    file(cache).symlink_to(victim)
    assert read_figures("2-threads", FIELDS) is None
    write_figures("2-threads", {"native": 0.25, "emulated": 1.0})
    assert json.loads(victim.read_text()) == FIGURES


def test_a_folder_that_keeps_nothing_is_left_alone(cache):
    cache.touch()
    write_figures("2-threads", FIGURES)
    assert read_figures("2-threads", FIELDS) is None
    cache.unlink()
    cache.mkdir()
    cache.chmod(0o777)  # open to others
    write_figures("2-threads", FIGURES)
    assert read_figures("2-threads", FIELDS) is None and not list(cache.iterdir())


def write_and_read(number):
    for _ in range(40):
        write_figures("2-threads", {"native": number, "emulated": number})
        figures = read_figures("2-threads", FIELDS)
        if figures is None or figures["native"] != figures["emulated"]:
            return figures or "torn"
    return "whole"


@pytest.mark.slow
def test_processes_that_write_at_once_leave_a_whole_file(cache):
    assert os.environ["LOWBIT_CACHE_DIR"] == str(cache)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        assert [*pool.map(write_and_read, (1.0, 2.0))] == ["whole", "whole"]
    assert {path.suffix for path in cache.iterdir()} == {".json"}
