"""The tiers of the tests.

`make test` runs every law once for each mixer and operator, where it can break. `make test-all` also runs
the cases marked `thorough`: further dtypes, lengths and shapes, variants of another operator, and most tests
that compile, export, start processes, make pages or run the models of other libraries, since each takes a
second or more. Cases marked `nightly` run in `make test-nightly` alone. They take long, and repeat a check
that the other tiers make on another case:

- laws and interface for the further variants of a mixer. The second tier compares their numbers with goldens;
- export, and stability in float32, for a mixer whose operator is checked with another mixer;
- Triton kernels in the interpreter for further shapes of gates, precisions and numbers of programs;
- mixers at lengths around the chunks of their operator. The laws of the operator have these lengths;
- generation and evaluation of models that differ in the mixer alone;
- interrupts of a program at further times.

`torch.compile` follows the lines of every mixer in the second tier, and traces one mixer of each family. A
plain `pytest` on a file runs the cases of all tiers.

Where caches are cold, each worker imports and collects for 20 seconds of processor time, and compiles the
kernels of Numba that it needs before the other worker has stored them.
"""

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough
# tests/conftest.py marks nightly cases thorough too
nightly = pytest.mark.nightly


SECOND = (
    "src/linrec/lab",
    "tests/convert",
    "tests/docs/test_maths.py",
    "tests/docs/test_pages.py",
    "tests/docs/test_site.py",
    "tests/hf",
    "tests/lab/bench",
    "tests/lab/distillation",
    "tests/lab/evaluation",
    "tests/lab/inspection",
    "tests/lab/publishing",
    "tests/lab/report",
    "tests/lab/streams",
    "tests/lab/tasks",
    "tests/lab/train/test_carried.py",
    "tests/perf",
    "tests/serve/test_http.py",
    "tests/serve/test_load.py",
    "tests/serve/test_workbench.py",
    "tests/test_cli_convert.py",
    "tests/test_cli_eval.py",
    "tests/test_cli_generate.py",
    "tests/test_cli_serve.py",
    "tests/test_damage.py",
    "tests/test_examples.py",
    "tests/test_foreign.py",
    "tests/test_limits.py",
    "tests/vllm/test_serving.py",
)
"""Files and folders of the second tier, examples of docstrings included: their tests make whole runs."""
FIRST = (
    "src/linrec/lab/style.py",
    "tests/convert/test_mamba2.py",
    "tests/hf/test_cache.py",
    "tests/lab/bench/test_jobs.py",
    "tests/lab/test_style.py",
    "tests/lab/tasks/test_automata.py",
    "tests/lab/tasks/test_recall.py",
    "tests/lab/tasks/test_synthetic.py",
    "tests/lab/tasks/test_task_discovery.py",
    "tests/perf/test_engine.py",
)
"""Files in folders of `SECOND` that are of the first tier all the same."""


def is_second(file: str) -> bool:
    """Whether the tests of a file are of the second tier, wherever their own marks put them."""
    return file not in FIRST and any(file == place or file.startswith(f"{place}/") for place in SECOND)


def tiered(fast: Iterable[Any], further: Iterable[Any] = (), rare: Iterable[Any] = ()) -> list[Any]:
    """Return parameters of a test: cases of the first tier, then ones marked thorough and nightly.

    Args:
        fast: values of one parameter, or tuples of the values of several.
        further: likewise; what is in `fast` too counts as fast.
        rare: likewise; what is in `fast` or `further` too counts as that.

    Example:
        >>> [(*case.values, *(mark.name for mark in case.marks)) for case in tiered([65], [1, 65], [64, 65])]
        [(65,), (1, 'thorough'), (64, 'nightly')]
    """
    fast, further = list(fast), list(further)
    slow = [case for case in further if case not in fast]
    seldom = [case for case in rare if case not in fast and case not in further]
    cases = [(case, ()) for case in fast] + [(case, thorough) for case in slow]
    return [_parameter(*case) for case in cases + [(case, nightly) for case in seldom]]


def _parameter(case: Any, marks: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
