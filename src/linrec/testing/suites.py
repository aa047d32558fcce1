"""All laws for a mixer, and the agreement of an operator with its float64 reference."""

import copy
import inspect
import io
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from linrec.nn.mixer import Mixer, State, checked_output, fits, is_state
from linrec.testing import laws
from linrec.testing.draws import generator
from linrec.testing.fakes import CheckFakeKernels
from linrec.testing.laws import Function
from linrec.testing.tolerances import assert_agree
from linrec.trees import Tree, differentiable, double, leaves, map_tree

__all__ = [
    "check_autocast",
    "check_derivatives",
    "check_init_state",
    "check_mixer",
    "check_operator",
    "check_outputs",
    "check_promises",
    "check_state_dict",
    "check_times",
]


def check_mixer(
    mixer: Mixer,
    *,
    batch: int = 3,
    time: int = 65,
    long: int = 16_384,
    compiler: str | None = "inductor",
    seed: int = 0,
) -> None:
    """Check every law for a mixer on random inputs.

    Mixers that say that they see later steps (`Mixer.is_causal`) skip causality, splits and steps.

    Args:
        mixer: the mixer, in float32 or float64, on any device, deterministic (as after `.eval()`).
        batch: batch size of the inputs.
        time: number of steps of the inputs.
        long: length at which outputs and gradients must be finite in float32 and bfloat16. Inputs are then
            scaled by 30 so that gates saturate in both directions.
        compiler: the backend of `torch.compile`; None skips law 6.
        seed: random seed of the inputs.

    Raises:
        AssertionError: a law does not hold; the message contains the numbers.

    Example:
        >>> from linrec import mixers
        >>> check_mixer(mixers.build("gate_loop", 4), time=9, long=64, compiler=None)
    """
    parameter = next(mixer.parameters(), torch.empty(0))
    shape = (batch, time, mixer.d_model)
    x = torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(parameter)
    check_outputs(mixer, x)
    if mixer.is_causal:
        # first, because splits fail too where steps see later steps
        laws.check_causality(mixer, x)
    check_init_state(mixer, x)
    if mixer.is_causal:
        laws.check_split(mixer, x)
        laws.check_steps(mixer, x)
    laws.check_batch_independence(mixer, x)
    laws.check_reset(mixer, x)
    laws.check_isolation(mixer, x)
    laws.check_empty(mixer, x)
    laws.check_layout(mixer, x)
    laws.check_gradients(copy.deepcopy(mixer).double(), x.double())
    if mixer.takes_dt:
        check_times(mixer, x)
    if compiler is not None:
        laws.check_compile(mixer, x, compiler=compiler)
    check_state_dict(mixer, x)
    check_autocast(mixer, x)
    x = 30 * torch.randn(1, long, mixer.d_model, generator=generator(seed)).to(parameter.device)
    laws.check_stability(copy.deepcopy(mixer).float(), x)
    laws.check_stability(copy.deepcopy(mixer).bfloat16(), x.bfloat16())


def check_promises(mixer: Mixer, *, batch: int = 2, time: int = 9, seed: int = 0) -> None:
    """Check the laws that training relies on, in well under a second: outputs, causality, rows and splits.

    `linrec train` and `linrec bench` check mixers from outside of linrec with it. Causality is checked in
    training mode too, with equal random numbers. Mixers that say that they see later steps
    (`Mixer.is_causal`) skip causality and splits.

    Args:
        mixer: the mixer, in full precision, on any device.
        batch: batch size of the inputs.
        time: number of steps of the inputs.
        seed: random seed of the inputs, and of dropout.

    Raises:
        AssertionError: a law does not hold; the message begins with the law's name.

    Example:
        >>> from linrec import mixers
        >>> check_promises(mixers.build("gate_loop", 4))
    """
    parameter = next(mixer.parameters(), torch.empty(0))
    x = torch.randn(batch, time, mixer.d_model, generator=generator(seed), dtype=torch.float64).to(parameter)
    devices = [parameter.device] if parameter.is_cuda else []

    def drawn(x: Tensor, state: State = None, **arguments: Any) -> tuple[Tensor, State]:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            return mixer(x, state, **arguments)

    checks: list[tuple[str, Any, bool]] = [("outputs", lambda _, x: check_outputs(mixer, x), False)]
    if mixer.is_causal:
        checks.append(("causality", laws.check_causality, False))
        checks.append(("causality in training", laws.check_causality, True))
    checks.append(("independent batch rows", laws.check_batch_independence, False))
    if mixer.is_causal:
        checks.append(("splits", laws.check_split, False))
    for law, check, training in checks:
        mixer.train(training)
        try:
            # nothing agrees with NaN; whether training diverges is for training to tell
            if law == "outputs" or drawn(x)[0].isfinite().all():
                check(drawn, x)
        except AssertionError as error:
            raise AssertionError(f"{law}: {error}") from error


