import pytest

from perf.commands import matrix, ops


@pytest.fixture(autouse=True)
def unchanged_allocator(monkeypatch):
    # what it asks of the C library would last for all tests that follow
    for command in (matrix, ops):
        monkeypatch.setattr(command, "keep_freed_memory", lambda: False)
