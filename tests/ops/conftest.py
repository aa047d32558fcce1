import pytest

from linrec.ops.core import backends


@pytest.fixture
def machine_with(monkeypatch):
    """Pretend that Numba or Triton works or not, or that a program is exported."""

    def pretend(*, numba=False, triton=False, exporting=False):
        monkeypatch.setattr(backends, "_numba_problem", lambda: None if numba else "none here")
        monkeypatch.setattr(backends, "_triton_problem", lambda: None if triton else "none here")
        monkeypatch.setattr(backends, "_warn_about_numba", lambda problem: None)
        monkeypatch.setattr(backends, "exporting", lambda: exporting)

    return pretend


@pytest.fixture
def chosen():
    """Return the pair that an operator chooses for its canonical inputs on a device."""

    def choice(operator, inputs, device="cpu", mode="auto", backend="auto"):
        entry = backends.choose(operator.name, operator.backends, inputs, device, mode, backend)
        return entry.mode, entry.name

    return choice
