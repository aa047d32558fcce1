"""The provenance of a result: commit, versions and device."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

import torch

PACKAGES = ("linrec", "torch", "triton", "numba", "numpy", "lightning-fabric", "lightning", "safetensors")


class Device(TypedDict, total=False):
    """The device of a run."""

    type: str
    name: str
    threads: int


class Part(TypedDict):
    """A part of a run that was resumed: its first step, and fields of the provenance that changed."""

    step: int


class About(TypedDict, total=False):
    """The types of the fields of config.json beside the configuration."""

    recipe: str | None
    command: str | None
    total_steps: int
    commit: str | None
    dirty: bool | None
    versions: dict[str, str]
    device: Device
    tokenizer: str
    processes: int
    resumed: list[Part]


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the commit, the versions and the device of a run, as JSON values.

    Args:
        device: device of the run.

    Returns:
        "commit", "dirty" (whether tracked files have changes), "versions" of Python and packages, and
        "device" with "type", "name" and "threads". "commit" and "dirty" are None outside of a git checkout of
        linrec.

    Example:
        >>> provenance(torch.device("cpu"))["device"]["type"]
        'cpu'
    """
    commit, dirty = _commit()
    return {"commit": commit, "dirty": dirty, "versions": _versions(), "device": _device(device)}


def _commit() -> tuple[str | None, bool | None]:
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        # an installed linrec may be inside the git checkout of another project, which does not track it
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    # not every torch has its build ("+cpu", "+cu130") in the package metadata
    versions["torch"] = str(torch.__version__)
    return versions


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _processor() or platform.processor() or platform.machine()
    return {"type": device.type, "name": name, "threads": torch.get_num_threads()}


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
