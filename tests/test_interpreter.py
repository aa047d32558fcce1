"""Triton's kernels on machines without a GPU: their tests run in Triton's interpreter, in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.triton_process import INTERPRETED
from tests.tiers import tiered

HERE = Path(__file__).parent
FILES = [*sorted(HERE.rglob("test_*_triton.py")), HERE / "ops" / "test_edges_long_conv.py"]
# an elementwise kernel, and those of a matrix state
FIRST = [HERE / "ops" / f"test_{name}_triton.py" for name in ("scan", "gate_loop_chunkwise")]
OTHERS = [path for path in FILES if path not in FIRST]


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the cases run in their own files")
# starting a process takes as long as several cases, so that files share processes
@pytest.mark.parametrize(
    ("files", "tier"),
    tiered(
        [(FIRST, "not thorough")],
        [
            (FIRST, "thorough and not nightly"),
            *[(files, "not nightly") for files in (OTHERS[::2], OTHERS[1::2])],
        ],
        [(FILES, "nightly")],
    ),
)
def test_kernels_in_the_interpreter(files, tier):
    pytest.importorskip("triton")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-m", tier]
    command += map(str, files)
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr
