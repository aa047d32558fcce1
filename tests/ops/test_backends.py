"""Who runs an operator, on machines that this one is not."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import warnings

import pytest
import torch

from linrec.ops import scan
from linrec.ops.core import backends
from linrec.ops.core.backends import Backend, choose, few, never, refusal, usable
from linrec.ops.scan import OPERATOR
from linrec.ops.scan.torch import Scan
from tests.tiers import thorough

SECOND = Backend("scan", "torch", lambda given: given.x, "another", kernel="another")
ALWAYS = dataclasses.replace(SECOND, kernel="")


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ((ALWAYS, SECOND), r"no call of `scan` reaches the entry \('scan', 'torch'\) 'another'"),
        ((dataclasses.replace(ALWAYS, auto=few), dataclasses.replace(SECOND, auto=never)), "no call"),
        ((dataclasses.replace(ALWAYS, auto=few), SECOND), None),
        ((dataclasses.replace(ALWAYS, accepts=few), SECOND), None),
        ((dataclasses.replace(ALWAYS, differentiable=False), SECOND), None),
        ((dataclasses.replace(SECOND, mode="windows"),), "'windows'.*chunkwise"),
        ((dataclasses.replace(SECOND, name="cuda"),), "'cuda'.*triton"),
    ],
)
def test_entries_that_no_call_reaches_are_refused(entries, refused):
    with pytest.raises(ValueError, match=refused) if refused else contextlib.nullcontext():
        dataclasses.replace(OPERATOR, backends=entries)


def inputs(time):
    x = torch.empty(2, time, 3)
    return Scan(x, x, None, None, False)


@pytest.mark.parametrize(
    ("time", "device", "machine", "expected"),
    [
        (1, "cpu", {"numba": True}, ("recurrent", "torch")),
        (1, "cuda", {"triton": True}, ("recurrent", "torch")),
        (2, "cpu", {"numba": True}, ("recurrent", "numba")),
        (4096, "cpu", {"numba": True}, ("recurrent", "numba")),
        (4096, "cpu", {"numba": True, "exporting": True}, ("scan", "torch")),
        # exported programs have one form for all lengths but 1
        (2, "cpu", {"numba": True, "exporting": True}, ("scan", "torch")),
        (1, "cpu", {"numba": True, "exporting": True}, ("recurrent", "torch")),
        (4096, "cpu", {}, ("scan", "torch")),
        (16, "cpu", {}, ("recurrent", "torch")),
        (17, "cpu", {}, ("scan", "torch")),
        (2, "cuda", {"triton": True}, ("scan", "triton")),
        (4096, "cuda", {"numba": True}, ("scan", "torch")),
        (4096, "mps", {"numba": True, "triton": True}, ("scan", "torch")),
        (0, "meta", {"numba": True, "triton": True}, ("recurrent", "torch")),
    ],
)
def test_auto_takes_the_first_entry_that_works(machine_with, chosen, time, device, machine, expected):
    machine_with(**machine)
    assert chosen(OPERATOR, inputs(time), device) == expected


@pytest.mark.parametrize(
    ("mode", "backend", "time", "expected"),
    [
        ("recurrent", "auto", 40, ("recurrent", "numba")),
        ("auto", "torch", 40, ("scan", "torch")),
        ("auto", "torch", 2, ("recurrent", "torch")),
        ("scan", "torch", 1, ("scan", "torch")),
        ("auto", "reference", 40, ("recurrent", "reference")),
        ("auto", "numba", 1, ("recurrent", "numba")),
    ],
)
def test_explicit_choices_are_obeyed_and_auto_is_filled_in(
    machine_with, chosen, mode, backend, time, expected
):
    machine_with(numba=True)
    assert chosen(OPERATOR, inputs(time), mode=mode, backend=backend) == expected


@pytest.mark.parametrize(
    ("mode", "backend", "message"),
    [
        (
            "scna",
            "auto",
            "there is no `mode` of `scan` called 'scna'; did you mean 'scan'? Choose from: 'auto', ",
        ),
        ("auto", "pytorch", "there is no `backend` of `scan` called 'pytorch'; did you mean 'torch'? "),
        (
            "scan",
            "numba",
            "`scan` has no (mode, backend) = ('scan', 'numba'); the pairs that exist are ('recurrent'",
        ),
    ],
)
def test_refusals_name_what_exists(chosen, mode, backend, message):
    with pytest.raises(ValueError) as caught:
        chosen(OPERATOR, inputs(40), mode=mode, backend=backend)
    assert str(caught.value).startswith(message)


def run(given):
    raise AssertionError("this test runs nothing")


TABLE = (
    Backend("recurrent", "torch", run, "one step", auto=lambda given: given.x.shape[1] <= 1),
    Backend(
        "scan", "torch", run, "narrow", accepts=lambda given: given.x.shape[2] < 3, requires="two channels"
    ),
    Backend("scan", "torch", run, "without gradients", kernel="wide", differentiable=False),
)


def test_two_kernels_of_one_pair_are_two_entries():
    given = inputs(9)
    assert choose("toy", TABLE, given, "cpu", "scan", "torch") is TABLE[2]
    narrow = Scan(given.a[..., :2], given.x[..., :2], None, None, False)
    assert choose("toy", TABLE, narrow, "cpu", "scan", "torch") is TABLE[1]


def test_a_kernel_without_gradients_is_refused_where_one_is_needed():
    given = inputs(9)._replace(x=torch.zeros(2, 9, 3, requires_grad=True))
    # "auto" passes it over
    assert choose("toy", TABLE, given, "cpu", "auto", "auto") is TABLE[0]
    with pytest.raises(ValueError, match=r"`toy` takes two channels.* `toy` has no gradients\. Call"):
        choose("toy", TABLE, given, "cpu", "scan", "torch")


def test_refusal_knows_where_backends_run():
    assert refusal("scan", "torch", "mps") is None
    assert refusal("scan", "reference", "meta") is None
    assert "runs on 'cpu'; got tensors on 'cuda'" in refusal("scan", "numba", "cuda")
    assert "`scan`" in refusal("scan", "triton", "cpu")


@pytest.fixture
def fresh_probes():
    """Probes that ask again, before and after the test."""
    probes = (backends._numba_problem, backends._warn_about_numba, backends._triton_problem)
    for probe in probes:
        probe.cache_clear()
    yield
    for probe in probes:
        probe.cache_clear()


def absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    return "ModuleNotFoundError"


def broken(monkeypatch):
    def njit(**options):
        raise OSError("libLLVM.so: cannot open shared object file")

    monkeypatch.setattr("numba.njit", njit)
    return "libLLVM.so"


def uncached(monkeypatch):
    def njit(**options):
        raise RuntimeError("cannot cache function 'successor': no locator available for file")

    monkeypatch.setattr("numba.njit", njit)
    return "no locator available"


@pytest.mark.parametrize("failure", [absent, broken, uncached])
def test_without_a_working_numba_torch_runs_after_one_warning(failure, monkeypatch, fresh_probes):
    pytest.importorskip("numba")
    reason = failure(monkeypatch)
    a, x = torch.full((3,), 0.5), torch.ones(2, 40, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            y, _ = scan(a, x)
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert reason in str(caught[0].message) and "torch backend" in str(caught[0].message)
    # the warning points at the call
    assert caught[0].filename == __file__
    torch.testing.assert_close(y, scan(a, x, backend="reference")[0])
    with pytest.raises(
        ValueError, match=r"backend='numba' of `scan` needs a working Numba; it fails with .*Install"
    ):
        scan(a, x, backend="numba")


def test_absent_triton_is_refused_by_name(monkeypatch, fresh_probes):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not usable("triton", "cuda")
    assert refusal("scan", "triton", "cuda").startswith(
        "backend='triton' of `scan` needs Triton; it fails with"
    )


@thorough
def test_importing_linrec_imports_no_compiler():
    program = """
import sys, linrec.ops
print({"numba", "triton"} & set(sys.modules))
import linrec.cli
print({"torch._dynamo", "torch.distributed.fsdp", "lightning_fabric"} & set(sys.modules))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.split() == ["set()", "set()"]
