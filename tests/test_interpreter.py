"""Triton's kernels on machines without a GPU: their tests run in Triton's interpreter, in other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.triton_process import INTERPRETED
from tests.tiers import thorough

HERE = Path(__file__).parent
FILES = [*sorted(HERE.rglob("test_*_triton.py")), HERE / "ops" / "test_edges_long_conv.py"]
# starting a process takes as long as several cases, so that files share processes
PROCESSES = 2


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the cases run in their own files")
@pytest.mark.parametrize("number", range(PROCESSES))
@pytest.mark.parametrize(
    "tier", [pytest.param("not thorough", id="fast"), pytest.param("thorough", marks=thorough)]
)
def test_kernels_in_the_interpreter(tier, number):
    pytest.importorskip("triton")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    files = map(str, FILES[number::PROCESSES])
    command = [sys.executable, "-m", "pytest", *files, "-m", tier, "-p", "no:cacheprovider", "--tb=short"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout + result.stderr
