"""What mixers tell about themselves for inspection: transitions and token-mixing matrices."""

import pytest
import torch

from linrec.mixers import Mixer, build
from linrec.testing import assert_agree, generator

from .variants import arguments, cases

D, TIME = 8, 5
RECURRENT = cases("gate_loop", "gilr", "gla", "hgrn2", "hgru", "lru", "retnet", "trans_normer")
RECURRENT += [("rg_lru", "paper"), ("rg_lru", "no gates")]
# attention within blocks has no transitions, and gates after a convolution depend on the steps before
CONVOLVED = [("hgrn2", "grouped"), ("hgru", "flash-linear-attention")]
BLOCKS = [("trans_normer", "blocks"), ("trans_normer", "turned blocks")]
RECURRENT = [case for case in RECURRENT if case not in CONVOLVED + BLOCKS]
RESET = torch.tensor([[False] * TIME, [False, True, False, True, False]])


def make(name: str, **variant) -> Mixer:
    torch.manual_seed(0)
    return build(name, D, **variant).double().eval()


def inputs() -> torch.Tensor:
    return torch.randn(2, TIME, D, generator=generator(), dtype=torch.float64)


def polar(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    magnitude, phase = mixer.transitions(x)
    phase = torch.zeros(()) if phase is None else phase
    return (magnitude * torch.exp(1j * phase)).expand(*x.shape[:2], -1)


@pytest.mark.parametrize(("name", "variant"), RECURRENT)
def test_transitions_are_what_the_state_is_multiplied_by(name, variant):
    mixer, x = make(name, **arguments(name, variant)), inputs()
    a = polar(mixer, x)
    start, around = mixer.init_state(2), lambda state: state
    if isinstance(start, tuple):
        # the tail of a convolution is beside the state of the recurrence
        tail, start = start
        around = lambda state: (tail, state)  # noqa: E731
    for t in range(TIME):
        one, other = (
            torch.randn(start.shape, generator=generator(s), dtype=start.dtype) for s in (t, t + 50)
        )
        after = (mixer(x[:, t : t + 1], around(state))[1] for state in (one, other))
        left, right = (state[1] if isinstance(state, tuple) else state for state in after)
        # a matrix state has one transition for all of its value channels
        factor = a[:, t].reshape(*start.shape[:3], 1) if start.dim() == 4 else a[:, t]
        expected = factor * (one - other)
        assert_agree(left - right, expected if start.is_complex() else expected.real, "states")


def test_transitions_of_attention_are_those_of_its_keys():
    mixer, x = make("gate_loop_attention", n_heads=2), inputs()
    magnitude, phase = mixer.transitions(x)
    assert_agree(magnitude, torch.sigmoid(mixer.transition.magnitude(x)), "magnitudes")
    assert_agree(phase, mixer.transition.phase(x), "phases")


def test_transitions_stay_in_float32_under_autocast_and_are_none_where_there_are_none():
    class Plain(Mixer):
        forward = init_state = state_size = None

    with torch.autocast("cpu", torch.bfloat16):
        for name in ("gate_loop_attention", *dict(RECURRENT)):
            found = build(name, D).transitions(inputs().float())
            assert {part.dtype for part in found if part is not None} == {torch.float32}, name
    assert Plain(D).transitions(inputs()) is None and Plain(D).token_mixing(inputs()) is None


def mixing_by_hand(a: torch.Tensor, weight, reset: torch.Tensor) -> torch.Tensor:
    """W_nm,.. = weight(b, n, m, prod_{j=m+1..n} a_j) as plain loops, nothing where a reset lies between."""
    rows = []
    for b in range(len(a)):
        for n in range(TIME):
            for m in range(TIME):
                product, cut = torch.ones_like(a[0, 0]), m > n
                for j in range(m + 1, n + 1):
                    product, cut = product * a[b, j], cut or bool(reset[b, j])
                rows.append(0 * weight(b, n, m, product) if cut else weight(b, n, m, product))
    return torch.stack(rows).unflatten(0, (len(a), TIME, TIME))


@pytest.mark.parametrize(("name", "variant"), [c for c in cases("hgru", "lru") if c not in CONVOLVED])
def test_token_mixing_of_elementwise_recurrences_is_input_gate_times_products_of_magnitudes(name, variant):
    mixer, x = make(name, **arguments(name, variant)), inputs()
    if name == "lru":
        gate = mixer.gamma_log.exp().expand(2, TIME, -1)
    elif not mixer.input_gate:
        gate = torch.ones(2, TIME, D)
    else:
        gamma = mixer.lower_bound if mixer.bounds is None else mixer.bounds(0)
        mu = torch.zeros((), dtype=x.dtype) if mixer.mu is None else torch.sigmoid(mixer.mu(x))
        gate = (1 - (gamma + (1 - gamma) * mu)).expand(2, TIME, D)
    expected = mixing_by_hand(
        polar(mixer, x).abs(), lambda b, n, m, product: (gate[b, m] * product).mean(), RESET
    )
    assert_agree(mixer.token_mixing(x, reset=RESET), expected, "token mixing")


@pytest.mark.parametrize(("name", "variant"), cases("gate_loop", "gate_loop_attention"))
def test_token_mixing_of_gate_loops_is_the_mean_over_heads(name, variant):
    mixer, x = make(name, **arguments(name, variant)), inputs()
    q, k = (project(x).unflatten(-1, (mixer.n_heads, -1)) for project in (mixer.q, mixer.k))

    def weight(b, n, m, product):
        return (q[b, n] * k[b, m] * product.unflatten(-1, (mixer.n_heads, -1))).sum(-1).real

    entries = mixing_by_hand(polar(mixer, x), weight, RESET)
    if name == "gate_loop":
        expected = entries.abs().mean(-1)
    else:
        seen = mixing_by_hand(polar(mixer, x), lambda b, n, m, product: torch.ones(mixer.n_heads), RESET)
        shares = (mixer.scale * entries).exp() * seen
        expected = (shares / shares.sum(2, keepdim=True)).mean(-1)
    assert_agree(mixer.token_mixing(x, reset=RESET), expected, "token mixing")
