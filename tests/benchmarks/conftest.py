import pytest

import benchmarks.__main__ as command_line


@pytest.fixture(autouse=True)
def unchanged_allocator(monkeypatch):
    # what it asks of the C library would last for all tests that follow
    monkeypatch.setattr(command_line, "keep_freed_memory", lambda: False)
