"""One process against several: the same function of the same inputs, whole and in parts."""

import contextlib

import torch
import torch.distributed as dist

from linrec.parallel import time_parallel
from linrec.testing import assert_agree, differentiable, generator

# where operators run; `process` may set it
device = "cpu"


def here(parts):
    """The steps of this rank, of parts of these lengths."""
    begin = sum(parts[: dist.get_rank()])
    return slice(begin, begin + parts[dist.get_rank()])


def total(x):
    """The sum over ranks."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(torch.view_as_real(x) if x.is_complex() else x)
    return x


def same(actual, expected, what):
    """Compare to 12 digits in double precision, else as `assert_agree` does."""
    assert_agree(actual, expected, what)
    if expected.dtype in (torch.float64, torch.complex128) and expected.numel():
        scale = max(1.0, float(expected.detach().abs().max()))
        difference = float((actual - expected).detach().abs().max())
        assert difference <= 1e-12 * scale, f"{what}: off by {difference}"


def check_parts(function, inputs, over_time, parts, *, reset=None, **options):
    """Outputs, the final state and all gradients, of a loss in which every rank uses both.

    Args:
        function: (**inputs, reset, **options) -> (y, state).
        inputs: tensors of the whole sequence, or None.
        over_time: names of those that have time.
        parts: steps of each rank.
        reset: of the whole sequence.
    """
    given = {name: x.to(device) for name, x in inputs.items() if x is not None}
    reset = None if reset is None else reset.to(device)
    whole = differentiable(given)
    mine = differentiable({name: x[:, here(parts)] if name in over_time else x for name, x in given.items()})
    random = generator(1)

    y, state = function(**inputs | whole, reset=reset, **options)
    w_y, w_state = (torch.randn(x.shape, generator=random, dtype=torch.float64) for x in (y, state))
    w_y, w_state = w_y.to(y), w_state.to(state)
    uses = range(1, dist.get_world_size() + 1)
    loss = (w_y * y).sum().real + sum(uses) * (w_state * state).sum().real
    expected = gradients(loss, whole)

    with time_parallel():
        cut = None if reset is None else reset[:, here(parts)]
        y_mine, state_mine = function(**inputs | mine, reset=cut, **options)
    same(y_mine, y[:, here(parts)], "outputs")
    same(state_mine, state, "final state")
    loss = (w_y[:, here(parts)] * y_mine).sum().real
    loss = loss + uses[dist.get_rank()] * (w_state * state_mine).sum().real
    for name, gradient in gradients(loss, mine, expected).items():
        if expected[name] is None:
            assert gradient is None or not gradient.any(), name
        elif name in over_time:
            same(gradient, expected[name][:, here(parts)], f"gradient of {name}")
        else:
            same(total(gradient), expected[name], f"gradient of {name}, summed over ranks")


def gradients(loss, inputs, expected=None):
    """The gradients by name; zeros in place of none where others are expected."""
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    if expected is None:
        return dict(zip(inputs, found, strict=True))
    # a rank that has no share in the gradient of a state has zeros, or sums over ranks would wait for it
    for name, gradient in zip(inputs, found, strict=True):
        assert gradient is not None or expected[name] is None or not name.startswith("state"), name
    return {
        name: torch.zeros_like(x) if gradient is None and expected[name] is not None else gradient
        for (name, x), gradient in zip(inputs.items(), found, strict=True)
    }


@contextlib.contextmanager
def raises(error, *words):
    """As `pytest.raises`, with words to be found in the message."""
    try:
        yield
    except error as raised:
        for piece in words:
            assert piece in str(raised), f"{piece!r} not in {raised}"
    else:
        raise AssertionError(f"no {error.__name__} was raised")
