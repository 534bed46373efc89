"""The wheel with libraries serves where there is no compiler, with the bits of compiled kernels."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_lowbit import __version__
from lightning_lowbit.kernels.cpu.variants import VARIANTS, library_of_wheel
from tests.kernels.gemms import products

ROOT = Path(__file__).parents[3]
MACHINE = platform.machine()
COMPILER = f"{MACHINE}-linux-gnu-g++"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("auditwheel") is None, reason="auditwheel is not installed"),
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed"),
]

CODE = """if True:
    import re
    from pathlib import Path
    from lightning_lowbit.kernels.cpu import library
    from tests.kernels.gemms import products
    sums = products.checksum(200)
    loaded = set(re.findall(r"/\\S*(?:lib[gi]?omp|/libraries/)\\S*", Path("/proc/self/maps").read_text()))
    print(Path(library.__file__).parents[3], sums, *sorted(loaded))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, ROOT / ".ci" / "wheels", folder, MACHINE], check=True, capture_output=True)
    wheel = folder / f"lightning_lowbit-{__version__}-py3-none-manylinux_2_28_{MACHINE}.whl"
    others = {f"lightning_lowbit-{__version__}{suffix}" for suffix in (".tar.gz", "-py3-none-any.whl")}
    assert {path.name for path in folder.iterdir()} == {wheel.name, *others}
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(site, folder, **environment):
    """Runs the code on a wheel, from a folder without sources; returns the process's output."""
    inherited = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment = {**inherited, "PYTHONPATH": f"{site}:{ROOT}", "LOWBIT_CACHE_DIR": f"{folder}/cache", **environment}
    process = subprocess.run([sys.executable, "-c", CODE], env=environment, cwd=folder, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process


def test_all_libraries_of_this_cpu_serve_without_a_compiler(site, tmp_path):
    folder, expected = site / "lightning_lowbit/kernels/cpu/libraries", products.checksum(200)
    assert {path.stem.split("-")[0] for path in folder.iterdir()} == VARIANTS[MACHINE].keys()
    served = []
    while (path := library_of_wheel(folder)) is not None:
        place, checksum, *loaded = run(site, tmp_path, PATH="").stdout.split()
        assert (place, checksum) == (str(site), expected), path
        assert str(path) in loaded and len(loaded) == 2, f"one library, and one OpenMP runtime: {loaded}"
        served.append(path)
        path.rename(path.with_suffix(".used"))
    for path in served:
        path.with_suffix(".used").rename(path)
    if not served:
        pytest.skip("a wheel has no library for this CPU")
    assert not (tmp_path / "cache").exists(), "nothing was compiled"


def test_a_damaged_library_of_the_wheel_is_compiled_anew(site, tmp_path):
    path = library_of_wheel(site / "lightning_lowbit/kernels/cpu/libraries")
    if path is None:
        pytest.skip("a wheel has no library for this CPU")
    path.write_bytes(path.read_bytes()[:1000])
    process = run(site, tmp_path)
    assert process.stdout.split()[1] == products.checksum(200)
    assert re.search(rf"of the wheel are not loaded \({path} is damaged\): they are compiled", process.stderr)
    assert list((tmp_path / "cache").glob("*.so"))
