import pytest
import torch

from linrec.nn import groups_of
from linrec.nn.running_maximum import MemoryGates, running_maximum, stabilised
from linrec.ops import normalized_gate_loop
from linrec.testing import assert_agree, generator, reset_mask
from tests.nn.memory_loop import mlstm_loop

SHAPE = (2, 13, 3, 2)
TIME, HEADS, WIDTH = 7, 2, 3
GATES = [
    {},
    {"gate_cap": 2.0},
    {"forget_gate": "exponential"},
    {"forget_gate": "none"},
    {"input_gate": False},
]


def by_loop(x, before, log_decay, reset):
    largest = [before]
    for t in range(x.shape[1]):
        m = largest[-1] if log_decay is None else largest[-1] + log_decay.expand_as(x)[:, t]
        if reset is not None:
            m = m.masked_fill(reset[:, t, None, None], -torch.inf)
        largest.append(torch.maximum(m, x[:, t]))
    return torch.stack(largest, 1)


@pytest.mark.parametrize("starts", [0.0, -torch.inf], ids=["goes on", "starts"])
@pytest.mark.parametrize("rate", [None, 0.3, 1.0], ids=["no resets", "resets", "resets at every step"])
@pytest.mark.parametrize("decay", [None, SHAPE[2:], SHAPE], ids=["no decay", "constant", "per step"])
@pytest.mark.parametrize("time", [0, 1, 2, 8, 13])
def test_it_is_the_recurrence(time, decay, rate, starts):
    x = 3 * torch.randn(SHAPE, generator=generator(), dtype=torch.float64)[:, :time]
    before = torch.randn(2, 3, 2, generator=generator(1), dtype=torch.float64) + starts
    log_decay = None if decay is None else -torch.rand(decay, generator=generator(2), dtype=torch.float64)
    if decay == SHAPE:
        # exponential gates may be above 1
        log_decay = 0.5 + log_decay[:, :time]
    reset = None if rate is None else reset_mask(2, time, rate=rate)
    expected = by_loop(x, before, log_decay, reset)
    assert_agree(running_maximum(x, before, log_decay, reset=reset), expected)


def test_many_steps_of_steep_decays_lose_no_precision():
    # 4,096 steps of -20.5 add up to numbers whose neighbours in float32 are 0.004 apart
    x = 10 * torch.randn(1, 4096, 2, generator=generator(), dtype=torch.float64)
    before = torch.zeros(1, 2, dtype=torch.float64)
    log_decay = torch.tensor([-20.5, -1e-4], dtype=torch.float64)
    found = running_maximum(x.float(), before.float(), log_decay.float())
    assert_agree(found, by_loop(x, before, log_decay, None))


def test_nothing_passes_a_gradient():
    x = torch.randn(SHAPE, generator=generator(), requires_grad=True)
    assert not running_maximum(x, x[:, 0], -x.abs()).requires_grad


def make(gate_std: float = 1.0, **arguments) -> MemoryGates:
    torch.manual_seed(0)
    return MemoryGates(WIDTH, HEADS, gate_std=gate_std, **arguments).double()


def cell(gates, x, q, k, v, reset=None):
    """h, C^T with n as its last column, and m, of a memory with these gates."""
    q, k, v, log_f, floor, m = stabilised(q, k, v, *gates(x), None, reset=reset)
    h, memory = normalized_gate_loop(q, k, v, log_f, floor=floor, signed=False, reset=reset)
    return h, memory, m


def inputs() -> tuple[torch.Tensor, ...]:
    def random(seed, *shape):
        return torch.randn(2, TIME, *shape, generator=generator(seed), dtype=torch.float64)

    # q long enough that some denominators are above 1
    return random(0, WIDTH), 5 * random(1, HEADS, 3), random(2, HEADS, 3), random(3, HEADS, 4)


def gates_by_hand(memory, x, *, input_gate=True, forget_gate="sigmoid", gate_cap=None):
    def capped(linear):
        z = x @ linear.weight.T + linear.bias
        return z if gate_cap is None else gate_cap * torch.tanh(z / gate_cap)

    one = torch.ones(2, TIME, HEADS, dtype=x.dtype)
    i = capped(memory.i).exp() if input_gate else one
    if forget_gate == "none":
        return i, one
    return i, 1 / (1 + capped(memory.f).neg().exp()) if forget_gate == "sigmoid" else capped(memory.f).exp()


