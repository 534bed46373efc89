"""The C++ kernels as a shared library: that of the wheel, or compiled when first needed and kept in the user's cache.

The sources in ``source/`` use C++ and OpenMP alone, no headers of torch: they compile in seconds, and are called
through ctypes with addresses and sizes. In the cache a library's name tells the kind of CPU that it is for, and a
checksum of its content, which is compared before it is loaded. Where none can be built, :func:`library` warns once and
returns None.

Files beside it keep figures that were measured on this machine. They are data: only positive numbers under the expected
names are taken. A file appears whole or not at all, so several processes may write it; the last one's stays.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

from lightning_lowbit.atomic_files import being_written, put_in_place, remove
from lightning_lowbit.compilation import inform
from lightning_lowbit.kernels.cpu.cache import one_builder, read_trusted, shown, trusted
from lightning_lowbit.kernels.cpu.variants import FLAGS, SOURCE, checksum, cpu, library_of_wheel

# The most that a compiler takes is used. Some ARM compilers want -mcpu, and Apple's has no OpenMP.
_EXTRAS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-fopenmp"], [])

_LOADS = itertools.count()

# Of a folder or file that is missing or cannot be trusted or written, and of a user without a home.
_NO_FILE = OSError, RuntimeError

_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "lowbit_cast": (_P, _L, _L, _P, _P, _P, _P, _P, _P, _P, _P, _P, _I),
    "lowbit_gemm": (_P, _P, _P, _P, _I),
    "lowbit_instructions": (_P,),
    "lowbit_unpack": (_P, _L, _L, _P, _P, _P, _I, _I),
    "lowbit_amax": (_P, _I, _L, _L, _P, _P, _I),
    "lowbit_rotate": (_P, _I, _L, _L, _P, _P, _I),
    "lowbit_delayed_amax": (_P, _P, _P, _I, _P),
    "lowbit_add_patches": (_P, _I, _P, _L, _P, _I),
    "lowbit_scale_and_round": (_P, _I, _L, _L, _P, _I, _P, _I, _P, _I, _P, _I, _I),
}


@cache
def library() -> ctypes.CDLL | None:
    """Returns the loaded kernels; None, with one warning in the process, where they cannot be built or loaded."""
    kernels, error = _loaded()
    if kernels is None:
        warnings.warn(
            f"The C++ kernels cannot be built here ({error}). Casts run on slower code, with the same bits, and "
            "optimizers in plain torch. Install g++ or clang, or set CXX to a C++17 compiler and LOWBIT_CACHE_DIR to a "
            "folder to write to.",
            stacklevel=2,
        )
    return kernels


@cache  # apart from the warning, which may be an error: a second call must not build again
def _loaded() -> tuple[ctypes.CDLL | None, Exception | None]:
    if (kernels := _from_wheel()) is not None:
        return kernels, None
    try:
        return _from_cache(), None
    except subprocess.SubprocessError as error:  # the compiler, which would fail elsewhere, too
        return None, error
    except MemoryError:
        raise
    except Exception as error:  # of the system's loader, or of a library without our functions
        unusable = error
    try:
        with tempfile.TemporaryDirectory(prefix="lightning_lowbit_") as folder, trusted(Path(folder)) as opened:
            kernels = _build(opened)
    except MemoryError:
        raise
    except Exception as error:
        return None, error
    inform(
        f"lightning_lowbit has compiled its C++ kernels for this process alone, as no folder keeps them ({unusable}). "
        "Set LOWBIT_CACHE_DIR to a folder that is yours alone to write to."
    )
    return kernels, None


def _from_wheel() -> ctypes.CDLL | None:
    """Returns the kernels that the wheel has for this CPU; None for none, and for a file that is not loaded."""
    if (path := library_of_wheel()) is None:
        return None
    try:
        if not path.stem.endswith(checksum(path.read_bytes())):
            raise OSError(f"{path} is damaged")
        if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):  # the runtime that torch has loaded is not for all to see
            ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)
        return _bound(path)
    except OSError as error:
        inform(f"The C++ kernels of the wheel are not loaded ({error}): they are compiled.")
        return None


def _from_cache() -> ctypes.CDLL:
    """Returns the kernels of the cache, compiled if none of its libraries can be loaded."""
    with trusted(_folder()) as folder:
        kernels, damaged = _search(folder)
        if kernels is None:
            for path, reason in damaged.items():
                inform(f"{shown(path)} is not loaded ({reason}): the C++ kernels are compiled again.")
            with one_builder(folder / f"{_name()}.lock") as lock:
                kernels, damaged = _search(folder)  # another process may have compiled them
                for path in damaged:
                    remove(path)
                kernels = kernels or _build(folder, lock)
    return kernels


def _search(folder: Path) -> tuple[ctypes.CDLL | None, dict[Path, str]]:
    """Returns the first library of a trusted folder that can be loaded; and the damaged ones, with reasons.

    Several may be whole: in a folder that systems with different C libraries share, each loads its own.
    """
    damaged = dict[Path, str]()
    for path in sorted(folder.glob(f"{_name()}-*.so")):
        try:
            if path != _named(folder, read_trusted(path)):
                damaged[path] = "it is damaged"
                continue
        except FileNotFoundError:  # removed by another process
            continue
        except OSError as error:
            damaged[path] = error.strerror or str(error)
            continue
        with contextlib.suppress(OSError):
            return _bound(path), damaged
    return None, damaged


def _bound(path: Path) -> ctypes.CDLL:
    # For a path that it has seen the system's loader returns the library that it has: each is spelled anew.
    spelled = os.path.join(path.parent, *["."] * next(_LOADS), path.name)
    try:
        kernels = ctypes.CDLL(spelled)
        for name, arguments in _SIGNATURES.items():
            getattr(kernels, name).argtypes, getattr(kernels, name).restype = arguments, None
    except (OSError, AttributeError) as error:
        raise OSError(str(error).replace(spelled, shown(path))) from None
    return kernels


def _build(folder: Path, inherited: tuple[int, ...] = ()) -> ctypes.CDLL:
    """Compiles all sources into a file of a trusted folder, which appears there whole and loads, or not at all."""
    compiler = _compiler()
    inform("lightning_lowbit compiles its C++ kernels, once on this machine: this takes some seconds.")
    with being_written(folder / f"{_name()}.so") as file:
        for extra in _EXTRAS:
            # The folder's path is one of this process: the compiler starts within the folder.
            result = _compile([*compiler, *FLAGS, *extra], file.name, cwd=folder, pass_fds=inherited)
            if result.returncode == 0:
                break
        else:
            lines = result.stderr.strip().splitlines()
            raise RuntimeError(f"{compiler[0]} failed: {[f'status {result.returncode}', *lines][-1]}")
        try:
            kernels = _bound(file)
        except OSError as error:
            raise RuntimeError(f"{compiler[0]} made no library that loads: {error}") from None
        file.chmod(0o755)
        put_in_place(file, _named(folder, file.read_bytes()))
    return kernels


def _compile(command: list[str], target: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Compiles the sources side by side, and links them. Returns the last process, or the first one that failed."""
    run = partial(subprocess.run, capture_output=True, text=True, errors="replace", timeout=600, **options)
    with tempfile.TemporaryDirectory(prefix="lightning_lowbit_") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {source: os.path.join(folder, f"{source.stem}.o") for source in sorted(SOURCE.glob("*.cpp"))}
        steps = [[*command, "-c", str(source.resolve()), "-o", file] for source, file in objects.items()]
        failures = [result for result in pool.map(run, steps) if result.returncode != 0]
        return failures[0] if failures else run([*command, *objects.values(), "-o", target])


