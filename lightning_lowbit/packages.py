"""The command that installs optional packages, for messages about missing ones."""

import re
import shlex
from importlib import metadata


def install(*packages: str) -> str:
    """``pip install 'onnx>=1.23' peft``: packages, with the versions that the metadata of this package ask for.

    The command never names this package with an extra: an index may hold another project of that name.

    Args:
        packages: names, of modules or as indexes write them.
    """
    try:
        requirements = metadata.requires("lightning_lowbit") or []
    except metadata.PackageNotFoundError:  # the sources, not installed
        requirements = []
    known = {_normal(re.split(r"[\[<>=!~; ]", line)[0]): line.partition(";")[0].strip() for line in requirements}
    return shlex.join(["pip", "install", *(known.get(_normal(name), name) for name in packages)])


def is_installed(package: str) -> bool:
    """Tells whether a package is installed, by its name on the index, without importing it."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
