"""The C++ kernels as a shared library, compiled when first needed and kept in the user's cache.

The sources in ``source/`` use C++ and OpenMP alone, no headers of torch: they compile in seconds, and are called
through ctypes with addresses and sizes. A library is built for one compiler and one kind of CPU, which its name tells.
Where none can be built, :func:`library` warns once and returns None.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lightning_lowbit.compilation import tell

_SOURCE = Path(__file__).parent / "source"

# No contraction of a * b + c into one rounding: results equal those of separate operations to the bit. Floating-point
# traps are not used, so GCC may compute both sides of a condition: else AVX2 and NEON have no vector code for it.
_NUMERICS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", *_NUMERICS]

# The most that a compiler takes is used. Some ARM compilers want -mcpu, and Apple's has no OpenMP.
_EXTRAS: tuple[list[str], ...] = (["-march=native", "-fopenmp"], ["-mcpu=native", "-fopenmp"], ["-fopenmp"], [])


_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES = {
    "lowbit_cast": (_P, _L, _L, _P, _P, _P, _P, _P, _P, _P, _P, _I),
    "lowbit_unpack": (_P, _L, _L, _P, _P, _P, _I, _I),
    "lowbit_amax": (_P, _I, _L, _L, _P, _P, _I),
    "lowbit_rotate": (_P, _I, _L, _L, _P, _P, _I),
    "lowbit_delayed_amax": (_P, _P, _P, _I, _P),
    "lowbit_add_patches": (_P, _I, _P, _L, _L, _P, _I),
    "lowbit_finish": (_P, _I, _L, _L, _P, _I, _P, _I, _P, _I, _P, _I, _I),
}


@cache
def library() -> ctypes.CDLL | None:
    """The loaded kernels; None, with one warning in the process, where they cannot be built or loaded."""
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
    try:
        kernels = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return None, error
    for name, arguments in _SIGNATURES.items():
        getattr(kernels, name).argtypes, getattr(kernels, name).restype = arguments, None
    return kernels, None


def _built() -> Path:
    compiler = _compiler()
    name = f"kernels-{_fingerprint(compiler)}.so"
    for folder in _folders():
        if (folder / name).exists() and _is_own(folder / name):
            return folder / name
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _one_builder(folder / f"{name}.lock"):
                if not ((folder / name).exists() and _is_own(folder / name)):
                    tell("lightning_lowbit compiles its C++ kernels, once on this machine: this takes some seconds.")
                    _compile(compiler, folder / name)
            return folder / name
    raise OSError("no folder can be written: " + ", ".join(map(str, _folders())))


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if (found := shutil.which(name)) is not None:
            return found
    raise RuntimeError("no C++ compiler was found")


def _fingerprint(compiler: str) -> str:
    """A hash of everything that decides what the library holds and whether this CPU runs it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
    parts = [compiler.encode(), version, *(path.read_bytes() for path in sorted(_SOURCE.iterdir())), _cpu().encode()]
    return hashlib.sha256(b"\0".join([*parts, repr((_FLAGS, _EXTRAS)).encode()])).hexdigest()[:20]


def _cpu() -> str:
    """What tells one kind of CPU from another: on Linux the instruction sets."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
    return f"{platform.machine()} {platform.processor()}"


def _folders() -> list[Path]:
    """The folders in which a library may lie: the user's cache, and one of this user's for temporary files."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    chosen = os.environ.get("LOWBIT_CACHE_DIR") or Path(home) / "lightning_lowbit"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return [Path(chosen), Path(tempfile.gettempdir()) / f"lightning_lowbit_{user}"]


def _is_own(path: Path) -> bool:
    """Whether this user or the administrator wrote a file: code that somebody else left is never loaded."""
    return not hasattr(os, "getuid") or path.stat().st_uid in (0, os.getuid())


@contextlib.contextmanager
def _one_builder(path: Path) -> Iterator[None]:
    """Lets other processes wait while this one builds; the system frees the lock of a process that ends."""
    with path.open("w") as lock:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: Path) -> None:
    """Compiles all sources into ``target``, which appears whole or not at all."""
    sources = [str(path) for path in sorted(_SOURCE.glob("*.cpp"))]
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        for extra in _EXTRAS:
            command = [compiler, *_FLAGS, *extra, *sources, "-o", temporary]
            result = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if result.returncode == 0:
                os.replace(temporary, target)
                return
        raise RuntimeError(f"{' '.join(command)} failed: {result.stderr.strip().splitlines()[-1:]}")
    finally:
        Path(temporary).unlink(missing_ok=True)
