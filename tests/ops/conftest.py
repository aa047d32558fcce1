import pytest

from linrec.ops.core import backends, machine


@pytest.fixture
def machine_with(monkeypatch):
    """Pretend that Numba or Triton works or not, or that a program is exported."""

    def pretend(*, numba=False, triton=False, exporting=False):
        monkeypatch.setattr(machine, "_numba_problem", lambda: None if numba else "none here")
        monkeypatch.setattr(machine, "_triton_problem", lambda: None if triton else "none here")
        monkeypatch.setattr(machine, "_warn_about_numba", lambda problem: None)
        for module in (machine, backends):
            monkeypatch.setattr(module, "exporting", lambda: exporting)

    return pretend


@pytest.fixture
def chosen():
    """Return the pair that an operator chooses for its canonical inputs on a device."""

    def choice(operator, inputs, device="cpu", mode="auto", backend="auto"):
        entry = backends.choose(operator.name, operator.backends, inputs, device, mode, backend)
        return entry.mode, entry.name

    return choice
