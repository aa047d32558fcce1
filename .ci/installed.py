"""Try an installed linrec: without extras, or with the word `lab` with the extra "lab"."""

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import linrec

LAYERS = [
    "ops",
    "nn",
    "mixers",
    "models",
    "hippo",
    "parallel",
    "convert",
    "export",
    "generation",
    "lab.corpora",
    "lab.tasks",
    "lab.train",
    "text",
    "testing",
]
NEED_LAB = ["lab.bench", "lab.evaluation", "lab.inspection", "lab.report"]
SHORT = [
    "--loop.epochs",
    "1",
    "--optim.warmup-steps",
    "1",
    "--task.n-samples",
    "1000",
    "--loop.device",
    "cpu",
]


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run `linrec` as a user does."""
    program = Path(sys.executable).with_name("linrec")
    return subprocess.run([program, *words], capture_output=True, text=True)


def main(extra: str) -> None:
    """Import the layers, call every mixer, and run commands."""
    assert Path(linrec.__file__).is_relative_to(sys.prefix), f"{linrec.__file__} is not the installed package"
    for name in LAYERS + (NEED_LAB if extra else []):
        importlib.import_module(f"linrec.{name}")
    for name in linrec.mixers.names():
        y, _ = linrec.mixers.build(name, 16)(torch.randn(2, 8, 16))
        assert y.shape == (2, 8, 16) and y.isfinite().all(), name
    assert command("--version").stdout.strip() == linrec.__version__
    with tempfile.TemporaryDirectory() as folder:
        ended = command("train", "memory-horizon-demo", *SHORT, "--out", f"{folder}/run")
        if extra:
            assert ended.returncode == 0, ended.stderr
            assert command("report", f"{folder}/run").returncode == 0
        else:
            assert ended.returncode == 2 and "pip install 'linrec[lab]'" in ended.stderr, ended.stderr
    extras = f'the extra "{extra}"' if extra else "no extra"
    print(f"linrec {linrec.__version__} with torch {torch.__version__} and {extras}: works as installed")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [""]))
