import pytest
import torch

from linrec.mixers import build
from linrec.mixers.gate_loop_attention import GateLoopAttention
from linrec.nn import groups_of
from linrec.testing import assert_agree, generator

D = 6


def make(**arguments) -> GateLoopAttention:
    torch.manual_seed(0)
    mixer = build("gate_loop_attention", D, **arguments)
    assert isinstance(mixer, GateLoopAttention)
    return mixer.double()


def inputs(time: int = 7) -> torch.Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def test_the_default_layer_is_equations_18_to_25():
    # few steps, so that the paper's running product and its inverse can be formed as they stand
    mixer, x = make(), inputs()
    q, k, v = (x @ linear.weight.T + linear.bias for linear in (mixer.q, mixer.k, mixer.v))
    magnitude, phase = mixer.transition.magnitude, mixer.transition.phase
    a = torch.sigmoid(x @ magnitude.weight.T + magnitude.bias)
    a = a * torch.exp(1j * (x @ phase.weight.T + phase.bias))
    product = a.cumprod(1)
    scores = torch.einsum("bnc,bmc->bnm", q * product, k / product).real
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
    assert_agree(mixer(x)[0], expected)


def test_without_decay_and_phase_it_is_softmax_attention():
    mixer, x = make(n_heads=2, scale=3**-0.5, phase_activation="none"), inputs()
    with torch.no_grad():
        mixer.transition.magnitude.weight.zero_()
        mixer.transition.magnitude.bias.fill_(60.0)
    q, k, v = (linear(x).unflatten(-1, (2, 3)).transpose(1, 2) for linear in (mixer.q, mixer.k, mixer.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_agree(mixer(x)[0], expected.transpose(1, 2).flatten(-2))


def test_parameter_count_and_marks():
    mixer = make(d_qk=4, d_v=2, n_heads=2, output_projection=True)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * (4 * D + 4) + 2 * D + 2 + 2 * D + D
    marked = {name for name, group in groups_of(mixer).items() if group.name == "transition"}
    assert marked == {name for name, _ in mixer.named_parameters() if name.startswith("transition.")}


def test_the_cache_grows_by_what_state_size_says():
    for mixer in (make(n_heads=2), make(phase_activation="none"), make(transition="fixed")):
        sizes = []
        for time in (0, 1, 2, 5):
            _, cache = mixer(inputs(time), mixer.init_state(2))
            sizes.append(sum(tensor.numel() for tensor in cache if tensor is not None))
        assert sizes == [2 * time * mixer.state_size for time in (0, 1, 2, 5)]


def test_argument_errors():
    with pytest.raises(
        ValueError, match="`d_v` must equal `d_model` = 6 where nothing follows the attention; got 4"
    ):
        make(d_v=4)
    with pytest.raises(ValueError, match="`d_qk` must be a positive multiple of `n_heads` = 4; got 6"):
        make(n_heads=4)