def check_outputs(mixer: Mixer, x: Tensor) -> None:
    """Check that a mixer returns (y, state), y like `x` and the state like `init_state`, and keeps neither.

    A call must not change the results of an earlier call, nor depend on it.

    Args:
        mixer: the mixer.
        x: inputs (b, t, d_model), at least two steps.
    """
    name = type(mixer).__name__
    try:
        inspect.signature(mixer.forward).bind(x, None, reset=None)
        inspect.signature(mixer.mix).bind(x, None, None)
    except TypeError as error:
        raise AssertionError(
            f"{name} must define `mix(x, state, reset)` or `forward(x, state=None, *, reset=None)`; {error}"
        ) from error
    try:
        y, state = checked_output(mixer, mixer(x), x)
    except (TypeError, ValueError) as error:
        raise AssertionError(str(error)) from error
    if y.dtype != x.dtype:
        raise AssertionError(f"y of {name} must have the dtype of `x`, {x.dtype}; got {y.dtype}")
    try:
        start = mixer.init_state(len(x))
    except NotImplementedError:
        start = state
    for what, tree in (("the state", state), ("`init_state`", start)):
        if not is_state(tree):
            got = " ".join(repr(tree).split())
            raise AssertionError(
                f"{what} of {name} must be a tensor, None, or a tuple of such; got {got:.80}"
            )
    if not fits(state, start):
        shapes = (map_tree(lambda part: tuple(part.shape), tree) for tree in (start, state))
        raise AssertionError(
            "the state of {} must have the shapes of `init_state`, {}; got {}".format(name, *shapes)
        )
    kept = map_tree(Tensor.clone, (y, state))
    mixer(1 - x, state)
    if not y.isfinite().all():
        return
    assert_agree((y, state), kept, f"results of {name} after a later call, which must not change them")
    assert_agree(mixer(x), kept, f"results of {name} after a call with other inputs, against those before it")


def check_times(mixer: Mixer, x: Tensor, *, seed: int = 1) -> None:
    """Check the laws of splits, steps, batch rows and resets with irregular steps, and that 1 is no `dt`.

    Args:
        mixer: a mixer with `takes_dt`.
        x: inputs (b, t, d_model), at least six steps.
        seed: random seed of the times.
    """
    # between 1/8 and 8
    times = 8 ** (2 * torch.rand(x.shape[:2], generator=generator(seed), dtype=torch.float64) - 1)

    def timed(given: tuple[Tensor, Tensor], state: State = None, **arguments: Any) -> tuple[Tensor, State]:
        return mixer(given[0], state, dt=given[1].to(given[0]), **arguments)

    given = x, times.to(x)
    laws.check_split(timed, given)
    laws.check_steps(timed, given)
    # the law changes numbers to 1 - number
    laws.check_causality(timed, (x, given[1] / 8))
    laws.check_batch_independence(timed, given)
    laws.check_reset(timed, given)
    # the law spoils all numbers but integers, and times must be positive
    laws.check_isolation(timed, (x, given[1].ceil().long()))
    laws.check_empty(timed, given)
    assert_agree(mixer(x, dt=torch.ones_like(given[1]))[0], mixer(x)[0], "outputs with `dt` of 1 everywhere")


