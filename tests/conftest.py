"""The collector of garbage would look through ten thousand tests, and what they import, again and again."""

import gc

import pytest


def pytest_collection() -> None:
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.collect()
    # what there is now stays until the end
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    # what Python collects when it ends, or extensions report it as lost
    gc.unfreeze()
