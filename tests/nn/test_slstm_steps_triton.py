"""The Triton kernels of the sLSTM's loop: on a GPU where there is one, else interpreted."""

import pytest
import torch

from linrec.mixers import build
from linrec.nn.slstm_steps import slstm_steps, triton
from linrec.nn.slstm_steps.torch import Steps, by_step
from linrec.testing import assert_agree, generator, reset_mask
from tests.ops.opcheck import check_operators
from tests.ops.triton_process import DEVICE, INTERPRETED, on_a_gpu, on_either, quiet
from tests.tiers import thorough, tiered

pytest.importorskip("triton")
pytestmark = quiet


@pytest.fixture(params=[5, 20])
def size(request, monkeypatch):
    """Channels of a head. If 20, programs on a GPU share it, and hold weights in half precision alone."""
    if request.param == 20:
        monkeypatch.setattr(triton, "HELD_BYTES", 4 * 32 * 16 * 2)
    return request.param


def draw(batch, time, heads, size, *, reset=None, sigmoid=True, fresh=False, dtype=torch.float32):
    """Inputs, of which the recurrent weights matter, on a state as other steps leave it."""
    random = generator(batch + time + size)

    def normal(*shape):
        return torch.randn(*shape, generator=random).to(DEVICE)

    Wx, R = normal(batch, time, 4, heads, size), normal(heads, size, 4 * size) / size**0.5
    h, c, n, m = (normal(batch, heads, size) for _ in range(4))
    start = (0 * h, 0 * c, 0 * n, m.fill_(-torch.inf)) if fresh else (h.tanh(), c, 1 + n.abs(), m)
    return Steps(Wx, R.to(dtype), *start, reset, sigmoid)


def outcome(given, backend):
    """Outputs, last states, and gradients of a weighted sum of all that have any."""
    names = ("Wx", "R", "hidden", "cell", "normalizer")
    given = given._replace(**{name: getattr(given, name).detach().requires_grad_() for name in names})
    hidden, state = slstm_steps(*given[:2], given[2:6], reset=given[6], sigmoid=given[7], backend=backend)
    outputs, random = (hidden, *state[:3]), generator(9)
    weights = (torch.randn(x.shape, generator=random).to(x) for x in outputs)
    loss = sum((weight * x).sum() for weight, x in zip(weights, outputs, strict=True))
    # without steps, no output depends on the weights
    wanted = [getattr(given, name) for name in names]
    found = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return hidden, state, found


def wide(given):
    return Steps(*(x.double() if isinstance(x, torch.Tensor) and x.dtype != torch.bool else x for x in given))


def check(given, dtype=torch.float32):
    expected, found = outcome(wide(given), "torch"), outcome(given, "triton")
    for name, mine, right in zip(("hidden", "state", "gradients"), found, expected, strict=True):
        assert_agree(mine, right, name, dtype=dtype)


@on_either
@pytest.mark.parametrize("time", tiered([0, 4], [1], [9]))
@pytest.mark.parametrize("fresh", [True, False])
def test_lengths(time, fresh, size):
    check(draw(2, time, 2, size, fresh=fresh))


@thorough
@on_either
@pytest.mark.parametrize("held", [0, 2**17])
@pytest.mark.parametrize(("batch", "size"), tiered([(17, 3), (1, 70)], rare=[(3, 20), (1, 48), (2, 1)]))
def test_weights_that_are_held_and_that_each_step_loads(batch, size, held, monkeypatch):
    monkeypatch.setattr(triton, "HELD_BYTES", held)
    check(draw(batch, 3, 2, size))


@on_either
@pytest.mark.parametrize("fresh", [True, False])
def test_exponential_forget_gates(fresh, size):
    check(draw(2, 5, 2, size, sigmoid=False, fresh=fresh))


@on_either
@pytest.mark.parametrize("sigmoid", [True, False])
def test_gates_whose_exponential_overflows(sigmoid):
    given = draw(2, 5, 1, 4, sigmoid=sigmoid)
    given.Wx[:, :, :2] *= 200
    check(given)
    assert slstm_steps(*given[:2], given[2:6], sigmoid=sigmoid, backend="triton")[1][3].max() > 89


@on_either
def test_resets(size):
    reset = reset_mask(3, 6, rate=0.3, device=DEVICE)
    reset[0, 0] = reset[1, -1] = True
    given = draw(3, 6, 2, size, reset=reset)
    # m of the new sequence is low
    given.Wx[:, :, 0] -= 3
    check(given)


@on_either
def test_nothing_passes_a_reset(size):
    reset = torch.tensor([[False, False, True, False]], device=DEVICE)
    given = draw(1, 4, 1, size, reset=reset)
    expected = by_step(given)
    before, after = slice(0, 2), slice(2, None)
    spoilt = given.Wx.clone()
    spoilt[:, before] = torch.nan
    states = [torch.full_like(x, torch.nan) for x in given[2:6]]
    hidden, state = slstm_steps(spoilt, given.R, states, reset=reset, backend="triton")
    assert hidden[:, before].isnan().all()
    assert_agree((hidden[:, after], state), (expected[0][:, after], expected[1]))

    leaves = [x.clone().requires_grad_() for x in (given.Wx, *given[2:5])]
    hidden, _ = slstm_steps(leaves[0], given.R, (*leaves[1:], given.largest), reset=reset, backend="triton")
    cotangent = torch.ones_like(hidden)
    cotangent[:, after] = torch.nan
    dWx, *of_state = torch.autograd.grad(hidden, leaves, cotangent)
    assert dWx[:, after].isnan().any() and dWx[:, before].isfinite().all()
    assert all(x.isfinite().all() for x in of_state)


@thorough
@on_either
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, size):
    given = draw(2, 4, 2, size)
    check(given._replace(Wx=given.Wx.to(dtype)), dtype)
    # the interpreter multiplies the bits of bfloat16 numbers
    if dtype == torch.float16 or not INTERPRETED:
        check(draw(2, 4, 2, size, dtype=dtype), dtype)


@on_either
def test_layout_in_memory_does_not_matter():
    given = draw(2, 4, 2, 5)
    other = [x.mT.contiguous().mT for x in given[:6]]
    assert not other[0].is_contiguous()
    assert_agree(outcome(Steps(*other, None, True), "triton"), outcome(given, "triton"))


@on_either
def test_empty_batch():
    hidden, _, gradients = outcome(draw(0, 3, 2, 5), "triton")
    assert hidden.shape == (0, 3, 2, 5) and not gradients[1].any()


@thorough
@on_either
def test_custom_operators_keep_their_promises():
    for reset in (None, reset_mask(2, 3, device=DEVICE)):
        check_operators(triton.kernel, draw(2, 3, 2, 5, reset=reset))


@on_either
def test_frozen_weights_need_no_product():
    given = draw(2, 3, 1, 4)
    Wx = given.Wx.requires_grad_()
    hidden, _ = slstm_steps(Wx, given.R, given[2:6], backend="triton")
    right, _ = slstm_steps(Wx, given.R, given[2:6], backend="torch")
    assert_agree(torch.autograd.grad(hidden.sum(), Wx), torch.autograd.grad(right.sum(), Wx))


@on_either
def test_second_derivatives():
    def outcome(backend):
        given = draw(1, 3, 1, 3)
        Wx, R = given.Wx.requires_grad_(), given.R.requires_grad_()
        hidden, _ = slstm_steps(Wx, R, given[2:6], backend=backend)
        first = torch.autograd.grad(hidden.square().sum(), (Wx, R), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (Wx, R))

    assert_agree(outcome("triton"), outcome("torch"))


@thorough
@on_either
def test_maps_with_gradients():
    given = draw(2, 3, 1, 3)
    Wx = torch.stack([given.Wx, given.Wx.flip(1)]).requires_grad_()
    R = given.R.requires_grad_()

    def one(Wx):
        return slstm_steps(Wx, R, given[2:6], backend="triton")[0]

    apart, mapped = torch.stack([one(x) for x in Wx]), torch.func.vmap(one)(Wx)
    assert_agree(mapped, apart)
    found = (torch.autograd.grad(y.square().sum(), (Wx, R)) for y in (mapped, apart))
    assert_agree(*found)


@thorough
@on_either
def test_compiles_into_one_graph(size):
    given = draw(2, 3, 1, size)
    Wx, R = given.Wx.requires_grad_(), given.R.requires_grad_()

    def run(Wx, R):
        hidden, state = slstm_steps(Wx, R, given[2:6], backend="triton")
        return hidden, state

    def outcome(function):
        hidden, state = function(Wx, R)
        return hidden, state, torch.autograd.grad(hidden.square().sum() + state[1].sum(), (Wx, R))

    # inductor's own use of Triton does not go through the interpreter
    backend = "aot_eager" if INTERPRETED else "inductor"
    assert_agree(outcome(torch.compile(run, fullgraph=True, backend=backend)), outcome(run))


