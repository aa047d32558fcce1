"""Who runs an operator, on machines that this one is not."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from linrec.ops import dispatch, scan
from linrec.ops.dispatch import auto_scan, refusal, resolve
from linrec.ops.scan import PAIRS

USABLE = [("scan", "torch"), ("recurrent", "torch")]


@pytest.mark.parametrize(
    ("mode", "backend", "auto", "expected"),
    [
        ("auto", "auto", USABLE, ("scan", "torch")),
        ("recurrent", "auto", USABLE, ("recurrent", "torch")),
        ("auto", "torch", USABLE[::-1], ("recurrent", "torch")),
        ("scan", "torch", USABLE[::-1], ("scan", "torch")),
        # what is not among the usable pairs is obeyed when it is asked for
        ("auto", "reference", USABLE, ("recurrent", "reference")),
        ("auto", "numba", USABLE, ("recurrent", "numba")),
        ("scan", "triton", USABLE, ("scan", "triton")),
        # a usable pair that does not exist is no candidate
        ("auto", "auto", [("chunkwise", "torch"), *USABLE], ("scan", "torch")),
    ],
)
def test_explicit_choices_are_obeyed_and_auto_is_filled_in(mode, backend, auto, expected):
    assert resolve("scan", PAIRS, mode, backend, auto) == expected


@pytest.mark.parametrize(
    ("mode", "backend", "message"),
    [
        (
            "scna",
            "auto",
            "there is no mode of `scan` called 'scna'; did you mean 'scan'? Choose from: 'auto', ",
        ),
        ("auto", "pytorch", "there is no backend of `scan` called 'pytorch'; did you mean 'torch'? "),
        (
            "scan",
            "numba",
            "`scan` has no (mode, backend) = ('scan', 'numba'); the pairs that exist are ('recurrent'",
        ),
    ],
)
def test_refusals_name_what_exists(mode, backend, message):
    with pytest.raises(ValueError) as caught:
        resolve("scan", PAIRS, mode, backend, USABLE)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("time", "device", "numba", "triton", "exporting", "expected"),
    [
        (1, "cpu", True, False, False, ("recurrent", "torch")),
        (1, "cuda", False, True, False, ("recurrent", "torch")),
        (2, "cpu", True, False, False, ("recurrent", "numba")),
        (4096, "cpu", True, False, False, ("recurrent", "numba")),
        (4096, "cpu", True, False, True, ("scan", "torch")),
        # exported programs have one form for all lengths but 1
        (2, "cpu", True, False, True, ("scan", "torch")),
        (1, "cpu", True, False, True, ("recurrent", "torch")),
        (4096, "cpu", False, False, False, ("scan", "torch")),
        (16, "cpu", False, False, False, ("recurrent", "torch")),
        (17, "cpu", False, False, False, ("scan", "torch")),
        (2, "cuda", False, True, False, ("scan", "triton")),
        (4096, "cuda", True, False, False, ("scan", "torch")),
        (4096, "mps", True, True, False, ("scan", "torch")),
        (0, "meta", True, True, False, ("recurrent", "torch")),
    ],
)
def test_auto_scan(time, device, numba, triton, exporting, expected):
    order = auto_scan((8, time, 64), device, numba=numba, triton=triton, exporting=exporting)
    assert order[0] == expected
    assert set(order) <= set(PAIRS) and set(USABLE) <= set(order)


def test_refusal_knows_where_backends_run():
    assert refusal("scan", "torch", "mps") is None
    assert refusal("scan", "reference", "meta") is None
    assert "runs on 'cpu'; got tensors on 'cuda'" in refusal("scan", "numba", "cuda")
    assert "`scan`" in refusal("scan", "triton", "cpu")


@pytest.fixture
def fresh_probes():
    """Probes that ask again, before and after the test."""
    probes = (dispatch._numba_problem, dispatch._warn_about_numba, dispatch._triton_problem)
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
    assert not dispatch.triton_usable("cuda")
    assert refusal("scan", "triton", "cuda").startswith(
        "backend='triton' of `scan` needs Triton; it fails with"
    )


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
