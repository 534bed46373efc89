"""The commands that install optional packages, for messages about missing ones."""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_NAME = "lightning_lowbit"
_MODULES = {"scikit-learn": "sklearn"}  # of packages whose name on the index is another


def install(*packages: str) -> str:
    """``pip install 'onnx>=1.23' peft``: packages, with the versions that the metadata of this package ask for.

    Args:
        packages: names, of modules or as indexes write them.
    """
    known = {_normal(line): line.partition(";")[0].strip() for line in _requirements()}
    return shlex.join(["pip", "install", *(known.get(_normal(name), name) for name in packages)])


def install_extra(package: str) -> str | None:
    """Returns the command that installs the extra of this package to which a package belongs, the first one that names
    it; None for all other packages.

    Examples:
        >>> install_extra("transformers")  # in a clone that was installed with `-e .`
        "pip install -e '/home/me/clone[recipes]'"
    """
    for line in _requirements():
        extra = re.search(r"""extra == ["'](\w+)["']""", line)
        if extra and _normal(line) == _normal(package):
            installed = metadata.distribution(_NAME)
            origin = json.loads(installed.read_text("direct_url.json") or "{}")
            return shlex.join(["pip", "install", *with_extra(extra[1], installed.version, origin)])
    return None


def with_extra(extra: str, version: str, origin: Mapping[str, Any]) -> list[str]:
    """Returns pip's arguments that add an extra to this package, as it was installed.

    Args:
        extra: its name.
        version: that is installed. Where the package came from an index, or what it came from is gone, it is named:
            pip then takes nothing else of this name for it, which an index may hold.
        origin: pip's record of where the package came from, ``direct_url.json`` of PEP 610; empty for an index.
    """
    from urllib.request import url2pathname  # takes longer to import than all else here

    parts = urlsplit(origin.get("url", ""))
    path = Path(url2pathname(parts.path)) if parts.scheme == "file" else None
    if not origin or (path is not None and not path.exists()):
        return [f"{_NAME}[{extra}]=={version}"]
    if "dir_info" in origin:
        return [*["-e"] * bool(origin["dir_info"].get("editable")), f"{path}[{extra}]"]
    source = origin["url"]
    if "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{source}@{origin['vcs_info']['commit_id']}"
    return [f"{_NAME}[{extra}] @ {source}"]


def _requirements() -> list[str]:
    try:
        return metadata.requires(_NAME) or []
    except metadata.PackageNotFoundError:  # the sources, not installed
        return []


def is_installed(package: str) -> bool:
    """Tells whether a package is there, by its name on the index or by its module, without importing it."""
    module = _MODULES.get(package, package.replace("-", "_"))
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return sys.modules.get(module) is not None or (module not in sys.modules and find_spec(module) is not None)
    return True


def _normal(requirement: str) -> str:
    """Returns the name of a package, or of one that is required, as indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()
