"""Loads of the library, as processes make them."""

import os
import subprocess
import sys
from pathlib import Path

from lightning_lowbit.kernels.cpu import casts, library

CAST = """
import torch
from lightning_lowbit import LinearCasts
from lightning_lowbit.kernels import kernel_support, quantize_operand
cast = LinearCasts.preset("mxfp8").fprop_x
print(*kernel_support([cast]).values(), quantize_operand(torch.ones(2, 16), cast, 1).values.sum().item())
"""


def start(folder, **environment):
    """A process that casts a matrix, with its cache in a folder."""
    environment = {**os.environ, "LOWBIT_CACHE_DIR": str(folder), **environment}
    return subprocess.Popen([sys.executable, "-c", CAST], env=environment, text=True, stdout=-1, stderr=-1)


def compiler_with(flags, folder):
    """The environment of a process whose kernels are compiled with further flags, and kept in a folder."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec g++ "$@" {flags}\n')
    compiler.chmod(0o755)
    return {**os.environ, "CXX": str(compiler), "LOWBIT_CACHE_DIR": str(folder)}


def forget():
    for function in (library.library, library._loaded, casts.cpp_cast):
        function.cache_clear()


def load():
    """The kernels, as in a process that has not loaded them yet."""
    forget()
    return library.library()


def calls():
    """How often the compiler was called since the last time."""
    path = Path("calls")
    number = len(path.read_text().splitlines()) if path.exists() else 0
    path.unlink(missing_ok=True)
    return number


def names(folder):
    return {path.suffix for path in folder.iterdir()}