@pytest.mark.parametrize("arguments", GATES)
def test_it_is_the_papers_recurrence_with_gradients(arguments):
    memory, tensors = make(**arguments), inputs()
    found = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = [tensor.clone().requires_grad_() for tensor in tensors]
    h, state, m = cell(memory, *found)
    (h.square().sum() + h.sum()).backward()
    gradients = {name: p.grad.clone() for name, p in memory.named_parameters()}
    memory.zero_grad()
    x, q, k, v = expected
    y, C, n = mlstm_loop(q, k, v, *gates_by_hand(memory, x, **arguments))
    (y.square().sum() + y.sum()).backward()
    assert_agree(h, y, "h")
    unscaled = state * m.exp()[..., None, None]
    assert_agree(unscaled, torch.cat([C.mT, n[..., None]], -1), "C and n")
    for mine, other in zip(found, expected, strict=True):
        assert_agree(mine.grad, torch.zeros_like(x) if other.grad is None else other.grad, "gradients")
    assert_agree(gradients, {name: p.grad for name, p in memory.named_parameters()}, "of the gates")


def test_the_stabiliser_is_the_largest_weight_that_is_remembered_and_never_below_one():
    memory, (x, q, k, v) = make(), inputs()
    i, f = gates_by_hand(memory, x)
    m = torch.zeros(2, HEADS, dtype=x.dtype)
    for t in range(TIME):
        m = torch.maximum(f[:, t].log() + m, i[:, t].log().clamp(min=0))
    assert_agree(cell(memory, x, q, k, v)[2], m)
    # far below one, nothing is lost but what is nothing beside 1
    usual, _, _ = cell(memory, x, q, k, v)
    with torch.no_grad():
        memory.i.weight.zero_()
        memory.i.bias.fill_(-20.0)
    h, _, m = cell(memory, x, q, k, v)
    assert_agree(m, torch.zeros(2, HEADS))
    y, _, _ = mlstm_loop(q, k, v, torch.full_like(i, -20.0).exp(), f)
    torch.testing.assert_close(h, y, rtol=1e-9, atol=0)
    assert usual.abs().max() > 1e6 * h.abs().max()


def test_input_gates_whose_exponential_overflows():
    memory, (x, q, k, v) = make().float(), inputs()
    x = 100 * x
    i, f = gates_by_hand(memory.double(), x)
    assert i.log().max() > 100
    y, _, _ = mlstm_loop(q, k, v, i, f)
    h, state, _ = cell(memory.float(), *(tensor.float() for tensor in (x, q, k, v)))
    assert torch.isfinite(state).all()
    assert_agree(h, y)


def test_a_query_that_reads_nothing_gets_zero_also_where_the_floor_of_denominators_underflows():
    memory, (x, q, k, v) = make().float(), (tensor.float() for tensor in inputs())
    x = 100 * memory.i.weight.detach().sum(0).expand_as(x)
    h, _, m = cell(memory, x, torch.zeros_like(q), k, v)
    assert not m.neg().exp().any()
    assert not h.any()


def test_a_new_sequence_after_one_of_large_gates_keeps_its_precision():
    memory, (x, q, k, v) = make().float(), (tensor.float() for tensor in inputs())
    x[:, :3] = 300 * memory.i.weight.detach().sum(0)
    reset = torch.zeros(2, TIME, dtype=torch.bool)
    reset[:, 3] = True
    whole, *state = cell(memory, x, q, k, v, reset)
    assert memory(x)[0][:, 0].min() > 90
    alone, *end = cell(memory, x[:, 3:], q[:, 3:], k[:, 3:], v[:, 3:])
    assert_agree(whole[:, 3:], alone)
    assert_agree(tuple(state), tuple(end))


def test_the_state_keeps_no_more_than_it_is():
    for part in cell(make(), *inputs())[1:]:
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_gates_start_as_in_the_released_code():
    memory = make(gate_std=0.0)
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64)
    log_i, log_f = memory(x)
    assert_agree(log_i, torch.zeros(1, 1, HEADS))
    assert_agree(log_f.exp().float(), torch.sigmoid(torch.tensor([[[3.0, 6.0]]])))
    assert_agree(make(gate_std=0.0, forget_gate="exponential")(x)[1].float(), log_f.float())
    marks = {name: (group.name, group.weight_decay) for name, group in groups_of(memory).items()}
    assert marks["f.weight"] == marks["f.bias"] == ("transition", False)
    assert marks["i.weight"] == ("default", True)


def test_gates_stay_in_float32():
    memory, (x, _, _, _) = make(), inputs()
    expected = memory(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = memory.float()(x.float())
    assert_agree(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forget_gate": "sigmoids"}, "there is no `forget_gate` 'sigmoids'; did you mean 'sigmoid'"),
        ({"gate_cap": 0.0}, "`gate_cap` must be positive and finite; got 0.0. None is no cap."),
        ({"gate_std": -1.0}, "`gate_std` must be at least 0; got -1.0. It is a standard deviation."),
    ],
)
def test_argument_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        make(**arguments)
    assert message in str(error.value)