@on_either
def test_a_head_is_shared_by_more_programs_where_shared_memory_is_small(monkeypatch):
    from triton.runtime.errors import OutOfResources

    launches = []

    class Small:
        def __getitem__(self, grid):
            def run(*tensors, BLOCK, PARTS, ROWS, HELD, launch_cooperative_grid=False, **options):
                first = tensors[-1]
                launches.append((*grid, first, BLOCK, PARTS, ROWS, HELD, launch_cooperative_grid))
                if BLOCK > 16 or HELD or ROWS > 32:
                    raise OutOfResources(2, 1, "shared memory")

            return run

    monkeypatch.setattr(triton, "_multiprocessors", lambda device: 12)
    given = draw(70, 2, 2, 60)
    triton._launch(Small(), given)
    # of two heads and three blocks of 32 rows, three run at the same time
    assert launches == [
        (10, 0, 64, 1, 16, True, False),
        (12, 0, 32, 2, 32, True, True),
        (12, 0, 32, 2, 16, True, True),
        (12, 0, 16, 4, 32, True, True),
        (12, 0, 16, 4, 16, True, True),
        (12, 0, 16, 4, 64, False, True),
        (12, 0, 16, 4, 32, False, True),
        (12, 3, 16, 4, 32, False, True),
    ]

    class TooSmall:
        def __getitem__(self, grid):
            def run(*tensors, **options):
                raise OutOfResources(2, 1, "shared memory")

            return run

    with pytest.raises(OutOfResources):
        triton._launch(TooSmall(), given)


@on_either
@pytest.mark.parametrize("held", [0, 2**17])
def test_steps_of_a_head_that_programs_share(held, monkeypatch):
    """A step at a time and forward, because programs of the interpreter run one after another."""
    monkeypatch.setattr(triton, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton, "HELD_BYTES", held)
    monkeypatch.setattr(triton, "CHUNK_BYTES", 64)
    given = draw(18, 3, 2, 40, reset=reset_mask(18, 3, rate=0.3, device=DEVICE))
    expected, end, _ = by_step(wide(given))
    state, hidden = given[2:6], []
    for step in range(3):
        now = slice(step, step + 1)
        h, state = slstm_steps(given.Wx[:, now], given.R, state, reset=given.reset[:, now], backend="triton")
        hidden.append(h)
    assert_agree(torch.cat(hidden, 1), expected, dtype=torch.float32)
    assert_agree(state, end, dtype=torch.float32)


@pytest.mark.parametrize(
    ("batch", "width", "itemsize", "rows", "block"),
    [
        # all programs run at the same time, with few rows rather than few channels
        (16, 64, 2, 16, 16),
        (128, 64, 8, 16, 16),
        (128, 128, 2, 16, 32),
        (128, 256, 2, 16, 64),
        (33, 256, 8, 32, 16),
        # no more than 16 channels of float32 weights can be held
        (128, 256, 8, 64, 16),
        (128, 512, 2, 64, 32),
        (1000, 64, 2, 64, 32),
        # launches follow one another
        (1, 1024, 2, 16, 16),
        (512, 256, 2, 64, 32),
    ],
)
def test_the_best_plan_of_four_heads(batch, width, itemsize, rows, block):
    plans = triton._plans(batch, 4, width, itemsize, processors=132)
    assert plans[0] == (rows, block, 4 * width * block * itemsize)
    assert plans[-1].held == 0 and max(plan.held for plan in plans) <= triton.HELD_BYTES


def test_weights_that_cannot_be_held():
    expected = [triton.Plan(64, 16, 0), triton.Plan(32, 16, 0), triton.Plan(16, 16, 0)]
    assert triton._plans(40, 4, 1024, 8, processors=132) == expected


@on_either
@pytest.mark.parametrize(("processors", "block", "chunk"), [(1, 128, 128), (2, 128, 16), (4, 64, 64)])
def test_pieces_on_gpus_of_few_multiprocessors(processors, block, chunk, monkeypatch):
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, BLOCK, CHUNK, HELD, **options: launches.append((BLOCK, CHUNK, HELD))

    monkeypatch.setattr(triton, "_multiprocessors", lambda device: processors)
    width = 128 if processors == 1 else 256
    triton._launch(Kernel(), draw(1, 1, 1, width))
    assert launches[0] == (block, chunk, False)