def _compiler() -> list[str]:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        for program, *arguments in ([name], name.split() or [name]):  # such as "ccache g++"
            if (path := shutil.which(program)) is not None:
                return [os.path.abspath(path), *arguments]
    raise RuntimeError("no C++ compiler was found")


@cache
def _name() -> str:
    """Returns the beginning of libraries' names: a hash of sources, flags and CPU, whichever compiler made them."""
    parts = [*(path.read_bytes() for path in sorted(SOURCE.iterdir())), cpu().encode()]
    digest = hashlib.sha256(b"\0".join([*parts, repr((FLAGS, _EXTRAS)).encode()])).hexdigest()
    return f"kernels-{digest[:20]}"


def _named(folder: Path, content: bytes) -> Path:
    """Returns the path of a library, whose name ends with a checksum of its content: both appear at once."""
    return folder / f"{_name()}-{checksum(content)}.so"


def _folder() -> Path:
    """Returns the folder that keeps libraries; a ``RuntimeError`` if it is that of a user without a home."""
    if chosen := os.environ.get("LOWBIT_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_lowbit"


def write_figures(name: str, figures: Mapping[str, float]) -> None:
    """Writes figures for all processes of this machine, if a folder keeps them.

    Args:
        name: what they depend on besides the library, for the name of the file.
        figures: positive numbers by their names.

    Examples:
        >>> write_figures("torch2.13.0-2", {"seconds": 0.002})
    """
    with contextlib.suppress(*_NO_FILE), trusted(_folder()) as folder:
        path = folder / f"{_name()}-{name}.json"
        with being_written(path) as file:
            file.write_text(json.dumps({field: float(figure) for field, figure in figures.items()}))
            file.chmod(0o644)
            put_in_place(file, path)


def read_figures(name: str, fields: Sequence[str]) -> dict[str, float] | None:
    """Returns the figures that :func:`write_figures` has written; None for none, or other ``fields``."""
    content = b""
    with contextlib.suppress(*_NO_FILE), trusted(_folder()) as folder:
        content = read_trusted(folder / f"{_name()}-{name}.json")
    try:
        figures = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(figures, dict) or set(figures) != set(fields):
        return None
    is_valid = all(isinstance(figure, float) and 0 < figure < inf for figure in figures.values())
    return figures if is_valid else None
