"""long_conv against formulas written apart from it; test_laws.py has the laws."""

import numpy as np
import pytest
import torch

from linrec.ops import long_conv
from linrec.ops.long_conv import torch as in_torch
from linrec.ops.long_conv.torch import Convolution, by_fft, transform_size
from linrec.testing import assert_agree, check_operator, generator, long_conv_inputs, reset_mask
from tests.tiers import thorough

from .memory import Allocations

every_pair = pytest.mark.parametrize(
    ("mode", "backend"), [pair for pair in long_conv.operator.pairs if pair[1] != "triton"]
)
BY_FFT = {"mode": "convolution", "backend": "torch"}


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


@every_pair
def test_each_channel_is_convolved_with_its_kernel(mode, backend):
    inputs = long_conv_inputs(2, 9, 3, dtype=torch.float64)
    y, state = long_conv(**inputs, mode=mode, backend=backend)
    u, kernel, past = (inputs[name].numpy() for name in ("u", "kernel", "state"))
    every = np.concatenate([past, u], 1)
    for b in range(2):
        for d in range(3):
            expected = np.convolve(every[b, :, d], kernel[d])[5:14]
            np.testing.assert_allclose(y[b, :, d], expected, atol=1e-12)
    np.testing.assert_array_equal(state, every)


def test_forward_mode_goes_through_the_sums_alone():
    inputs = long_conv_inputs(1, 9, 2, dtype=torch.float64)
    turned = {name: draw(*x.shape, seed=seed) for seed, (name, x) in enumerate(inputs.items())}

    def jvp(mode, backend):
        return torch.func.jvp(lambda x: long_conv(**x, mode=mode, backend=backend)[0], (inputs,), (turned,))

    step = 1e-5
    ahead, behind = (
        long_conv(**{k: x + sign * step * turned[k] for k, x in inputs.items()})[0] for sign in (1, -1)
    )
    for backend in ("reference", "torch"):
        torch.testing.assert_close(
            jvp("recurrent", backend)[1], (ahead - behind) / (2 * step), rtol=0, atol=1e-8
        )
    with pytest.raises(NotImplementedError, match="jvp"):
        jvp("convolution", "torch")