def check_init_state(mixer: Mixer, x: Tensor) -> None:
    """Check `init_state` against None and the state after zero steps, and `state_size` against its elements.

    The state after zero steps is also compared in bfloat16, under autocast and on the device "meta".

    Args:
        mixer: the mixer.
        x: inputs (b, t, d_model), at least two steps.
    """
    batch = len(x)
    assert_agree(mixer(x, mixer.init_state(batch))[0], mixer(x)[0], "outputs from `init_state`")
    _check_start(mixer, x, "of the mixer")
    # integer tokens keep their dtype
    narrow, wide = (x.bfloat16(), x.float()) if x.is_floating_point() else (x, x)
    _check_start(copy.deepcopy(mixer).bfloat16(), narrow, "in bfloat16")
    _check_start(copy.deepcopy(mixer).to("meta"), x.to("meta"), "on meta")
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        _check_start(copy.deepcopy(mixer).float(), wide, "under autocast")
    # language models too are checked
    if isinstance(mixer, Mixer) and mixer.segment_length is not None:
        _check_largest_state(mixer, x, mixer.segment_length)
        return
    sizes = [_size(mixer(x[:, :steps])[1]) for steps in (1, 2)]
    # `state_size` of a growing state is its size per step
    size = sizes[0] if sizes[0] == sizes[1] else sizes[1] - sizes[0]
    if size != batch * mixer.state_size:
        raise AssertionError(
            f"the state holds {size / batch} elements per sequence; `state_size` is {mixer.state_size}"
        )
    if sizes[0] == sizes[1] and _size(mixer.init_state(batch)) != size:
        raise AssertionError(f"`init_state` holds {_size(mixer.init_state(batch))} elements, a state {size}")


def _check_largest_state(mixer: Mixer, x: Tensor, length: int) -> None:
    """Raise unless `state_size` counts the state before a boundary, where it is largest."""
    steps = x[:, :1].expand(-1, 2 * length, -1)
    full, empty, start = (_size(mixer(steps[:, :n])[1]) for n in (2 * length - 1, 2 * length, 0))
    if full != len(x) * mixer.state_size:
        raise AssertionError(
            f"before a boundary the state holds {full / len(x)} elements per sequence; `state_size` is "
            f"{mixer.state_size}"
        )
    if empty != start:
        raise AssertionError(f"after a boundary the state holds {empty} elements, `init_state` {start}")


def _check_start(mixer: Mixer, x: Tensor, where: str) -> None:
    """Raise unless `init_state` equals the state after zero steps in structure, shapes, dtypes and values."""
    start, (_, state) = mixer.init_state(len(x)), mixer(x[:, :0])
    expected, found = [
        map_tree(lambda x: (tuple(x.shape), x.dtype, x.device), tree) for tree in (start, state)
    ]
    if expected != found:
        raise AssertionError(f"`init_state` {where} is {expected}; the state after zero steps is {found}")
    if x.device.type != "meta":
        assert_agree(state, start, f"the state {where} after zero steps against `init_state`")


