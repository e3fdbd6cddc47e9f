"""Names the commands that install what is missing, for this installation of mpiring."""

import functools
import json
import shlex
from pathlib import Path

# On Linux, PyPI has CUDA builds of PyTorch only, of several gigabytes.
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def pip_install(what: str) -> str:
    """Return the command that installs a package, or an extra of mpiring.

    No command names mpiring itself: a package index may have another project of that name. An
    extra is installed from the checkout that mpiring comes from. Without a checkout, for example
    after the installation of a wheel, the command names the packages of the extra.

    Args:
        what: Requirement, such as "ml_dtypes"; or extra in brackets, such as "[fast]".
    """
    words = _extra(what) if what.startswith("[") else [what]
    return f"pip install {shlex.join(words)}"


def pip_install_cupy(detail: str = "") -> str:
    """Return the commands that install CuPy, of which one is for the user's version of CUDA.

    Args:
        detail: Extra or version, such as "[ctk]" or ">=14".
    """
    newer, older = (pip_install(f"cupy-cuda{version}x{detail}") for version in (13, 12))
    return f"{newer}, or for CUDA 12: {older}"


def get_mpi() -> str:
    """Return how to get an MPI library."""
    return f"load your cluster's MPI module (module avail mpi), or: {pip_install('[mpich]')}"


def _extra(name: str) -> list[str]:
    """Return the arguments of pip for an extra in brackets."""
    if _is_checkout(_ROOT):
        return ["-e", f"{_ROOT}{name}"]
    from importlib import metadata
    from urllib.parse import unquote, urlsplit
    try:
        installed = metadata.distribution("mpiring")
    except metadata.PackageNotFoundError:
        return [f"/path/of/mpiring{name}"]
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    folder = Path(unquote(urlsplit(origin.get("url", "")).path))
    if "dir_info" in origin and _is_checkout(folder):
        return [f"{folder}{name}"]
    condition = f'extra == "{name[1:-1]}"'
    return [requirement.strip() for requirement, _, marker in
            (line.partition(";") for line in installed.requires or ()) if condition in marker]


def _is_checkout(folder: Path) -> bool:
    """Return whether pip can install mpiring from a folder, which may have changed since."""
    try:
        is_named = "\nname = mpiring\n" in (folder / "setup.cfg").read_text()
    except OSError:
        return False
    return is_named and (folder / "mpiring").is_dir()
