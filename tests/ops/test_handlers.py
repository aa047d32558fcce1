"""Who is asked before a call runs: handlers of calls, the list of calls, and split time."""

import pytest
import torch

from linrec import ops
from linrec.ops import gate_loop, gate_loop_matrix, normalized_gate_loop, scan
from linrec.ops.core.call import (
    TimeSplit,
    handled,
    handling,
    recording,
    refuse_split_time,
    time_is_split,
    unhandled,
)
from linrec.testing import gate_loop_inputs, scan_inputs
from tests.tiers import thorough

from .test_edges import OPERATORS, TABLES, every_operator


def run_scan():
    return scan(**scan_inputs(2, 5, 3))


def asked(name, log):
    """A handler that says when it is asked, and when the call has ended."""

    def handler(call, proceed):
        log.append(f"{name}: {call.operator.name}")
        result = proceed()
        log.append(f"{name}: end")
        return result

    return handler


def pairs(calls):
    return [(call.operator.name, call.backend.mode, call.backend.name) for call in calls]


def test_calls_that_operators_make_are_not_listed():
    inputs = gate_loop_inputs(2, 5, 3, 2, 2)
    with recording() as calls:
        gate_loop(**inputs, mode="scan", backend="torch")
        run_scan()
        normalized_gate_loop(**inputs | {"state": None}, mode="chunkwise", backend="torch")
    assert pairs(calls)[::2] == [
        ("gate_loop", "scan", "torch"),
        ("normalized_gate_loop", "chunkwise", "torch"),
    ]
    assert calls[1].operator is scan.operator and calls[1].backend in scan.operator.backends
    # the list is what it was when the context ended
    run_scan()
    assert len(calls) == 3


@every_operator
def test_a_call_is_listed_with_its_canonical_inputs(name):
    make, sizes = OPERATORS[name]
    given = make(**sizes)
    with recording() as calls:
        y, _ = getattr(ops, name)(**given)
    (call,) = calls
    assert call.operator is TABLES[name] and call.backend in TABLES[name].backends
    again, _ = call.operator.run(call.inputs, call.backend)
    torch.testing.assert_close(again, y, rtol=0, atol=0)


def test_a_call_that_fails_is_listed_and_the_next_one_too():
    def refuse(call, proceed):
        raise RuntimeError("no")

    with recording() as calls:
        with pytest.raises(RuntimeError, match="no"), handling(refuse):
            run_scan()
        run_scan()
    # the handler that came last was asked first, and did not let the call pass
    assert len(calls) == 1
    with handling(refuse), recording() as calls:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no"):
                run_scan()
    assert len(calls) == 2
    assert not handled()


def test_the_handler_that_came_last_is_asked_first():
    log = []
    with handling(asked("outer", log)), handling(asked("inner", log)):
        run_scan()
    assert log == ["inner: scan", "outer: scan", "outer: end", "inner: end"]


def test_contexts_that_are_made_before_they_are_entered_nest():
    log = []
    outer, inner = handling(asked("outer", log)), handling(asked("inner", log))
    with outer, inner:
        run_scan()
    assert log == ["inner: scan", "outer: scan", "outer: end", "inner: end"]


def test_a_handler_may_answer_itself():
    log = []
    with handling(asked("outer", log)), handling(lambda call, proceed: ("y", "state")):
        assert run_scan() == ("y", "state")
    assert log == []


def test_calls_without_handlers_within_a_context():
    log = []
    with handling(asked("outer", log)):
        with unhandled():
            run_scan()
            with handling(asked("new", log)):
                run_scan()
            assert log == ["new: scan", "new: end"]
            assert not handled()
        log.clear()
        run_scan()
        assert log == ["outer: scan", "outer: end"]
        with pytest.raises(RuntimeError, match="within"), unhandled():
            raise RuntimeError("within")
        assert handled()
    assert not handled()


def test_the_same_handler_may_be_there_twice():
    log = []
    handler = asked("same", log)
    with handling(handler):
        with handling(handler):
            run_scan()
        run_scan()
        assert len(log) == 6
    assert not handled()


class Parts(TimeSplit):
    """Answers calls of `scan` and `gate_loop` as they are, and lists them; other functions run in turn."""

    operators = ("scan", "gate_loop")

    def __init__(self):
        self.calls, self.turns = [], []

    def run(self, call):
        self.calls.append(call)
        with unhandled():
            return call.operator.run(call.inputs, call.backend)

    def halo(self, x, state, reset):
        raise AssertionError("no function asks for the inputs before")

    def in_turn(self, name, run, state, given):
        self.turns.append(name)
        with unhandled():
            return run(state)


@every_operator
def test_where_time_is_split_other_operators_run_in_turn(name):
    make, sizes = OPERATORS[name]
    given, function, table = make(**sizes), getattr(ops, name), TABLES[name]
    expected, _ = function(**given)
    split = Parts()
    with handling(split):
        assert time_is_split()
        for entry in table.backends:
            if entry.name in ("torch", "reference") and (entry.mode != "convolution" or not table.composed):
                split.calls.clear()
                split.turns.clear()
                y, _ = function(**given, mode=entry.mode, backend=entry.name)
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
                # an operator made of others is answered by those that it calls, by recurrences alone
                calls = {call.operator.name for call in split.calls}
                in_parts = name in Parts.operators or table.composed
                assert calls <= set(Parts.operators) and bool(calls) == in_parts
                assert split.turns == ([] if in_parts else [name])
    assert not time_is_split()
    assert not handled()


def test_operators_that_are_made_of_others():
    composed = {name for name, table in TABLES.items() if table.composed}
    assert composed == {"normalized_gate_loop", "diagonal_ssm"}


def test_the_matrix_of_all_pairs_of_steps_is_refused():
    inputs = gate_loop_inputs(2, 5, 3, 2, 2)
    with handling(Parts()), pytest.raises(ValueError, match="`gate_loop_matrix` needs all steps"):
        gate_loop_matrix(*(inputs[key] for key in ("q", "k", "log_decay", "phase")))
    refuse_split_time("gate_loop_matrix")


@thorough
def test_compiled_calls_are_handled_but_not_recorded():
    inputs, log = scan_inputs(2, 5, 3), []
    whole = torch.compile(lambda: scan(**inputs), fullgraph=True, backend="eager")
    parts = torch.compile(lambda: scan(**inputs), backend="eager")
    expected, _ = parts()
    with recording() as calls:
        torch.testing.assert_close(whole()[0], expected)
    assert calls == []
    with handling(asked("outer", log)):
        torch.testing.assert_close(parts()[0], expected)
        assert log == ["outer: scan", "outer: end"]
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            whole()
    whole()
    split = Parts()
    with handling(split):
        torch.testing.assert_close(parts()[0], expected)
    assert len(split.calls) == 1
