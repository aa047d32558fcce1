"""The laws for a single function over time; each law raises AssertionError if it does not hold."""

import copy
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from linrec.nn.mixer import Mixer, State
from linrec.ops.core.isolation import documents
from linrec.testing.draws import generator, reset_mask
from linrec.testing.tolerances import assert_agree
from linrec.trees import Tree, differentiable, leaves, map_tree

__all__ = [
    "Function",
    "check_batch_independence",
    "check_causality",
    "check_compile",
    "check_empty",
    "check_gradients",
    "check_isolation",
    "check_layout",
    "check_reset",
    "check_split",
    "check_stability",
    "check_steps",
]

Function: TypeAlias = Callable[..., tuple[Tensor, State]]


def check_split(function: Function, x: Tree, at: Iterable[int] | None = None, state: State = None) -> None:
    """Law 2: two calls with a cached state equal a single call, in outputs, state and gradients.

    Gradients of `x` are compared, and of the parameters if `function` is a module. Gradients of the first
    segment also flow through the cached state.

    Args:
        function: the mixer or operator.
        x: inputs over time, at least two steps.
        at: steps at which to split; None splits after the first step, in the middle, and before the last.
        state: initial state of the first segment.
    """
    time = _time(x)
    x = differentiable(x)
    whole, last = function(x, state)
    gradients = _gradients(function, whole, x)
    for n in sorted({1, time // 2, time - 1}) if at is None else at:
        left, carried = function(_cut(x, 0, n), state)
        right, end = function(_cut(x, n, time), carried)
        pieces = torch.cat([left, right], 1)
        assert_agree(pieces, whole, f"two segments, split at {n}, against one pass")
        assert_agree(_gradients(function, pieces, x), gradients, f"gradients of two segments, split at {n}")
        _assert_same_future(function, x, end, last, f"state after two segments, split at {n}")


def check_steps(function: Function, x: Tree, state: State = None) -> None:
    """Law 2: one step at a time equals one pass, in outputs and state."""
    whole, last = function(x, state)
    outputs = []
    for n in range(_time(x)):
        y, state = function(_cut(x, n, n + 1), state)
        outputs.append(y)
    assert_agree(torch.cat(outputs, 1), whole, "one step at a time against one pass")
    _assert_same_future(function, x, state, last, "state after one step at a time")


def check_causality(function: Function, x: Tree) -> None:
    """Law 3: changing later inputs does not change earlier outputs, up to rounding."""
    time = _time(x)
    y, _ = function(x)
    for n in sorted({1, time // 2, time - 1}):
        later = torch.arange(time, device=y.device) >= n
        changed = map_tree(functools.partial(_changed_where, later), x)
        what = f"outputs before step {n}, after a change from there on"
        assert_agree(function(changed)[0][:, :n], y[:, :n], what)


def check_batch_independence(function: Function, x: Tree) -> None:
    """Law 4: a row's outputs and state do not depend on the other rows."""
    y, last = function(x)
    future, _ = function(x, last)
    for row in range(len(y)):
        alone, end = function(_row(x, row))
        assert_agree(alone, y[row : row + 1], f"batch row {row} alone against the whole batch")
        following, _ = function(_row(x, row), end)
        assert_agree(following, future[row : row + 1], f"state of batch row {row} alone")


def check_reset(function: Function, x: Tree, reset: Tensor | None = None) -> None:
    """Law 5: `reset` equals separate runs of the segments, and a reset at the first step discards the state.

    A mixer with segments (`Mixer.segment_length`) runs each piece from `init_state` at the piece's position.
    A mixer that sees later steps runs the piece before the first reset alone, too.

    Args:
        function: the mixer or operator.
        x: inputs over time; one extra run on them provides the initial state.
        reset: (b, t) bool; None draws a random mask, and also tries resets at both ends and at every step.
    """
    y, state = function(x)
    batch, time = y.shape[:2]
    if reset is None:
        ends = torch.zeros(batch, time, dtype=torch.bool)
        ends[0, 0] = ends[-1, -1] = True
        masks = [reset_mask(batch, time, rate=0.2), ends, torch.ones(batch, time, dtype=torch.bool)]
    else:
        masks = [reset]
    continued, _ = function(x, state)
    for mask in masks:
        whole, last = function(x, state, reset=mask.to(y.device))
        future, _ = function(x, last)
        for row in range(batch):
            cuts = [int(n) for n in mask[row].nonzero()]
            # before its first reset a row continues from the initial state, as without resets
            first = cuts[0] if cuts else time
            pieces = [continued[row : row + 1, :first]]
            if isinstance(function, Mixer) and not function.is_causal:
                pieces = [function(_cut(_row(x, row), 0, first))[0]]
            end = None
            for begin, stop in zip(cuts, [*cuts[1:], time], strict=False):
                piece, end = function(_cut(_row(x, row), begin, stop), _start(function, time + begin, 1))
                pieces.append(piece)
            what = f"batch row {row} with resets at {cuts}"
            assert_agree(whole[row : row + 1], torch.cat(pieces, 1), f"{what} against separate segments")
            if cuts:
                following, _ = function(_row(x, row), end)
                assert_agree(
                    future[row : row + 1], following, f"state of {what} against the state of its last segment"
                )


def check_isolation(function: Function, x: Tree) -> None:
    """Law 5: no NaN, infinity or overflow passes a reset, in outputs, states or gradients.

    Every row has three documents. Each document in turn gets non-finite numbers, or the largest finite
    number: in the inputs of its first and last step (in all tensors of `x`, then in one tensor), or in the
    gradients of the outputs of these steps. The state before the first document gets non-finite numbers too.
    The results of the other documents must not change, and outputs of a step with NaN inputs must not be
    finite. A state that is discarded by a reset at the first step must not change any result, including
    gradients of parameters.

    All these inputs are rows of one batch, so that the law is as quick as a few calls.

    Args:
        function: the mixer or operator.
        x: inputs over time, at least six steps; one extra run on them provides the initial state.
    """
    y, last = function(x)
    batch, time = y.shape[:2]
    reset = torch.zeros(batch, time, dtype=torch.bool, device=y.device)
    for row in range(batch):
        # the second document of every other row is a single step
        reset[row, [time // 2, time // 2 + 1 if row % 2 else time - 2]] = True
    document = documents(reset)
    ends = reset | reset.roll(-1, 1)
    ends[:, [0, -1]] = True
    cotangent = _cotangent(y)

    def outcomes(inputs: list[Tree], start: Tree, gradients: list[Tensor]) -> list[dict[str, Any]]:
        """Return the results for each of `inputs`, which are rows of a single batch."""
        given, begin = (differentiable(_rows_of_all(trees)) for trees in (inputs, [start] * len(inputs)))
        y, end = function(given, begin, reset=reset.repeat(len(inputs), 1))
        of_x, of_start = ([part for part in leaves(tree) if part.requires_grad] for tree in (given, begin))
        found = torch.autograd.grad(y, of_x + of_start, torch.cat(gradients), materialize_grads=True)
        # a state is compared by the outputs that follow from it
        future, _ = function(_rows_of_all([x] * len(inputs)), end)
        results = {"y": y, "x": found[: len(of_x)], "state": found[len(of_x) :], "future": future}
        rows = [slice(begin, begin + batch) for begin in range(0, len(y), batch)]
        return [map_tree(operator.itemgetter(of), results) for of in rows]

    def compare(found: dict[str, Any], number: int, what: str) -> None:
        others = document != number
        assert_agree(found["y"][others], expected["y"][others], f"outputs of other documents with {what}")
        for mine, other in zip(found["x"], expected["x"], strict=True):
            assert_agree(mine[others], other[others], f"gradients of other documents' inputs with {what}")
        if number != 0:
            assert_agree(found["state"], expected["state"], f"gradients of the first state with {what}")
        if number != 2:
            assert_agree(found["future"], expected["future"], f"state after the last step with {what}")

    # the document, its description, the inputs and the gradients of the outputs
    trials: list[tuple[int, str, Tree, Tensor]] = []
    for number in range(3):
        where = ends & (document == number)
        for bad in (math.nan, math.inf, -math.inf, sys.float_info.max):
            what = f"{bad} in the inputs of document {number}"
            trials.append((number, what, _spoilt(x, where, bad), cotangent))
        # a single tensor was spoilt above
        for place in range(len(leaves(x)) if len(leaves(x)) > 1 else 0):
            what = f"NaN in tensor {place} of the inputs of document {number}"
            trials.append((number, what, _spoilt(x, where, math.nan, place), cotangent))
        what = f"NaN in the gradients of document {number}"
        trials.append((number, what, x, _spoilt(cotangent, where, math.nan)))
    (expected,) = outcomes([x], last, [cotangent])
    _, _, inputs, gradients = map(list, zip(*trials, strict=True))
    for (number, what, *_), found in zip(trials, outcomes(inputs, last, gradients), strict=True):
        compare(found, number, what)
        where = ends & (document == number)
        if what.startswith("nan in the inputs") and found["y"][where].isfinite().flatten(1).all(1).any():
            raise AssertionError(f"outputs are finite with {what}")
    everywhere = torch.ones((), dtype=torch.bool, device=y.device)
    spoilt = _spoilt(last, everywhere, math.nan)
    (found,) = outcomes([x], spoilt, [cotangent])
    compare(found, 0, "NaN in the first state")

    reset[:, 0] = True
    given = differentiable(x)
    dropped, _ = function(given, differentiable(spoilt), reset=reset)
    alone, _ = function(given, _start(function, time, batch), reset=reset)
    assert_agree(dropped, alone, "outputs with NaN in a state that is discarded")
    what = "gradients with NaN in a state that is discarded"
    assert_agree(_gradients(function, dropped, given), _gradients(function, alone, given), what)


def check_compile(
    function: Function, x: Tree, *, compiler: str = "inductor", dynamic: bool | None = False
) -> None:
    """Law 6: `torch.compile(fullgraph=True)` agrees with eager, in outputs, state and gradients.

    The first comparison starts from a state and includes its gradient. The second runs without gradients,
    from the start, at half the length. Errors of the compiler, such as graph breaks, propagate.

    Args:
        function: the mixer or operator.
        x: inputs over time, at least two steps.
        compiler: the backend of `torch.compile`; "aot_eager" traces forward and backward without code.
        dynamic: argument of `torch.compile`: False compiles each length anew; None makes the length dynamic
            at the second compilation.
    """
    # the recompilation limit also counts compiled versions of other functions
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    # a detached state: inputs of a graph are leaves
    given = differentiable((x, function(x)[1]))
    y, last = function(*given)
    z, end = compiled(*given)
    assert_agree(z, y, "compiled outputs")
    assert_agree(end, last, "compiled state")
    assert_agree(_gradients(function, z, given), _gradients(function, y, given), "compiled gradients")
    some = _cut(x, 0, _time(x) // 2)
    with torch.no_grad():
        y, last = function(some)
        z, end = compiled(some)
    assert_agree(z, y, "compiled outputs without gradients, of another length")
    assert_agree(end, last, "compiled state without gradients, of another length")


def check_stability(function: Function, x: Tree) -> None:
    """Law 8: outputs, state and gradients are finite. Choose `x` long, with decays near 0 and near 1."""
    x = differentiable(x)
    y, state = function(x)
    gradients = _gradients(function, y, x)
    for what, tree in (("outputs", y), ("state", state), ("gradients", gradients)):
        for tensor in leaves(tree):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise AssertionError(f"{bad} of {tensor.numel()} elements of the {what} are not finite")


def check_empty(function: Function, x: Tree) -> None:
    """Zero steps give empty outputs and leave the state unchanged; batch size 0 gives empty outputs."""
    y, last = function(x)
    none, state = function(_cut(x, 0, 0), last)
    assert_agree(none, y[:, :0], "outputs of zero steps")
    _assert_same_future(function, x, state, last, "state after zero steps")
    _, first = function(_cut(x, 0, 0))
    _assert_same_future(function, x, first, None, "state after zero steps from the start")
    assert_agree(function(map_tree(lambda tensor: tensor[:0], x))[0], y[:0], "outputs of zero rows")


def check_gradients(function: Function, x: Tensor) -> None:
    """Law 1: a backward pass with `create_graph`, `torch.func.grad` and per-row gradients by vmap agree.

    Args:
        function: the mixer or operator.
        x: inputs over time, in float64.
    """
    x = differentiable(x)
    y, _ = function(x)
    expected = _gradients(function, y, x)
    cotangent = _cotangent(y)
    kept = _gradients(function, function(x)[0], x, cotangent, create_graph=True)
    assert_agree(kept, expected, "gradients with `create_graph`")
    named = function.named_parameters() if isinstance(function, nn.Module) else ()
    weights = {name: weight.detach() for name, weight in named if weight.requires_grad}

    # torch 2.13 leaves a module that stands in two places with the weights of `functional_call`
    twin = copy.deepcopy(function)

    def loss(weights: dict[str, Tensor], x: Tensor, cotangent: Tensor) -> Tensor:
        if isinstance(twin, nn.Module):
            return (torch.func.functional_call(twin, weights, (x,))[0] * cotangent).sum()
        return (function(x)[0] * cotangent).sum()

    gradient = torch.func.grad(loss, (0, 1))
    of_weights, of_x = gradient(weights, x.detach(), cotangent)
    assert_agree([of_x, *of_weights.values()], expected, "gradients by torch.func.grad")
    rows = x.detach()[:, None], cotangent[:, None]
    of_weights, of_x = torch.func.vmap(gradient, (None, 0, 0))(weights, *rows)
    for i, (row, of_y) in enumerate(zip(*rows, strict=True)):
        row = differentiable(row)
        expected = _gradients(function, function(row)[0], row, of_y)
        found = [of_x[i], *(each[i] for each in of_weights.values())]
        assert_agree(found, expected, f"gradients of batch row {i} by torch.func.vmap")


def check_layout(function: Function, x: Tree) -> None:
    """Non-contiguous inputs give the same outputs as contiguous inputs."""
    strided = map_tree(lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2], x)
    transposed = map_tree(lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1), x)
    y, _ = function(x)
    assert_agree(function(strided)[0], y, "strided inputs")
    assert_agree(function(transposed)[0], y, "inputs with time in front in memory")


def _start(function: Function, position: int, batch: int) -> State:
    """Return the state of rows that start at a step of a stream; None unless the position matters."""
    if not isinstance(function, Mixer) or function.segment_length is None:
        return None
    start: Callable[..., State] = function.init_state
    return start(batch, position=position)


def _changed_where(mask: Tensor, tensor: Tensor) -> Tensor:
    mask = mask.reshape(1, -1, *[1] * (tensor.dim() - 2))
    # values in [0, 1] stay in [0, 1]
    return torch.where(mask, 1 - tensor, tensor)


def _spoilt(x: Tree, mask: Tensor, value: float, place: int | None = None) -> Tree:
    """Set floating tensors, or only tensor `place`, to `value` where `mask` (b, t) is true, or everywhere."""
    places = iter(range(len(leaves(x))))

    def spoil(tensor: Tensor) -> Tensor:
        if place not in (None, next(places)) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        shaped = mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
        number = min(value, torch.finfo(tensor.dtype).max) if math.isfinite(value) else value
        return tensor.detach().masked_fill(shaped, number).requires_grad_(tensor.requires_grad)

    return map_tree(spoil, x)


def _time(x: Tree) -> int:
    return leaves(x)[0].shape[1]


def _cut(x: Tree, begin: int, end: int) -> Tree:
    return map_tree(lambda tensor: tensor[:, begin:end], x)


def _row(x: Tree, row: int) -> Tree:
    return map_tree(lambda tensor: tensor[row : row + 1], x)


def _rows_of_all(trees: list[Tree]) -> Tree:
    """Return a tree with the rows of all trees, which have equal structures and shapes."""
    parts = zip(*map(leaves, trees), strict=True)
    return map_tree(lambda _: torch.cat(next(parts)), trees[0])


def _assert_same_future(function: Function, x: Tree, state: State, other: State, what: str) -> None:
    assert_agree(function(x, state)[0], function(x, other)[0], f"{what}: outputs that follow from it")


def _gradients(
    function: Function, y: Tensor, x: Tree, cotangent: Tensor | None = None, *, create_graph: bool = False
) -> list[Tensor]:
    """Return gradients of a linear functional of y, for the leaves of x and a module's parameters."""
    wanted = [tensor for tensor in leaves(x) if tensor.requires_grad]
    if isinstance(function, nn.Module):
        wanted += [parameter for parameter in function.parameters() if parameter.requires_grad]
    options = {"retain_graph": True, "materialize_grads": True, "create_graph": create_graph}
    cotangent = _cotangent(y) if cotangent is None else cotangent
    return list(torch.autograd.grad(y, wanted, cotangent, **options))


def _cotangent(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=generator(1), dtype=torch.float64).to(y)