@pytest.mark.parametrize("time", [1, 2, 3, 64, 97, 1000, 1009])
def test_every_length_of_kernel_and_sequence(time):
    u = draw(2, time, 3)
    for taps in {0, 1, time // 2, time - 1, time}:
        kernel = draw(3, taps, seed=1)
        y, _ = long_conv(u, kernel, **BY_FFT)
        for d in range(3):
            expected = np.convolve(u[1, :, d], kernel[d])[:time] if taps else np.zeros(time)
            np.testing.assert_allclose(y[1, :, d], expected, atol=1e-11)


@thorough
@pytest.mark.parametrize("time", [7, 33, 100])
@pytest.mark.parametrize("past", [0, 20])
def test_gradients_of_long_kernels(time, past):
    inputs = long_conv_inputs(2, time, 3, time + past, past=past)
    for options in ({}, {"reset": reset_mask(2, time, rate=0.1)}):
        check_operator(long_conv, inputs, **BY_FFT, dtype=torch.float32, options=options)


@every_pair
@pytest.mark.parametrize("options", [{}, {"reset": torch.zeros(2, 0, dtype=torch.bool)}])
def test_without_steps_the_state_goes_through(mode, backend, options):
    u, kernel, past = (x.requires_grad_() for x in (draw(2, 0, 3), draw(3, 5), draw(2, 6, 3, seed=1)))
    y, state = long_conv(u, kernel, state=past, **options, mode=mode, backend=backend)
    assert y.shape == (2, 0, 3) and torch.equal(state, past)
    found = torch.autograd.grad(
        (y.sum(), state.sum()), (kernel, past), allow_unused=True, materialize_grads=True
    )
    assert not found[0].any() and torch.equal(found[1], torch.ones_like(past))


@every_pair
def test_a_reset_hides_what_came_before_also_from_the_state(mode, backend):
    u, kernel = torch.arange(1.0, 6.0).reshape(1, 5, 1), torch.ones(1, 7)
    reset = torch.tensor([[False, False, False, True, False]])
    state = torch.full((1, 2, 1), 10.0)
    y, last = long_conv(u, kernel, state=state, reset=reset, mode=mode, backend=backend)
    assert_agree(y.flatten(), torch.tensor([21.0, 23, 26, 4, 9]))
    assert last.flatten().tolist() == [0, 0, 0, 0, 0, 4, 5]


every_reset = pytest.mark.parametrize("rate", [None, 0.1])


def resets(rate, *shape):
    return None if rate is None else reset_mask(*shape, rate=rate)


@every_reset
def test_pieces_make_no_difference(monkeypatch, rate):
    options = BY_FFT | {"reset": resets(rate, 3, 50)}
    u, kernel = draw(3, 50, 5).requires_grad_(), draw(5, 40, seed=1).requires_grad_()
    whole, _ = long_conv(u, kernel, **options)
    dy = draw(*whole.shape, seed=2)
    gradients = torch.autograd.grad(whole, (u, kernel), dy)
    # a row of one channel at a time
    monkeypatch.setattr(in_torch, "ALIVE", 10**6)
    divided, _ = long_conv(u, kernel, **options)
    assert_agree(divided, whole)
    assert_agree(torch.autograd.grad(divided, (u, kernel), dy), gradients)


@thorough
@every_reset
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_at_most_four_times_the_input(monkeypatch, dtype, rate):
    monkeypatch.setattr(in_torch, "SMALL", 0)
    options = BY_FFT | {"reset": resets(rate and 0.03, 4, 128)}
    u, kernel = draw(4, 128, 32).to(dtype).requires_grad_(), draw(32, 128).float().requires_grad_()
    with Allocations() as forward:
        y = by_fft(Convolution(u, kernel, None if rate is None else options["reset"].cumsum(1)), 0)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y, _ = long_conv(u, kernel, **options)
    # what is kept is there anyway, but for one number and one flag per step
    large = {x.untyped_storage().data_ptr() for x in kept if x.is_floating_point() and x.ndim > 1}
    assert large == {u.data_ptr(), kernel.data_ptr()}
    dy = torch.ones_like(y)
    with Allocations() as backward:
        torch.autograd.grad(y, (u, kernel), dy)
    size = u.numel() * u.element_size()
    assert size < forward.peak <= 4 * size
    assert size < backward.peak <= 4 * size


@every_reset
def test_gradients_are_differentiable_again(rate):
    u, kernel = draw(2, 5, 2).requires_grad_(), draw(2, 4, seed=1).requires_grad_()
    options = BY_FFT | {"reset": resets(rate and 0.3, 2, 5)}
    assert torch.autograd.gradgradcheck(lambda *x: long_conv(*x, **options)[0], (u, kernel))


@every_reset
def test_vmap(rate):
    u, kernel, reset = draw(4, 2, 20, 3), draw(4, 3, 20, seed=1), resets(rate, 2, 20)

    def of(u, kernel):
        return long_conv(u, kernel, reset=reset)[0]

    apart = torch.stack([of(*pair) for pair in zip(u, kernel, strict=True)])
    assert_agree(torch.func.vmap(of)(u, kernel), apart)
    shared = torch.stack([of(u[0], one) for one in kernel])
    assert_agree(torch.func.vmap(of, (None, 0))(u[0], kernel), shared)


@every_reset
@pytest.mark.parametrize("grad", [True, False])
def test_vmap_goes_piece_by_piece(monkeypatch, rate, grad):
    monkeypatch.setattr(in_torch, "SMALL", 0)
    u, kernel, reset = draw(2, 128, 32), draw(4, 32, 128, seed=1), resets(rate and 0.03, 2, 128)
    sizes = []
    pieces = in_torch.pieces

    def counted(given, size):
        for place, piece in pieces(given, size):
            sizes.append(piece.u.shape[2])
            yield place, piece

    monkeypatch.setattr(in_torch, "pieces", counted)
    with torch.set_grad_enabled(grad):
        y = torch.func.vmap(lambda kernel: long_conv(u, kernel, reset=reset, **BY_FFT)[0])(kernel)
        assert sum(sizes) == 4 * 32 and len(sizes) > 1
        apart = torch.stack([long_conv(u, one, reset=reset, **BY_FFT)[0] for one in kernel])
    assert_agree(y, apart)


@every_reset
def test_gradients_of_samples(rate):
    u, kernel, reset = draw(4, 2, 20, 3), draw(3, 20, seed=1), resets(rate, 2, 20)

    def loss(u, kernel):
        return long_conv(u, kernel, reset=reset, **BY_FFT)[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss, (0, 1)), (0, None))(u, kernel)
    each = [torch.func.grad(loss, (0, 1))(one, kernel) for one in u]
    leaves = [x.clone().requires_grad_() for x in (u[0], kernel)]
    assert_agree(each[0], torch.autograd.grad(loss(*leaves), leaves))
    assert_agree(found, tuple(torch.stack(x) for x in zip(*each, strict=True)))


