"""Time parallelism: two and four processes against one, and what is refused."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from linrec.ops import scan
from linrec.ops.core.call import TimeSplit, handling, refuse_split_time
from linrec.parallel import part, time_parallel
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]


def check(size: int, folder: Path, device: str, *names: str) -> None:
    """Run all cases in so many processes; one test, since test runners would start them again for another."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(path for path in sys.path if path)]),
    }
    command = [sys.executable, "-W", "error::FutureWarning", "-m", "tests.parallel.process"]
    ended = subprocess.run([*command, str(size), str(folder), device, *names], cwd=ROOT, env=environment)
    assert ended.returncode == 0, "a case failed; the captured output has its traceback"


# a law of all mixers for three processes without a state, and for four
RARE = [(3, ()), (4, ("models.every_mixer", "models.language_models_in_two_pieces"))]


@pytest.mark.parametrize("size, names", tiered([], [(2, ()), (4, ())], RARE))
def test_processes_that_share_sequences(size, names, tmp_path):
    check(size, tmp_path, "cpu", *names)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_that_share_sequences(tmp_path):
    check(2, tmp_path, "cuda")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group_the_error_says_how_to_make_one():
    words = r"no process group; start the program with torchrun, and call `torch.distributed.init_process_"
    with pytest.raises(ValueError, match=words), time_parallel():
        pass
    with pytest.raises(ValueError, match=words):
        part(torch.zeros(1, 2))


def test_a_group_of_one_changes_nothing(alone):
    a, x = torch.rand(2, 9, 3), torch.randn(2, 9, 3)
    with time_parallel():
        actual = scan(a, part(x))
    torch.testing.assert_close(actual, scan(a, x), rtol=0, atol=0)


def test_the_context_ends_with_an_error():
    class Anyone(TimeSplit):
        def run(self, call):
            raise AssertionError

        halo = in_turn = run

    with pytest.raises(RuntimeError, match="within"), handling(Anyone()):
        raise RuntimeError("within")
    refuse_split_time("anything")
