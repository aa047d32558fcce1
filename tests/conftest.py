"""What holds for all tests: garbage collection, Ctrl-C, workers, and the examples that hypothesis draws."""

import atexit
import gc
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import tiers

# a background job of a shell ignores Ctrl-C, and so would the programs that tests start and stop
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    gives_tests = getattr(config.option, "dist", "no") != "no"
    if gives_tests and not config.getoption("--hypothesis-profile", None):
        # to workers; it imports neither torch nor hypothesis, which takes seconds
        return
    from hypothesis import HealthCheck, settings

    # a call of an operator takes from a millisecond to a second, the first time that a kernel is compiled
    settings.register_profile(
        "default",
        derandomize=True,
        database=None,
        max_examples=10,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.register_profile("long", settings.get_profile("default"), derandomize=False, max_examples=2000)
    settings.load_profile("default")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.option.dist != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadGroupScheduling):
        """Forget tests that have run: xdist 3.8 walks through all tests of a worker after each of them."""

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            groups = self.assigned_work[node]
            for name in [name for name, tests in groups.items() if all(tests.values())]:
                del groups[name]

    return Scheduling(config, log)


def pytest_collection() -> None:
    # a collection would look through ten thousand tests, and all that they import, again and again
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # the first tier imports no files of the second tier, nor the libraries that they compare linrec with
    if config.option.markexpr != "not thorough" or collection_path.is_dir():
        return None
    return tiers.is_second(collection_path.relative_to(config.rootpath).as_posix()) or None


# before `-m` is looked at, and before xdist looks for groups
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = item.nodeid.split("::")[0]
        if item.get_closest_marker("nightly") is not None or tiers.is_second(file):
            item.add_marker(tiers.thorough)
        if tiers.is_second(file) and item.get_closest_marker("xdist_group") is None:
            # a fixture of a module makes a run for all its tests, and every worker would make the run again
            item.add_marker(pytest.mark.xdist_group(file))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # what there is now stays until the end
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and item.get_closest_marker("gpu") is not None and torch.cuda.is_initialized():
        # processes that share a GPU would each keep as much memory as their largest test took
        torch.cuda.empty_cache()


# what Python collects when it ends, or extensions report it as lost; pytest collects twice before
atexit.register(gc.unfreeze)
