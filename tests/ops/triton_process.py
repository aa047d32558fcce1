"""Where the cases of a file of Triton kernels run: on a GPU, or on small shapes in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is imported. So that no other test gets it,
the cases of such a file run in a process of their own.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
PAIR = {"mode": "scan", "backend": "triton"}

# Triton 3.9 announces a default of 3.10
quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
on_either = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, or in the interpreter's process"
)
from_outside = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="the cases run in this process"
)

if INTERPRETED:
    from triton import language
    from triton.runtime import interpreter

    put_in_place = interpreter._patch_lang

    def put_in_place_once(function):
        """What `_patch_lang` does, unless its functions are there: finding them takes as long as they do."""
        seen = [x for x in function.__globals__.values() if x is language or x is language.core]
        if any(language.core.is_builtin(module.load) for module in seen):
            return put_in_place(function)

    interpreter._patch_lang = put_in_place_once


def on_a_gpu(test):
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test)
    )


def run_interpreted(file: str) -> None:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", file, "-p", "no:cacheprovider", "--tb=short"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr
