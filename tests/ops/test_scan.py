"""What the laws do not say about ops.scan: values by hand, shapes, dtypes, errors, cost."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from linrec.ops import gate_loop, scan
from linrec.testing import (
    assert_agree,
    check_isolation,
    check_operator,
    gate_loop_inputs,
    generator,
    reset_mask,
    scan_inputs,
)
from tests.tiers import thorough, tiered

ON_CPU = [pair for pair in scan.operator.pairs if pair[1] != "triton"]
FAST = [pair for pair in ON_CPU if pair[1] != "reference"]

every_pair = pytest.mark.parametrize(("mode", "backend"), ON_CPU)
every_fast_pair = pytest.mark.parametrize(("mode", "backend"), FAST)


def series(*values: complex) -> torch.Tensor:
    """One sequence of one channel."""
    return torch.tensor(values).reshape(1, -1, 1)


@every_pair
def test_values_by_hand(mode, backend):
    def run(a, x, **options):
        y, state = scan(a, x, **options, mode=mode, backend=backend)
        return y.flatten().tolist(), state.flatten().tolist()

    x = series(1.0, 2.0, 3.0)
    assert run(torch.tensor(0.5), x) == ([1, 2.5, 4.25], [4.25])
    assert run(torch.tensor(0.5), x, reverse=True) == ([2.75, 3.5, 3.0], [2.75])
    assert run(series(2.0, 0.0, -1.0), x, state=torch.tensor([[5.0]])) == ([11, 2, 1], [1])
    assert run(series(2.0, 0.0, -1.0), x, state=torch.tensor([[5.0]]), reverse=True) == ([5, 2, -2], [5])
    quarter_turn = torch.tensor(1j)
    assert run(quarter_turn, series(1, 0, 0, 0).cfloat()) == ([1, 1j, -1, -1j], [-1j])


@every_pair
def test_nothing_passes_a_reset_in_reversed_time(mode, backend):
    def run(x, state=None, *, reset=None):
        y, _ = scan(**x, reset=reset, reverse=True, mode=mode, backend=backend)
        return y, state

    for time in (9, 70):
        inputs = scan_inputs(2, time, 3)
        check_isolation(run, {name: inputs[name] for name in ("a", "x")})


@every_pair
def test_reset_by_hand(mode, backend):
    a, x, state = torch.ones(()), series(1.0, 10.0, 100.0), torch.tensor([[1000.0]])

    def run(*reset, reverse):
        y, last = scan(
            a, x, state=state, reset=torch.tensor([reset]), reverse=reverse, mode=mode, backend=backend
        )
        return y.flatten().tolist(), last.item()

    assert run(True, False, False, reverse=False) == ([1, 11, 111], 111)
    assert run(False, True, False, reverse=False) == ([1001, 10, 110], 110)
    assert run(False, False, True, reverse=False) == ([1001, 1011, 100], 100)
    # backwards, a reset at the first step cuts off what would come before it, and there is nothing
    assert run(True, False, False, reverse=True) == ([1111, 1110, 1100], 1111)
    assert run(False, True, False, reverse=True) == ([1, 1110, 1100], 1)
    assert run(False, False, True, reverse=True) == ([11, 10, 1100], 11)


@thorough
@every_fast_pair
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("time", [1, 2, 15, 16, 17, 33, 63, 64, 65, 600])
def test_agrees_with_the_reference(mode, backend, time, reverse):
    reset = reset_mask(2, time, rate=0.1)
    reset[0, 0] = True
    for dtype in (torch.float64, torch.complex128):
        inputs = scan_inputs(2, time, 3, dtype=dtype, seed=time)
        for options in ({"reverse": reverse}, {"reverse": reverse, "reset": reset}):
            check_operator(scan, inputs, mode=mode, backend=backend, dtype=dtype, options=options)


@every_fast_pair
@pytest.mark.parametrize(
    "shape",
    [(2, 40, 3), (1, 40, 3), (40, 3), (2, 40, 1), (2, 1, 3), (1, 1, 3), (3,), (40, 1), (2, 1, 1), (1,), ()],
)
def test_a_broadcasts(mode, backend, shape):
    inputs = scan_inputs(2, 40, 3, dtype=torch.complex128)
    inputs["a"] = inputs["a"].flatten()[: math.prod(shape)].reshape(shape)
    for options in ({}, {"reset": reset_mask(2, 40)}, {"reverse": True, "reset": reset_mask(2, 40)}):
        check_operator(scan, inputs, mode=mode, backend=backend, dtype=torch.complex128, options=options)


@every_fast_pair
@pytest.mark.parametrize("real", tiered(["a", "x", "state"], ["a, state", "x, state", "a, x"]))
def test_real_and_complex_mix(mode, backend, real):
    inputs = scan_inputs(2, 20, 3, dtype=torch.complex128)
    # contiguous: as_strided gradients of a real view would be another test
    inputs |= {name: inputs[name].real.clone() for name in real.split(", ")}
    if real == "a, x":
        inputs["state"] = inputs["state"].real.clone()
    check_operator(scan, inputs, mode=mode, backend=backend, dtype=torch.complex128)


DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


@every_pair
@pytest.mark.parametrize(("dtype", "wide"), DTYPES.items())
def test_dtypes(mode, backend, dtype, wide):
    inputs = {name: t.requires_grad_() for name, t in scan_inputs(2, 20, 3, dtype=dtype).items()}
    inputs["state"] = inputs["state"].detach().to(torch.promote_types(dtype, torch.float16)).requires_grad_()
    y, state = scan(**inputs, mode=mode, backend=backend)
    assert (y.dtype, state.dtype) == (dtype, wide)
    (y.abs().sum() + state.abs().sum()).backward()
    for tensor in inputs.values():
        assert tensor.grad.dtype == tensor.dtype


@every_pair
@pytest.mark.parametrize(
    ("a", "x", "y"),
    [
        (torch.float32, torch.complex64, torch.complex64),
        (torch.complex64, torch.float32, torch.complex64),
        (torch.float64, torch.complex128, torch.complex128),
    ],
)
def test_dtype_of_a_mixture(mode, backend, a, x, y):
    outputs, state = scan(torch.ones(3, dtype=a), torch.ones(2, 20, 3, dtype=x), mode=mode, backend=backend)
    assert outputs.dtype == state.dtype == y


@every_fast_pair
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", ["step", "head", "channel", "constant"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_in_float32_beside_inputs_in_half_precision(mode, backend, half, decay, reverse):
    inputs = scan_inputs(2, 70, 3, decay=decay)
    inputs["x"] = inputs["x"].to(half)
    options = {"reset": reset_mask(2, 70, rate=0.1), "reverse": reverse}
    check_operator(scan, inputs, mode=mode, backend=backend, dtype=half, options=options)


@every_pair
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_in_float32_is_not_rounded_to_the_precision_of_x(mode, backend, half):
    # in bfloat16, 0.999 is 1
    a = torch.full((1, 500, 2), 0.999).requires_grad_()
    x = torch.ones(1, 500, 2, dtype=half).requires_grad_()
    y, state = scan(a, x, mode=mode, backend=backend)
    assert (y.dtype, state.dtype) == (half, torch.float32)
    steps = torch.arange(1, 501, dtype=torch.float64)[None, :, None].expand(1, -1, 2)
    expected = (1 - 0.999**steps) / 0.001
    torch.testing.assert_close(state.double(), expected[:, -1], rtol=1e-5, atol=0)
    assert_agree(y, expected, dtype=half)
    state.sum().backward()
    assert (a.grad.dtype, x.grad.dtype) == (torch.float32, half)
    assert_agree(x.grad, 0.999 ** (500 - steps), dtype=half)
    # y before each step is read in the precision of y
    before = torch.cat([torch.zeros_like(expected[:, :1]), expected[:, :-1]], 1)
    assert_agree(a.grad, 0.999 ** (500 - steps) * before, dtype=half)
    nothing, _ = scan(a[:, :0], x[:, :0], mode=mode, backend=backend)
    assert nothing.dtype == half


@every_fast_pair
def test_half_precision_accumulates_in_float32(mode, backend):
    # in bfloat16, 256 + 1 is 256: a carry of that precision would stand still
    x = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    y, state = scan(torch.ones((), dtype=torch.bfloat16), x, mode=mode, backend=backend)
    assert state.item() == 1024 and y[0, 511].item() == 512


@every_pair
@pytest.mark.parametrize("reverse", [False, True])
def test_pieces_with_a_carried_state_are_one_pass(mode, backend, reverse):
    inputs = scan_inputs(2, 50, 3, dtype=torch.float64)
    reset = reset_mask(2, 50)
    # backwards, the link between the pieces belongs to the later one's first step
    reset[:, 20] = False
    whole, last = scan(**inputs, reset=reset, reverse=reverse, mode=mode, backend=backend)
    state, pieces = inputs["state"], [slice(20), slice(20, 21), slice(21, 50)]
    ys = []
    for piece in reversed(pieces) if reverse else pieces:
        a, x = inputs["a"][:, piece], inputs["x"][:, piece]
        cut = reset[:, piece].clone()
        if reverse and piece.stop < 50:
            # backwards, a piece sees no reset of the step that follows it
            state = torch.where(reset[:, piece.stop, None], 0, state)
        y, state = scan(a, x, state=state, reset=cut, reverse=reverse, mode=mode, backend=backend)
        ys.append(y)
    assert_agree(torch.cat(ys[::-1] if reverse else ys, 1), whole)
    assert_agree(state, last)


@every_fast_pair
def test_layout_in_memory_does_not_matter(mode, backend):
    inputs = scan_inputs(4, 40, 6, dtype=torch.complex64)
    a, x = inputs["a"], inputs["x"]
    views = [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.repeat_interleave(2, dim=2)[..., ::2],
        lambda t: t.repeat_interleave(3, dim=1)[:, ::3],
        lambda t: t.conj().resolve_conj().conj(),
        lambda t: torch.stack([t.real, t.imag], 0).movedim(0, -1).contiguous().view(torch.complex64)[..., 0],
    ]
    expected = scan(a, x, mode=mode, backend=backend)
    for view in views:
        assert_agree(scan(view(a), view(x), mode=mode, backend=backend), expected)
    negative = x.conj().imag
    assert negative.is_neg()
    assert_agree(
        scan(a.real, negative, mode=mode, backend=backend)[0],
        scan(a.real.clone(), negative.resolve_neg().clone(), mode=mode, backend=backend)[0],
    )


@every_pair
@pytest.mark.parametrize(
    ("batch", "time", "channels"), [(0, 5, 3), (2, 0, 3), (2, 5, 0), (0, 0, 0), (1, 1, 1)]
)
def test_empty_and_single_axes(mode, backend, batch, time, channels):
    x = torch.randn(batch, time, channels, requires_grad=True)
    state = torch.randn(batch, channels, requires_grad=True)
    for a in (torch.rand(batch, time, channels, requires_grad=True), torch.rand((), requires_grad=True)):
        y, last = scan(a, x, state=state, mode=mode, backend=backend)
        assert y.shape == x.shape and last.shape == state.shape
        for gradient, tensor in zip(
            torch.autograd.grad(y.sum() + last.sum(), (a, x, state), materialize_grads=True),
            (a, x, state),
            strict=True,
        ):
            assert gradient.shape == tensor.shape


@every_pair
def test_no_steps_return_the_given_state(mode, backend):
    state = torch.randn(2, 3, dtype=torch.float64)
    y, last = scan(torch.rand(3), torch.empty(2, 0, 3), state=state, mode=mode, backend=backend)
    assert y.shape == (2, 0, 3) and torch.equal(last, state.float())
    _, last = scan(torch.rand(3), torch.empty(2, 0, 3), mode=mode, backend=backend)
    assert torch.equal(last, torch.zeros(2, 3))


@thorough
@every_pair
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_finite_differences(mode, backend, reverse):
    reset = torch.tensor([[True, False, False, True, False], [False, False, True, False, False]])
    for dtype in (torch.float64, torch.complex128):
        inputs = [t.requires_grad_() for t in scan_inputs(2, 5, 2, dtype=dtype).values()]

        def run(a, x, state):
            return scan(a, x, state=state, reset=reset, reverse=reverse, mode=mode, backend=backend)

        assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, check_batched_forward_grad=True)


@every_pair
def test_forward_mode_alone_keeps_to_dtypes(mode, backend):
    # nothing requires a gradient
    x = torch.randn(2, 40, 2, generator=generator()).bfloat16()
    a = torch.rand(2, 40, 2, generator=generator(1))
    with forward_ad.dual_level():
        duals = scan(a, forward_ad.make_dual(x, x), mode=mode, backend=backend)
        values, tangents = zip(*map(forward_ad.unpack_dual, duals), strict=True)
    assert [x.dtype for x in tangents] == [x.dtype for x in values] == [torch.bfloat16, torch.float32]
    # a scan from zeros is linear in x
    assert_agree(tangents, values, dtype=torch.bfloat16)


def test_kernels_without_forward_mode_raise_an_error():
    inputs = gate_loop_inputs(1, 4, 1, 2, 2)
    with forward_ad.dual_level():
        inputs["v"] = forward_ad.make_dual(inputs["v"], inputs["v"])
        with pytest.raises(NotImplementedError, match="jvp"):
            gate_loop(**inputs, mode="recurrent", backend="numba")
        y, _ = gate_loop(**inputs, mode="recurrent", backend="reference")
        assert forward_ad.unpack_dual(y).tangent is not None


@every_pair
def test_jacobians_in_forward_mode(mode, backend):
    a, x, _ = scan_inputs(1, 5, 2, dtype=torch.float64).values()

    def run(a, x):
        return scan(a, x, mode=mode, backend=backend)[0]

    assert_agree(torch.func.jacfwd(run, (0, 1))(a, x), torch.func.jacrev(run, (0, 1))(a, x))


@every_pair
def test_gradients_can_be_differentiated(mode, backend):
    inputs = [t.requires_grad_() for t in scan_inputs(1, 4, 2, dtype=torch.float64).values()]
    assert torch.autograd.gradgradcheck(
        lambda a, x, state: scan(a, x, state=state, mode=mode, backend=backend),
        inputs,
        check_fwd_over_rev=True,
    )


@every_fast_pair
def test_only_wanted_gradients_are_made(mode, backend):
    given = scan_inputs(2, 20, 3, dtype=torch.float64)
    everything = {name: t.clone().requires_grad_() for name, t in given.items()}
    y, last = scan(**everything, mode=mode, backend=backend)
    expected = dict(
        zip(given, torch.autograd.grad(y.sum() + last.sum(), tuple(everything.values())), strict=True)
    )
    for wanted in given:
        inputs = given | {wanted: given[wanted].clone().requires_grad_()}
        y, last = scan(**inputs, mode=mode, backend=backend)
        assert_agree(torch.autograd.grad(y.sum() + last.sum(), inputs[wanted])[0], expected[wanted])


@every_fast_pair
def test_extreme_decays_over_a_long_sequence(mode, backend):
    if (mode, backend) == ("recurrent", "torch"):
        pytest.skip("16,384 steps one by one, and the same arithmetic as in the blocked scan")
    x = torch.randn(1, 16_384, 6, generator=generator())
    a = torch.tensor([0.0, 1e-30, 0.5, 0.999, 0.999999, 1.0])
    expected, _ = scan(a.double(), x.double(), backend="reference")
    y, last = scan(a, x, mode=mode, backend=backend)
    assert_agree(y, expected)
    assert torch.equal(y[..., 0], x[..., 0]) and torch.equal(y[:, -1], last)
    y, _ = scan(a.bfloat16(), x.bfloat16(), mode=mode, backend=backend)
    assert y.isfinite().all()


class Count(TorchDispatchMode):
    """Counts operations, and the elements that they write."""

    def __init__(self):
        super().__init__()
        self.operations, self.elements = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        # views cost nothing
        if isinstance(result, torch.Tensor) and not result._is_view():
            self.operations, self.elements = self.operations + 1, self.elements + result.numel()
        return result


def test_the_blocked_scan_is_parallel_and_does_linear_work():
    def cost(time):
        inputs = {name: t.requires_grad_() for name, t in scan_inputs(1, time, 1).items()}
        with Count() as count:
            y, _ = scan(**inputs, mode="scan", backend="torch")
            y.sum().backward()
        return count

    short, long = cost(256), cost(256 * 256)
    # two levels of blocks more
    assert long.operations < 3 * short.operations
    assert long.elements < 1.1 * 256 * short.elements


@thorough
@pytest.mark.parametrize(("mode", "backend"), [("scan", "torch"), ("recurrent", "numba")])
def test_compiles_into_one_graph(mode, backend):
    inputs = {name: t.requires_grad_() for name, t in scan_inputs(2, 35, 3).items()}
    reset = reset_mask(2, 35)

    def run(a, x, state):
        y, last = scan(a, x, state=state, reset=reset, reverse=True, mode=mode, backend=backend)
        gradients = torch.autograd.grad(y.square().sum() + last.square().sum(), (a, x, state))
        return y, last, gradients

    # the gradient is taken outside of the graph
    compiled = torch.compile(scan, fullgraph=True)
    options = {"reset": reset, "reverse": True, "mode": mode, "backend": backend}
    y, last = compiled(**inputs, **options)
    gradients = torch.autograd.grad(y.square().sum() + last.square().sum(), tuple(inputs.values()))
    assert_agree((y, last, gradients), run(**inputs))


@thorough
def test_exported_programs_need_no_kernels():
    class Module(torch.nn.Module):
        def forward(self, a, x):
            return scan(a, x)

    inputs = scan_inputs(2, 40, 3)
    arguments = (inputs["a"], inputs["x"])
    batch = torch.export.Dim("batch")
    program = torch.export.export(Module(), arguments, dynamic_shapes=({0: batch}, {0: batch}))
    assert not [node for node in program.graph.nodes if "linrec" in str(node.target)]
    larger = scan_inputs(5, 40, 3)
    arguments = (larger["a"], larger["x"])
    assert_agree(program.module()(*arguments), scan(*arguments, backend="reference"))


@every_fast_pair
def test_vmap_over_any_axis(mode, backend):
    def loss(a, x):
        y, state = scan(a, x, mode=mode, backend=backend)
        return y.square().sum() + state.sum(), (y, state)

    a, x = torch.rand(4, 2, 20, 3, dtype=torch.float64), torch.randn(4, 2, 20, 3, dtype=torch.float64)
    gradient = torch.func.grad(loss, argnums=(0, 1), has_aux=True)
    for mapped, dims in ((a, 0), (a.movedim(0, 2), 2), (a[:, 0, 0], 0), (a[0, :1], None), (a[0, 0, 0], None)):
        actual = torch.vmap(gradient, in_dims=(dims, 0))(mapped, x)
        for i in range(4):
            one = gradient(mapped if dims is None else mapped.select(dims, i), x[i])
            assert_agree(torch.utils._pytree.tree_map(lambda t, i=i: t[i], actual), one)


@every_fast_pair
def test_batched_gradients(mode, backend):
    inputs = tuple(t.requires_grad_() for t in scan_inputs(2, 20, 3, decay="head").values())
    y, _ = scan(inputs[0], inputs[1], state=inputs[2], mode=mode, backend=backend)
    cotangents = torch.randn(3, *y.shape, generator=generator())
    batched = torch.autograd.grad(y, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(y, inputs, cotangents[i], retain_graph=True)
        assert_agree(tuple(gradient[i] for gradient in batched), one)


A, X = torch.rand(2, 5, 3), torch.rand(2, 5, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X.int()}, TypeError, r"`x` must be float16, .*; got int32\. Cast it"),
        ({"a": A.bool()}, TypeError, r"`a` must be float16, .*; got bool"),
        ({"a": A.to(torch.float8_e5m2)}, TypeError, r"`a` must be float16, .*; got float8_e5m2"),
        ({"a": A.double()}, TypeError, r"same precision, real or complex; got float64 and float32"),
        ({"a": A.bfloat16()}, TypeError, r"same precision, real or complex; got bfloat16 and float32"),
        ({"x": X[0]}, ValueError, r"`x` must have shape \(batch, time, channels\); got \(5, 3\)"),
        ({"a": A[:, :4]}, ValueError, r"`a` must broadcast .* = \(2, 5, 3\); got \(2, 4, 3\)\. Pass one"),
        ({"a": A[None]}, ValueError, r"`a` must broadcast .* = \(2, 5, 3\); got \(1, 2, 5, 3\)"),
        ({"x": X[:, :1]}, ValueError, r"`a` must broadcast .* = \(2, 1, 3\); got \(2, 5, 3\)"),
        ({"state": A[:, 0, :2]}, ValueError, r"`state` must have shape \(b, c\) = \(2, 3\); got \(2, 2\)"),
        ({"state": A[:, 0].int()}, TypeError, r"`state` must be float32; got int32"),
        ({"state": A[:, 0].cfloat()}, TypeError, r"`state` must be real .*; got complex64\. Pass its real"),
        ({"reset": torch.zeros(2, 5)}, TypeError, r"`reset` must be bool; got float32\. Pass"),
        (
            {"reset": torch.zeros(2, 3).bool()},
            ValueError,
            r"`reset` must have shape .* \(2, 5\); got \(2, 3\)",
        ),
        ({"a": A.to("meta")}, ValueError, r"`a` must be on the device of `x`, 'cpu'; got 'meta'\. Move it"),
        ({"mode": "parallel"}, ValueError, r"no `mode` of `scan` called 'parallel'; did you mean"),
        ({"backend": "numb"}, ValueError, r"did you mean 'numba'\? Choose from: 'auto', 'torch'"),
        (
            {"mode": "scan", "backend": "numba"},
            ValueError,
            r"pairs that exist are \('recurrent', 'torch'\)",
        ),
        (
            {"a": A.to("meta"), "x": X.to("meta"), "backend": "numba"},
            ValueError,
            r"runs on 'cpu'; got .*'meta'",
        ),
    ],
)
def test_errors_name_what_came_and_the_cure(arguments, error, message):
    with pytest.raises(error, match=message):
        scan(**({"a": A, "x": X} | arguments))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_complex_is_refused():
    with pytest.raises(TypeError, match=r"`a` must be float16, .*; got complex32"):
        scan(A.to(torch.complex32), X)


@thorough
def test_compiles_with_one_tensor_for_both_inputs():
    x = torch.rand(2, 20, 3, requires_grad=True)
    run = torch.compile(lambda x: scan(x, x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x), scan(x, x)[0])
    gradients = [torch.autograd.grad(f(x).sum(), x)[0] for f in (run, lambda x: scan(x, x)[0])]
    torch.testing.assert_close(*gradients)


def test_runs_without_data():
    y, state = scan(A.to("meta"), X.to("meta"), reset=torch.zeros(2, 5, dtype=torch.bool, device="meta"))
    assert y.shape == (2, 5, 3) and state.shape == (2, 3)
