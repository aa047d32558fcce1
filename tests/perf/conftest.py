import pytest

import perf.commands.ops as command


@pytest.fixture(autouse=True)
def unchanged_allocator(monkeypatch):
    # what it asks of the C library would last for all tests that follow
    monkeypatch.setattr(command, "keep_freed_memory", lambda: False)
