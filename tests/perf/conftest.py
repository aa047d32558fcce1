import json

import pytest
import torch

from perf import timing
from perf.__main__ import main


@pytest.fixture(autouse=True)
def unchanged_allocator(monkeypatch):
    # its request to the C library would last for all later tests
    monkeypatch.setattr(timing, "keep_freed_memory", lambda: False)


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that runs a command on the CPU at its quick size: status, results and output."""

    def run(command, *arguments):
        out = tmp_path / "out"
        status = main([command, "--device", "cpu", "--quick", "--out", str(out), *arguments])
        captured = capsys.readouterr()
        files = list(out.glob("*.json"))
        results = json.loads(files[0].read_text()) if files else None
        return status, results, captured.out or captured.err

    return run


def wrong(right, part=0, change=lambda found: 1.01 * found):
    """Return a function with one wrong result, except in double precision, in which checks compute."""

    def changed(*given, **options):
        found = [*right(*given, **options)]
        if found[part].dtype != torch.float64:
            found[part] = change(found[part])
        return tuple(found)

    return changed