@on_either
def test_double_precision_is_refused():
    given = wide(draw(1, 2, 1, 3))
    with pytest.raises(ValueError, match="`slstm_steps`"):
        slstm_steps(*given[:2], given[2:6], backend="triton")


@on_either
def test_heads_that_are_too_large_are_refused():
    given = draw(1, 1, 1, 1025)
    with pytest.raises(ValueError, match="1,024 channels"):
        slstm_steps(*given[:2], given[2:6], backend="triton")


@on_either
@pytest.mark.parametrize("arguments", [{"n_heads": 2}, {"n_heads": 1, "forget_gate": "exponential"}])
def test_a_mixer_by_either_backend(arguments, monkeypatch):
    launch, runs = triton._launch, []

    def recorded(run, *given, **options):
        runs.append(run)
        launch(run, *given, **options)

    monkeypatch.setattr(triton, "_launch", recorded)
    x = torch.randn(2, 4, 6, generator=generator(3)).to(DEVICE)

    def outcome(backend):
        torch.manual_seed(0)
        mixer = build("slstm", 6, recurrent_init="uniform", backend=backend, **arguments).to(DEVICE)
        y, state = mixer(x)
        return y, state, torch.autograd.grad(y.square().sum(), tuple(mixer.parameters()))

    found = outcome("triton")
    assert runs == [triton.KERNELS.slstm, triton.KERNELS.slstm_gradients]
    assert_agree(found, outcome("torch"))
    # the interpreter is slow, so "auto" takes the kernel on a GPU alone
    assert_agree(found, outcome("auto"))
    assert len(runs) == (2 if INTERPRETED else 4)


@thorough
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("name", ["slstm", "slstm_gradients"])
def test_kernels_compile_without_a_gpu(name, block):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = getattr(triton.KERNELS, name)
    constants = {
        "HEADS": 4,
        "SIZE": 60,
        "ROWS": 16,
        "WIDTH": 64,
        "CHUNK": 64,
        "BLOCK": block,
        "PARTS": 64 // block,
    }
    constants |= {"HELD": True, "HAS_RESET": True, "SIGMOID": True, "KEEP": True, "PRECISION": "tf32x3"}
    constants = {name: x for name, x in constants.items() if name in kernel.arg_names}
    scalars = dict.fromkeys(constants, "constexpr") | dict.fromkeys(("batch", "time", "first"), "i32")
    scalars |= {"reset": "*u8", "arrived": "*i32"}
    types = {name: scalars.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    options = {"num_warps": 8, "num_stages": 1}
    found = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    # weights of 4 gates are held, as two parts
    assert found.metadata.shared >= 2 * 4 * 4 * 64 * block
    # programs wait for each other only where they share a head
    assert ("acquire" in found.asm["ptx"]) == (block < 64)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 250, 500])
def test_a_long_sequence_on_a_gpu(size, dtype):
    reset = reset_mask(16, 300, rate=0.01, device=DEVICE)
    check(draw(16, 300, 4, size, reset=reset, dtype=dtype), dtype)


@on_a_gpu
@pytest.mark.parametrize("size", [5, 40])
def test_a_captured_graph(size):
    given = draw(4, 20, 2, size)

    def run():
        Wx, R = (x.detach().requires_grad_() for x in given[:2])
        hidden, state = slstm_steps(Wx, R, given[2:6], backend="triton")
        return hidden, state, torch.autograd.grad(hidden.square().sum(), (Wx, R))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    given.Wx.neg_()
    graph.replay()
    assert_agree(captured, run())


@on_a_gpu
@pytest.mark.parametrize("held", [0, 2**16])
def test_launches_one_after_another_on_a_gpu(held, monkeypatch):
    monkeypatch.setattr(triton, "HELD_BYTES", held)
    check(draw(600, 20, 4, 256, dtype=torch.bfloat16), torch.bfloat16)


@on_a_gpu
@pytest.mark.parametrize("size", [100, 256])
def test_runs_are_the_same_to_the_bit(size):
    given = draw(40, 300, 4, size)
    one, other = outcome(given, "triton"), outcome(given, "triton")
    for x, y in zip((one[0], *one[1], *one[2]), (other[0], *other[1], *other[2]), strict=True):
        assert torch.equal(x, y)
