import pytest
import torch

from linrec import mixers
from linrec.mixers.hgru import HGRU
from linrec.mixers.slstm import SLSTM
from linrec.models import Bidirectional, Block
from linrec.nn import FeedForward
from linrec.testing import (
    assert_agree,
    check_batch_independence,
    check_compile,
    check_empty,
    check_layout,
    check_reset,
    generator,
    reset_mask,
)
from tests import released
from tests.mixers.variants import OF_FAMILIES
from tests.tiers import thorough, tiered

D = 8


def build(name: str = "hgru") -> mixers.Mixer:
    return mixers.build(name, D).double()


def inputs(batch: int = 3, time: int = 9) -> torch.Tensor:
    return torch.randn(batch, time, D, generator=generator(), dtype=torch.float64)


def gradients(y: torch.Tensor, wanted: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(y.shape, generator=generator(1), dtype=y.dtype)
    return torch.autograd.grad((y * weights).sum(), wanted)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("combine", ["sum", "mean", "concatenate"])
def test_two_explicit_runs(combine, shared):
    torch.manual_seed(0)
    ahead = build("gate_loop")
    back = ahead if shared else build("gate_loop")
    both = Bidirectional(ahead, None if shared else back, combine=combine).double()
    x = inputs().requires_grad_()
    y, state = both(x)
    f, g = ahead(x)[0], back(x[:, range(8, -1, -1)])[0][:, range(8, -1, -1)]
    if combine == "concatenate":
        expected = torch.cat([f, g], -1) @ both.project.weight.T + both.project.bias
    else:
        expected = (f + g) / (2 if combine == "mean" else 1)
    wanted = [x, *both.parameters()]
    assert_agree(y, expected)
    assert_agree(gradients(y, wanted), gradients(expected, wanted), "gradients")
    assert state is None


@pytest.mark.parametrize("name", tiered(["hgru"], OF_FAMILIES, mixers.names()))
def test_laws_of_what_has_no_state_and_no_direction(name):
    torch.manual_seed(0)
    both = Bidirectional(build(name), build(name)).eval()
    for law in (check_batch_independence, check_layout, check_empty):
        law(both, inputs(time=7))
    for rate in (0.0, 0.3, 1.0):
        reset = reset_mask(3, 7, rate=rate)
        # the law takes what stands before the first reset from a run without any, which here heard of all
        reset[:, 0] = True
        check_reset(both, inputs(time=7), reset)


def test_a_reset_cuts_the_same_link_in_both_directions():
    torch.manual_seed(0)
    both = Bidirectional(build(), build())
    reset = torch.zeros(1, 6, dtype=torch.bool)
    reset[0, 2] = True
    x = inputs(1, 6).requires_grad_()
    y, _ = both(x, reset=reset)
    for step in range(6):
        (reached,) = torch.autograd.grad(y[0, step].sum(), x, retain_graph=True)
        assert [n for n in range(6) if reached[0, n].any()] == ([0, 1] if step < 2 else [2, 3, 4, 5])


def test_segments_against_time_start_at_the_last_step():
    torch.manual_seed(0)
    both = Bidirectional(mixers.build("transformer_xl", D, segment_length=4)).double()
    reset = torch.zeros(3, 9, dtype=torch.bool)
    reset[:, 6] = True
    assert_agree(both(inputs(), reset=reset)[0][:, :6], both(inputs()[:, :6])[0])


def test_without_resets_every_step_hears_of_every_step():
    torch.manual_seed(0)
    x = inputs(1, 6).requires_grad_()
    y, _ = Bidirectional(build())(x)
    for step in range(6):
        (reached,) = torch.autograd.grad(y[0, step].sum(), x, retain_graph=True)
        assert reached.abs().sum(-1).gt(0).all()


@thorough
def test_compile():
    torch.manual_seed(0)
    check_compile(Bidirectional(build()), inputs(), compiler="aot_eager")


def test_lower_bounds_are_shared_within_a_direction():
    layers = [Bidirectional(HGRU(D), HGRU(D)) for _ in range(4)]
    Bidirectional.share(layers)
    ahead, back = ([layer.mixers[i] for layer in layers] for i in (0, 1))
    for stack in (ahead, back):
        assert len({id(mixer.bounds) for mixer in stack}) == 1
        assert [mixer.bounds(mixer.layer)[0].item() for mixer in stack] == [0, 0.25, 0.5, 0.75]
    assert ahead[0].bounds is not back[0].bounds

    layers = [Bidirectional(HGRU(D)) for _ in range(4)]
    Bidirectional.share(layers)
    assert [layer.mixers[0].layer for layer in layers] == [0, 1, 2, 3]
    assert len({id(layer.mixers[0].bounds) for layer in layers}) == 1


def test_the_mixers_of_both_directions_learn_their_layers_place():
    layer, alone = Bidirectional(*(SLSTM(D, n_heads=1) for _ in range(2))), SLSTM(D, n_heads=1)
    layer.place(1, 3)
    alone.place(1, 3)
    for mixer in layer.mixers:
        assert torch.equal(mixer.bias, alone.bias) and not torch.equal(mixer.bias, SLSTM(D, n_heads=1).bias)


def test_all_but_the_phase_is_shared_as_in_hgrn():
    torch.manual_seed(0)
    layers = [Bidirectional(build(), build(), unshared=("theta",)) for _ in range(3)]
    Bidirectional.share(layers)
    for layer in layers:
        ahead, back = layer.mixers
        different = {
            path for path, p in ahead.named_parameters() if dict(back.named_parameters())[path] is not p
        }
        assert different == {"theta"}
    # one set of bounds over the layers, whichever way time runs
    assert len({id(mixer.bounds.gamma) for layer in layers for mixer in layer.mixers}) == 1
    with torch.no_grad():
        layers[0].mixers[1].theta.copy_(torch.linspace(0, 3, D))
    y, _ = layers[0](inputs())
    ahead, back = layers[0].mixers
    assert_agree(y, ahead(inputs())[0] + back(inputs().flip(1))[0].flip(1))


def test_only_what_is_shared_whole_cannot_tell_a_sequence_from_its_reverse():
    torch.manual_seed(0)
    x = inputs()
    shared, own = Bidirectional(build()), Bidirectional(build(), build(), unshared=("theta",))
    assert_agree(shared(x.flip(1))[0], shared(x)[0].flip(1))
    with torch.no_grad():
        own.mixers[1].theta.mul_(2)
    assert not torch.allclose(own(x.flip(1))[0], own(x)[0].flip(1))


def test_parameters():
    count = {
        "one": Bidirectional(build()),
        "two": Bidirectional(build(), build()),
        "all but theta": Bidirectional(build(), build(), unshared=("theta",)),
        "all shared": Bidirectional(build(), build(), unshared=()),
    }
    count = {name: sum(p.numel() for p in mixer.parameters()) for name, mixer in count.items()}
    one = sum(p.numel() for p in build().parameters())
    assert count == {"one": one, "two": 2 * one, "all but theta": one + D, "all shared": one}


def test_a_block_takes_it():
    torch.manual_seed(0)
    block = Block(Bidirectional(build(), build()), FeedForward(D, D)).double()
    x = inputs()
    y, state = block(x)
    z = x + block.mixer(block.mixer_norm(x))[0]
    assert_agree(y, z + block.channel_mixing(block.channel_mixing_norm(z)))
    assert state is None


def test_there_is_no_state():
    both = Bidirectional(build())
    assert both.init_state(3) is None and both.state_size == 0
    with pytest.raises(ValueError, match=r"`state`.*got Tensor"):
        both(inputs(), build()(inputs())[1])


def test_errors():
    with pytest.raises(ValueError, match=r"`mixers`.*`d_model`; got \[\('GateLoop"):
        Bidirectional(build(), build("gate_loop"))
    with pytest.raises(ValueError, match=r"one `d_model`; got \[\('HGRU', 4\), \('HGRU', 8\)\]"):
        Bidirectional(HGRU(4), HGRU(8))
    with pytest.raises(ValueError, match="`combine` 'concat'; did you mean 'concatenate'"):
        Bidirectional(build(), combine="concat")
    with pytest.raises(ValueError, match="'phase'; did you mean"):
        Bidirectional(build(), build(), unshared=("theta", "phase"))
    with pytest.raises(ValueError, match=r"`unshared`.*got 1"):
        Bidirectional(build(), unshared=("theta",))
    with pytest.raises(ValueError, match=r"`x`.*\(batch, time, d_model\)"):
        Bidirectional(build())(inputs()[0])


def loaded(name: str, each: list[dict[str, torch.Tensor]], **arguments) -> Bidirectional:
    """A linear mixer in each direction with these weights, which share all but C and D."""
    pair = [mixers.build(name, D, activation=False, output="none", **arguments).double() for _ in range(2)]
    for mixer, weights in zip(pair, each, strict=True):
        mixer.load_state_dict(weights)
    own = ("C", "D") if name == "s5" else None
    return Bidirectional(*pair, unshared=own).requires_grad_(False)


def test_s5_in_both_directions_is_the_released_layer():
    numbers = released.read("s5_bidirectional")
    ahead = {name: x for name, x in numbers.items() if name not in ("x", "y", "C2")}
    back = {**ahead, "C": numbers["C2"], "D": torch.zeros(D, dtype=torch.float64)}
    y, _ = loaded("s5", [ahead, back], d_state=8)(numbers["x"])
    y = torch.nn.functional.gelu(y, approximate="tanh")
    assert released.error(y, numbers["y"]) < released.cases()["s5_bidirectional"]["error"]


def test_s4d_in_both_directions_is_the_released_layer():
    numbers = released.read("s4d_bidirectional")
    shared = {f"ssm.{name}": numbers[name] for name in ("dt_log", "A_log", "A_imag", "B")}
    C = numbers["C"]
    ahead = {**shared, "ssm.C": C[0], "ssm.D": numbers["D"]}
    # the released kernel against time starts at the next step: a power of Abar less, without the present
    A = torch.complex(-numbers["A_log"].exp(), numbers["A_imag"])
    z = numbers["dt_log"].exp()[:, None] * A
    c = torch.view_as_complex(C[1]) / z.exp()
    present = 2 * (c * torch.view_as_complex(numbers["B"]) * (z.exp() - 1) / A).sum(-1).real
    back = {**shared, "ssm.C": torch.view_as_real(c), "ssm.D": -present}
    y, _ = loaded("s4d", [ahead, back], d_state=6)(numbers["x"])
    assert released.error(y, numbers["y"]) < released.cases()["s4d_bidirectional"]["error"]
