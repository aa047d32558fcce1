import torch

from linrec.lab.distillation.replace import ModalFilter
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator, reset_mask

D, MODES, TIME = 3, 4, 40


def modal() -> ModalFilter:
    parts = torch.rand(3, D, MODES, generator=generator(), dtype=torch.float64)
    residues = torch.randn(D, MODES, generator=generator(1), dtype=torch.complex128)
    skip = torch.randn(D, generator=generator(2), dtype=torch.float64)
    return ModalFilter(torch.polar(0.5 + parts[0] / 2, 6 * (parts[1] - 0.5)), residues, skip)


def test_modal_filters_are_their_recurrence_and_their_kernel():
    h = modal()
    u = torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)
    reset = reset_mask(2, TIME, rate=0.1)
    a = torch.exp(-h.decay_log.exp() + 1j * h.phase)
    x, y = torch.zeros(2, D, MODES, dtype=a.dtype), []
    for t in range(TIME):
        x = a * torch.where(reset[:, t, None, None], 0, x) + u[:, t, :, None]
        y.append((torch.view_as_complex(h.residues) * x).sum(-1).real + h.D * u[:, t])
    found, state = h(u, reset=reset)
    assert_agree(found, torch.stack(y, 1), "outputs")
    assert_agree(state, x, "state")
    impulse = torch.zeros(1, TIME, D, dtype=torch.float64)
    impulse[:, 0] = 1
    assert_agree(h.kernel(TIME), h(impulse)[0][0].mT, "kernel")


def test_modal_filters_are_stable_whatever_they_are_given():
    poles = torch.tensor([[2.0 + 0j, 1j, 0j, -1.0]], dtype=torch.complex128)
    h = ModalFilter(poles, torch.ones_like(poles), torch.zeros(1))
    magnitude = torch.exp(-h.decay_log.exp()).detach()
    assert bool((magnitude < 1).all()) and float(magnitude[0, 2]) < 1e-20
    assert_agree(torch.exp(1j * h.phase).detach()[0, [0, 1, 3]], torch.tensor([1, 1j, -1], dtype=poles.dtype))
    of = groups_of(h)
    assert (of["decay_log"].name, of["phase"].name, of["residues"].name) == (
        *("transition", "transition", "channel"),
    )
