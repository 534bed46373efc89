"""The command: what it writes and draws, and in a rehearsal that it reports what goes wrong, and goes on."""

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_lowbit.compilation import backend
from lightning_lowbit.nn.native.devices import declared
from tests.gpu import page, records
from tests.gpu.parts import native
from tests.gpu.table import PARTS, Wrong
from tests.nn.native.stand_in import StandIn
from tests.tables import each

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_command_draws():
    drawn = page.page(page.RUN)
    assert page.PAGE.read_text() == drawn, "python -m tests.gpu.page > docs/results/gpu.md"


def test_the_page_draws_what_a_run_has_measured_and_what_is_wrong(tmp_path):
    log = records.Log(tmp_path, "environment")
    log.end("versions", None, {"torch": "2.13", "triton": "3.7", "Python": "3.12"})
    log.end("GPU", None, {"name": "H100"})
    log = records.Log(tmp_path, "layers")
    log.end("2048: nvfp4", None, {"its speed by nn.Linear": 0.5, "speed by nn.Linear": 0.7})
    log.end("4096: nvfp4", None, {"its speed by nn.Linear": 0.125, "speed by nn.Linear": 1.0, "peak by nn.Linear": 2.0})
    for way, seconds in (("int8, one by one", 8.0), ("F.grouped_mm", 0.5)):
        log.end(f"64 experts: {way}", None, {"both passes, ms": seconds})
    log = records.Log(tmp_path, "steps")
    for way, seconds in (("a", 1.5), ("a, in a CUDA graph", float("inf"))):
        log.end(f"{way}: mxfp8", None, {"ms": seconds, "tokens/s": 5, "launches": 3})
    log.end("optimizer: SPAM", None, {"ms": 3.0, "launches": 110, "state bytes per weight": 8.0})
    log.end("optimizer: AdamW", False, why="no | end")
    text = page.page(log.path)
    assert "Run on H100, Python 3.12, torch 2.13, Triton 3.7: 0 checks right, 1 wrong." in text
    assert "| `nvfp4` | 0.50 | 0.12 |  | 0.70 | 1.00 |  | 2.0 |\n" in text
    assert "|  | one by one | grouped |\n| --- | --- | --- |\n| bf16 |  | 0.5 |\n| `int8` | 8.0 |  |\n" in text
    assert "|  | a | a, in a CUDA graph |\n| --- | --- | --- |\n| `mxfp8` | 1.5 | inf |\n" in text
    assert "| SPAM | 3.0 | 110 | 8.00 |\n" in text
    assert "- steps, `optimizer: AdamW`: no \\| end" in text


def test_the_page_says_that_nothing_has_run(tmp_path):
    text = page.page(tmp_path / "none")
    assert page.NOT_RUN in text and "|" not in text


def test_lines_that_were_cut_are_left_out(tmp_path):
    log = records.Log(tmp_path, "casts", 3)
    log.begin("one")
    log.begin("two")
    log.end("one", True)
    with open(log.path, "a") as file:
        file.write('{"part": "casts", "na')
    lines = records.lines_of(log.path)
    assert list(records.open_checks(lines, "casts", 3)) == ["two"]
    assert records.names_begun(lines, "casts") == {"one", "two"}
    assert [record["name"] for record in records.records_of(log.path)] == ["one"]


@each("name", PARTS)
def test_each_part_is_a_module(name):
    assert importlib.util.find_spec(f"tests.gpu.parts.{name}") is not None


def native_gemms(change=lambda product: product):
    """Compares exact sums by GEMMs that stand for those of tensor cores."""
    stand_in = StandIn()
    with (
        declared("cpu", {"nvfp4", "mxfp8", "fp8-blockwise"}),
        backend("eager"),
        patch("torch.nn.functional.scaled_mm", lambda *args, **options: change(stand_in(*args, **options))),
    ):
        for kind in ("nvfp4", "mxfp8", "fp8-blockwise"):
            native.to_the_bit(kind, kind, (33, 48, 17), torch.float32, torch.device("cpu"))


def test_native_gemms_with_exact_sums_are_the_emulated_ones():
    native_gemms()


def test_one_bit_of_a_native_gemm_is_found():
    def change(product):
        product.view(torch.int32).view(-1)[5] ^= 1
        return product

    with pytest.raises(Wrong, match=r"differs in \d+ of \d+"):
        native_gemms(change)


def rehearsed(folder, parts, plant="", patience=60):
    """Exit status and records of a rehearsal."""
    command = [sys.executable, "-m", "tests.gpu", "--out", folder, "--device", "cpu", "--budget", "1700"]
    command += ["--processes", "1", "--patience", str(patience), "--parts", *parts]
    environment = {**os.environ, "LOWBIT_GPU_PLANT": plant}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode < 100, done.stderr
    assert (folder / records.TABLES).read_text()
    assert set(json.loads((folder / records.SUMMARY).read_text())) == set(parts)
    return done.returncode, records.records_of(folder / records.RESULTS)


@pytest.mark.slow
def test_a_rehearsal_of_all_parts_finds_nothing_wrong(tmp_path):
    status, results = rehearsed(tmp_path / "out", list(PARTS), patience=200)
    assert [record for record in results if record["ok"] is False] == []
    assert status == 0
    assert {record["part"] for record in results if record["ok"] or record["value"]} == set(PARTS)
    assert not [record for record in results if "skipped: time" in record["why"]]


PLANTS = {
    "kernels:bit:dtypes": "differ",
    "compile:compile:0 ": "CompilationError",
    "native:hang:fp8-blockwise": "no end after",
    "native:death:grouped, mxfp4": "the process ended with status -6",
}


@pytest.mark.slow
def test_planted_faults_are_reported_and_the_rest_goes_on(tmp_path):
    parts = [name for name in PARTS if name in ("environment", "kernels", "compile", "native")]
    status, results = rehearsed(tmp_path / "out", parts, ";".join(PLANTS))
    wrong = [record for record in results if record["ok"] is False]
    for plant, why in PLANTS.items():
        part, _, words = plant.split(":")
        reported = [record for record in wrong if record["part"] == part and words in record["name"]]
        assert reported and all(why in record["why"] for record in reported), plant
        wrong = [record for record in wrong if record not in reported]
    assert not wrong and status == 3  # parts
    right = Counter(record["part"] for record in results if record["ok"] is True)
    assert min(right[part] for part in ("kernels", "compile", "native")) >= 2 and right["environment"] >= 1, right
