"""Strings of the tasks of state tracking, compared with what an oracle says of them."""

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.automata import StateTracking

FEW = {"n_train": 200, "n_validation": 60, "n_test": 100}


def strings(task: StateTracking, split: str = "test") -> list[list[int]]:
    """Return the strings of a split without their padding, which must all come after them."""
    found = []
    for row in task.split(split).inputs.tolist():
        length = row.index(task.n_symbols) if task.n_symbols in row else len(row)
        assert row[length:] == [task.n_symbols] * (len(row) - length)
        found.append(row[:length])
    return found


def check(task: StateTracking, oracle) -> None:
    """Compare targets with `oracle(string)`, with `dense` with that of each beginning; None is no target."""
    for name in ("train", "test"):
        targets = task.split(name).targets.tolist()
        for string, target in zip(strings(task, name), targets, strict=True):
            read = range(1 if task.dense else len(string), len(string) + 1)
            wanted = {n - 1: oracle(string[:n]) for n in read}
            assert {t: y for t, y in enumerate(target) if y != NO_TARGET} == {
                t: y for t, y in wanted.items() if y is not None
            }


def shares(task: StateTracking) -> list[float]:
    """Return how often each class is a target in training."""
    targets = task.split("train").targets
    targets = targets[targets != NO_TARGET]
    return [float((targets == answer).double().mean()) for answer in range(task.n_outputs)]