@every_pair
def test_half_precision_is_convolved_in_float32(mode, backend):
    u, kernel = draw(2, 40, 3).bfloat16(), draw(3, 40, seed=1).float()
    expected, _ = long_conv(u.float(), kernel, mode=mode, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = long_conv(u, kernel, mode=mode, backend=backend)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(y, expected.bfloat16(), rtol=0, atol=0)


def test_transforms_have_the_next_even_length_of_small_factors():
    def is_good(size):
        for factor in (2, 3, 5):
            while size % factor == 0:
                size //= factor
        return size == 1

    for least in [*range(1, 300), 4097, 30001]:
        size = transform_size(least)
        assert size % 2 == 0 and size >= least and is_good(size)
        assert not any(is_good(other) for other in range(least + least % 2, size, 2))


def test_few_steps_are_sums(monkeypatch):
    monkeypatch.setattr(torch.fft, "rfft", None)
    state, kernel = draw(1, 100, 2), draw(2, 101)
    y, _ = long_conv(draw(1, 1, 2, seed=1), kernel, state=state)
    assert_agree(y[0, 0], (torch.cat([state, draw(1, 1, 2, seed=1)], 1)[0].flip(0) * kernel.T).sum(0))
    with pytest.raises(TypeError):
        long_conv(draw(1, 9, 2), draw(2, 9))


def test_errors():
    u, kernel = torch.zeros(2, 5, 3), torch.zeros(3, 5)
    wrong = {
        "`u` must have shape": (torch.zeros(5, 3), kernel, {}),
        "`kernel` must have shape (d, length) = (3, length); got (5, 3)": (u, kernel.T, {}),
        "at most as many taps as there are inputs, s + t = 0 + 5; got 6. Pass": (u, torch.zeros(3, 6), {}),
        "s + t = 2 + 5; got 8": (u, torch.zeros(3, 8), {"state": torch.zeros(2, 2, 3)}),
        "`state` must have shape (b, s, d) = (2, s, 3)": (u, kernel, {"state": torch.zeros(2, 3)}),
        "`reset` must have shape": (u, kernel, {"reset": torch.zeros(2, 4, dtype=torch.bool)}),
        "did you mean 'convolution'": (u, kernel, {"mode": "convolve"}),
    }
    for message, (u_, kernel_, options) in wrong.items():
        with pytest.raises(ValueError) as error:
            long_conv(u_, kernel_, **options)
        assert message in str(error.value)
    for message, arguments in {
        "`u` must be float16, bfloat16, float32 or float64; got int64": (u.long(), kernel),
        "`kernel` must be float32; got float64": (u, kernel.double()),
        "`kernel` must be bfloat16 (as `u`) or float32; got float16": (u.bfloat16(), kernel.half()),
    }.items():
        with pytest.raises(TypeError) as error:
            long_conv(*arguments)
        assert message in str(error.value)