def check_state_dict(mixer: Mixer, x: Tensor) -> None:
    """Law 7: a second instance that loads the `state_dict` gives the same outputs, bit for bit.

    Before loading, all tensors of the second instance are zero, including plain attributes that `state_dict`
    does not contain. Instances on "meta" load the same: with `assign`, and after `to_empty` and with ones in
    all tensors, since an empty tensor has whatever is in memory.
    """
    y, _ = mixer(x)
    file = io.BytesIO()
    torch.save(mixer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    twin, assigned, emptied = (copy.deepcopy(mixer) for _ in range(3))
    plain = [
        value for module in twin.modules() for value in vars(module).values() if isinstance(value, Tensor)
    ]
    assigned.to("meta")
    emptied.to("meta").to_empty(device=x.device)
    with torch.no_grad():
        for tensor in (*twin.state_dict().values(), *plain):
            tensor.zero_()
        for tensor in (*emptied.parameters(), *emptied.buffers()):
            tensor.fill_(1)
    # a mixer may have no weights
    if twin.state_dict() and torch.equal(twin(x)[0], y):
        raise AssertionError("the outputs do not depend on the weights in the `state_dict`")
    for loaded, how in ((twin, "after loading"), (assigned, "assigned to meta"), (emptied, "after to_empty")):
        loaded.load_state_dict(state, assign=loaded is assigned)
        torch.testing.assert_close(loaded(x)[0], y, rtol=0, atol=0, msg=(how + ": {}").format)


def check_autocast(mixer: Mixer, x: Tensor) -> None:
    """Check that outputs under bfloat16 autocast agree with full precision, within bfloat16's tolerance."""
    mixer, x = copy.deepcopy(mixer).float(), x.float()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y, _ = mixer(x)
    assert_agree(y, mixer(x)[0], "outputs under autocast", dtype=torch.bfloat16)


def check_operator(
    operator: Function,
    inputs: Mapping[str, Tree],
    *,
    mode: str,
    backend: str,
    dtype: torch.dtype,
    options: Mapping[str, Any] | None = None,
    gradients: bool = True,
) -> None:
    """Law 1: a (mode, backend) agrees with the float64 reference in output, final state and every gradient.

    Outputs of kernels must also have the shapes, dtypes and strides that the fake kernels declare.

    Args:
        operator: takes `inputs` and `options` as keyword arguments and returns (y, state).
        inputs: tensors, trees of tensors, and None; the gradient of every floating tensor is compared.
        mode: the mode to check.
        backend: the backend to check.
        dtype: selects the tolerance: the lowest precision among the inputs.
        options: further keyword arguments, such as `reset`.
        gradients: whether to compare gradients; some backends do not support them.

    Raises:
        AssertionError: the results differ.

    Example:
        >>> import torch
        >>> from linrec.ops import scan
        >>> from linrec.testing import scan_inputs
        >>> check_operator(scan, scan_inputs(2, 65, 3), mode="scan", backend="torch", dtype=torch.float32)
    """
    options = dict(options or {})
    given = dict(inputs)
    # the dispatch mode is slow, and torch operations keep to their fake kernels
    with nullcontext() if backend in ("torch", "reference") else CheckFakeKernels():
        actual = _outcome(operator, given, dtype, gradients, **options, mode=mode, backend=backend)
    options |= {"mode": "recurrent", "backend": "reference"}
    expected = _outcome(operator, double(given), dtype, gradients, **options)
    for name, value in actual.items():
        assert_agree(value, expected[name], f"({mode!r}, {backend!r}): {name}", dtype=dtype)


def check_derivatives(
    operator: Function,
    inputs: Mapping[str, Tree],
    *,
    mode: str,
    backend: str,
    options: Mapping[str, Any] | None = None,
    forward_mode: bool = False,
) -> None:
    """Law 1: first and second derivatives agree with the reference if inputs are computed from each other.

    In float64, gradients come from an ordinary backward pass, from one with `create_graph`, and from
    `torch.func.grad`, also under `torch.func.vmap`. Second derivatives are compared for all inputs, and for
    each input alone, where no other input requires a gradient.

    Args:
        operator: takes `inputs` and `options` as keyword arguments and returns (y, state).
        inputs: tensors, trees of tensors, and None.
        mode: the mode to check.
        backend: the backend to check.
        options: further keyword arguments, such as `reset`.
        forward_mode: whether to compare `torch.func.jvp` too, of the operator and of its gradient, and the
            gradient of the former.

    Raises:
        AssertionError: the results differ.

    Example:
        >>> from linrec.ops import scan
        >>> from linrec.testing import scan_inputs
        >>> inputs = scan_inputs(2, 9, 3)
        >>> check_derivatives(scan, inputs, mode="scan", backend="torch", forward_mode=True)
    """
    given = differentiable(double(dict(inputs)))
    places = [i for i, tensor in enumerate(leaves(given)) if tensor.requires_grad]

    def loss(tree: Tree, pair: tuple[str, str]) -> Tensor:
        results = operator(**_coupled(tree), **(options or {}), mode=pair[0], backend=pair[1])
        # quadratic, so that the cotangents have derivatives too
        return sum(
            ((x * _wave(x)).real + (x * x.conj()).real / 8).sum() for x in leaves(results) if _varies(x)
        )  # type: ignore[return-value]

    def derivatives(pair: tuple[str, str], alone: int | None = None) -> dict[str, Any]:
        tensors = leaves(differentiable(given))
        for i in places:
            tensors[i].requires_grad_(alone in (None, i))
        wanted = [x for x in tensors if x.requires_grad]
        tree = _filled(given, tensors)
        plain = torch.autograd.grad(loss(tree, pair), wanted, materialize_grads=True)
        kept = torch.autograd.grad(loss(tree, pair), wanted, create_graph=True, materialize_grads=True)
        product = torch.stack([(g * _wave(g)).real.sum() for g in kept]).sum()
        second = torch.autograd.grad(product, wanted, materialize_grads=True)
        return {"gradients": plain, "gradients with a graph": kept, "second derivatives": second}

    pair, oracle = (mode, backend), ("recurrent", "reference")
    expected = derivatives(oracle)
    found = derivatives(pair)
    some = [leaves(given)[i].detach() for i in places]

    def functional(*some: Tensor) -> Tensor:
        tensors = leaves(given)
        for i, x in zip(places, some, strict=True):
            tensors[i] = x
        return loss(_filled(given, tensors), pair)

    gradient = torch.func.grad(functional, tuple(range(len(some))))
    found["torch.func.grad"] = gradient(*some)
    rows = torch.func.vmap(gradient)(*(torch.stack([x, x / 2]) for x in some))
    found["torch.func.grad under vmap"] = [x[0] for x in rows]
    if forward_mode:
        # the direction in which `derivatives` differentiates its gradients
        along = tuple(map(_wave, some))
        expected["torch.func.jvp"] = sum(
            (g.conj() * d).real.sum() for g, d in zip(expected["gradients"], along, strict=True)
        )

        def slope(*some: Tensor) -> Tensor:
            return torch.func.jvp(functional, some, along)[1]

        found["torch.func.jvp"] = slope(*some)
        of_gradient = torch.func.jvp(gradient, tuple(some), along)[1]
        of_slope = torch.func.grad(slope, tuple(range(len(some))))(*some)
        for what, value in (("torch.func.jvp of gradients", of_gradient), ("gradients of jvp", of_slope)):
            expected[what], found[what] = expected["second derivatives"], value
    for what, value in found.items():
        assert_agree(value, expected.get(what, expected["gradients"]), f"({mode!r}, {backend!r}): {what}")
    for i in places:
        what = f"({mode!r}, {backend!r}): derivatives of tensor {i} of the inputs alone"
        assert_agree(derivatives(pair, i), derivatives(oracle, i), what)


def _coupled(tree: Tree) -> Tree:
    """Return the tree with every tensor scaled by a number in (1/2, 1] that depends on the tensors before."""
    means: list[Tensor] = []

    def couple(x: Tensor) -> Tensor:
        if not _varies(x):
            return x
        if means:
            x = x * (1 - torch.stack(means).sum().tanh().square() / 2)
        means.append(x.real.mean())
        return x

    return map_tree(couple, tree)


def _filled(tree: Tree, tensors: list[Tensor]) -> Tree:
    following = iter(tensors)
    return map_tree(lambda x: next(following), tree)


def _varies(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _wave(x: Tensor) -> Tensor:
    """Return fixed numbers like x; a generator draws none under vmap."""
    numbers = torch.arange(x.numel(), dtype=torch.float64, device=x.device).reshape(x.shape)
    return torch.cos(numbers**1.1).to(x.dtype)


def _outcome(
    operator: Function, inputs: dict[str, Tree], dtype: torch.dtype, gradients: bool, **options: Any
) -> dict[str, Tree]:
    if not gradients:
        with torch.no_grad():
            y, state = operator(**inputs, **options)
        return {"y": y, "state": state}
    inputs = {name: differentiable(tree) for name, tree in inputs.items()}
    y, state = operator(**inputs, **options)
    results = [tensor for tensor in leaves((y, state)) if tensor.requires_grad]
    cotangents = [_cotangent(tensor, dtype) for tensor in results]
    outcome = {"y": y, "state": state}
    wanted = [tensor for tensor in leaves(inputs) if tensor.requires_grad]
    # all gradients in a single backward pass, as in training
    found = iter(torch.autograd.grad(results, wanted, cotangents, materialize_grads=True))
    for name, tree in inputs.items():
        mine = [next(found) for tensor in leaves(tree) if tensor.requires_grad]
        if mine:
            outcome[f"gradient of {name}"] = mine
    return outcome


def _cotangent(result: Tensor, dtype: torch.dtype) -> Tensor:
    # rounded to the tested dtype, so that the reference gets equal numbers
    parts = torch.randn(*result.shape, 2, generator=generator(2)).to(dtype.to_real()).to(torch.float64)
    cotangent = torch.view_as_complex(parts) if result.is_complex() else parts[..., 0]
    return cotangent.to(result)


def _size(state: Tree) -> int:
    return sum(tensor.numel() for tensor in leaves(state))
