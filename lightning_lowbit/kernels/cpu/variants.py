"""How the C++ kernels are compiled, and the libraries that a wheel brings along: one for each kind of CPU.

The sources tell these instruction sets apart and no others, so a library of the wheel computes with all that they would
use on its CPU. The module imports nothing but the standard library: what builds the wheels reads its tables.
"""

import contextlib
import hashlib
import platform
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "source"
_LIBRARIES = Path(__file__).parent / "libraries"

# No contraction of a * b + c into one rounding: results equal those of separate operations to the bit. Floating-point
# traps are not used, so GCC may compute both sides of a condition: else AVX2 and NEON have no vector code for it.
_NUMERICS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = ["-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", *_NUMERICS]


class Variant(NamedTuple):
    """An instruction set: the compiler's flags for it, and how ``/proc/cpuinfo`` names what it needs."""

    flags: str
    features: str


_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_V4 = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"

# By machine and name; the first one that a CPU runs is the best for it.
VARIANTS = {
    "x86_64": {
        "avx512_vnni": Variant("-march=x86-64-v4 -mavx512vnni", f"{_V4} avx512_vnni"),
        "avx512": Variant("-march=x86-64-v4", _V4),
        "avx_vnni": Variant("-march=x86-64-v3 -mavxvnni", f"{_V3} avx_vnni"),
        "avx2": Variant("-march=x86-64-v3", _V3),
    },
    "aarch64": {
        "neon_dot_products": Variant("-march=armv8.2-a+dotprod", "asimd atomics asimdrdm crc32 asimddp"),
        "neon": Variant("-march=armv8-a", "asimd"),
    },
}


def cpu() -> str:
    """Describes the kind of CPU: on Linux by its instruction sets."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
    return f"{platform.machine()} {platform.processor()}"


def checksum(content: bytes) -> str:
    """Returns what names of libraries end with: a file that lacks a part would end the process that loads it."""
    return hashlib.sha256(content).hexdigest()[:32]


def library_of_wheel(folder: Path = _LIBRARIES, features: Collection[str] | None = None) -> Path | None:
    """Returns the library of the wheel for a CPU; None where it has none, as in the sources and on other systems.

    Args:
        folder: of the libraries, each named by its variant and its checksum.
        features: of the CPU, as ``/proc/cpuinfo`` names them; None for this one's.

    Examples:
        >>> library_of_wheel(features=["avx2"])  # of a CPU without the rest of x86-64-v3
    """
    features = set(cpu().split() if features is None else features)
    for variants in VARIANTS.values():
        for name, variant in variants.items():
            if features.issuperset(variant.features.split()):
                for path in folder.glob(f"{name}-*.so"):
                    return path
    return None
