"""The laws of one function over time, as functions that raise AssertionError."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from linrec.nn.mixer import State
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
    "check_isolation",
    "check_layout",
    "check_reset",
    "check_split",
    "check_stability",
    "check_steps",
]

Function: TypeAlias = Callable[..., tuple[Tensor, State]]


def check_split(function: Function, x: Tree, at: Iterable[int] | None = None, state: State = None) -> None:
    """Law 2: splitting anywhere and carrying the state equals one pass, in outputs, state and gradients.

    Gradients are those of `x`, and of the parameters where `function` is a module; those of the first piece
    pass through the carried state.

    Args:
        function: the mixer or operator.
        x: inputs over time, at least two steps.
        at: where to split; None is after the first step, in the middle, and before the last.
        state: where the first piece starts.
    """
    time = _time(x)
    x = differentiable(x)
    whole, last = function(x, state)
    gradients = _gradients(function, whole, x)
    for n in sorted({1, time // 2, time - 1}) if at is None else at:
        left, carried = function(_cut(x, 0, n), state)
        right, end = function(_cut(x, n, time), carried)
        pieces = torch.cat([left, right], 1)
        assert_agree(pieces, whole, f"two pieces, split at {n}, against one pass")
        assert_agree(_gradients(function, pieces, x), gradients, f"gradients of two pieces, split at {n}")
        _assert_same_future(function, x, end, last, f"state after two pieces, split at {n}")


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
    """Law 3: changing the future leaves the past the same, to rounding."""
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
    """Law 5: `reset` equals running the pieces apart, and drops a given state where it is at the first step.

    Args:
        function: the mixer or operator.
        x: inputs over time; run once for the state that the sequences start from.
        reset: (b, t) bool; None draws one, and tries resets at the ends and at every step.
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
            # before its first reset a row goes on from the given state, as it does without resets
            pieces = [continued[row : row + 1, : cuts[0] if cuts else time]]
            end = None
            for begin, stop in zip(cuts, [*cuts[1:], time], strict=False):
                piece, end = function(_cut(_row(x, row), begin, stop))
                pieces.append(piece)
            what = f"batch row {row} with resets at {cuts}"
            assert_agree(whole[row : row + 1], torch.cat(pieces, 1), f"{what} against its pieces apart")
            if cuts:
                following, _ = function(_row(x, row), end)
                assert_agree(
                    future[row : row + 1], following, f"state of {what} against that of its last piece"
                )


def check_isolation(function: Function, x: Tree) -> None:
    """Law 5: no NaN or infinity passes a reset, forward or backward in time, in outputs, states or gradients.

    Every row has three documents. Each document in turn gets numbers that are not finite: in the inputs of
    its first and last step (in all tensors of `x`, then in one tensor), or in the gradients of these steps'
    outputs. The state before the first document gets such numbers too. The results of the other documents
    must not change, and the outputs of a step with NaN must not become finite. A state that a reset at the
    first step drops must not change any result, gradients of parameters included.

    Args:
        function: the mixer or operator.
        x: inputs over time, at least six steps; run once for the state that the sequences start from.
    """
    y, last = function(x)
    given, state = differentiable(x), differentiable(last)
    batch, time = y.shape[:2]
    reset = torch.zeros(batch, time, dtype=torch.bool, device=y.device)
    for row in range(batch):
        # the second document of every other row is a single step
        reset[row, [time // 2, time // 2 + 1 if row % 2 else time - 2]] = True
    document = documents(reset)
    ends = reset | reset.roll(-1, 1)
    ends[:, [0, -1]] = True
    cotangent = torch.randn(y.shape, generator=generator(1), dtype=torch.float64).to(y)

    def outcome(inputs: Tree, start: State, gradient: Tensor = cotangent) -> dict[str, Any]:
        y, last = function(inputs, start, reset=reset)
        wanted = [tensor for tensor in leaves((inputs, start)) if tensor.requires_grad]
        found = torch.autograd.grad(y, wanted, gradient, materialize_grads=True)
        count = sum(tensor.requires_grad for tensor in leaves(inputs))
        # a state is compared by the outputs that follow from it
        return {"y": y, "x": found[:count], "state": found[count:], "future": function(x, last)[0]}

    def compare(found: dict[str, Any], number: int, what: str) -> None:
        others = document != number
        assert_agree(found["y"][others], expected["y"][others], f"outputs of other documents with {what}")
        for mine, other in zip(found["x"], expected["x"], strict=True):
            assert_agree(mine[others], other[others], f"gradients of other documents' inputs with {what}")
        if number != 0:
            assert_agree(found["state"], expected["state"], f"gradients of the first state with {what}")
        if number != 2:
            assert_agree(found["future"], expected["future"], f"state after the last step with {what}")

    expected = outcome(given, state)
    for number in range(3):
        where = ends & (document == number)
        for bad in (math.nan, math.inf, -math.inf):
            what = f"{bad} in the inputs of document {number}"
            found = outcome(_spoilt(given, where, bad), state)
            compare(found, number, what)
            if math.isnan(bad) and found["y"][where].isfinite().flatten(1).all(1).any():
                raise AssertionError(f"outputs are finite with {what}")
        for place in range(len(leaves(x))):
            what = f"NaN in tensor {place} of the inputs of document {number}"
            compare(outcome(_spoilt(given, where, math.nan, place), state), number, what)
        what = f"NaN in the gradients of document {number}"
        compare(outcome(given, state, _spoilt(cotangent, where, math.nan)), number, what)
    everywhere = torch.ones((), dtype=torch.bool, device=y.device)
    spoilt = _spoilt(state, everywhere, math.nan)
    compare(outcome(given, spoilt), 0, "NaN in the first state")

    reset[:, 0] = True
    dropped, _ = function(given, spoilt, reset=reset)
    alone, _ = function(given, reset=reset)
    assert_agree(dropped, alone, "outputs with NaN in a state that is dropped")
    gradients = _gradients(function, alone, given)
    assert_agree(
        _gradients(function, dropped, given), gradients, "gradients with NaN in a state that is dropped"
    )


def check_compile(
    function: Function, x: Tree, *, compiler: str = "inductor", dynamic: bool | None = False
) -> None:
    """Law 6: `torch.compile(fullgraph=True)` agrees with eager, in outputs, state and gradients.

    From a given state, whose gradient is compared too; and without gradients, from the start, at half the
    length. What the compiler raises, as for a graph break, passes through.

    Args:
        function: the mixer or operator.
        x: inputs over time, at least two steps.
        compiler: the compiler's backend; "aot_eager" traces forward and backward without making code.
        dynamic: that of `torch.compile`: False compiles each length anew, None the second one for any length.
    """
    # compiled versions of other functions count against the same limit
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    # a state without history: a graph's inputs are leaves
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
    """No steps give no outputs and hand the state on; no rows give no rows."""
    y, last = function(x)
    none, state = function(_cut(x, 0, 0), last)
    assert_agree(none, y[:, :0], "outputs of no steps")
    _assert_same_future(function, x, state, last, "state after no steps")
    _, first = function(_cut(x, 0, 0))
    _assert_same_future(function, x, first, None, "state after no steps from the start")
    assert_agree(function(map_tree(lambda tensor: tensor[:0], x))[0], y[:0], "outputs of no rows")


def check_layout(function: Function, x: Tree) -> None:
    """Inputs whose memory is not contiguous give what contiguous ones give."""
    strided = map_tree(lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2], x)
    transposed = map_tree(lambda tensor: tensor.transpose(0, 1).contiguous().transpose(0, 1), x)
    y, _ = function(x)
    assert_agree(function(strided)[0], y, "strided inputs")
    assert_agree(function(transposed)[0], y, "inputs with time in front in memory")


def _changed_where(mask: Tensor, tensor: Tensor) -> Tensor:
    mask = mask.reshape(1, -1, *[1] * (tensor.dim() - 2))
    # leaves what is between zero and one between them
    return torch.where(mask, 1 - tensor, tensor)


def _spoilt(x: Tree, mask: Tensor, value: float, place: int | None = None) -> Tree:
    """The floating tensors, or the one at `place`, with `value` for the steps of `mask` (b, t), or all."""
    places = iter(range(len(leaves(x))))

    def spoil(tensor: Tensor) -> Tensor:
        if place not in (None, next(places)) or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        shaped = mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
        return tensor.detach().masked_fill(shaped, value).requires_grad_(tensor.requires_grad)

    return map_tree(spoil, x)


def _time(x: Tree) -> int:
    return leaves(x)[0].shape[1]


def _cut(x: Tree, begin: int, end: int) -> Tree:
    return map_tree(lambda tensor: tensor[:, begin:end], x)


def _row(x: Tree, row: int) -> Tree:
    return map_tree(lambda tensor: tensor[row : row + 1], x)


def _assert_same_future(function: Function, x: Tree, state: State, other: State, what: str) -> None:
    assert_agree(function(x, state)[0], function(x, other)[0], f"{what}: outputs that follow from it")


def _gradients(function: Function, y: Tensor, x: Tree) -> list[Tensor]:
    """Gradients of a fixed linear functional of y, for the leaves of x and the parameters of a module."""
    cotangent = torch.randn(y.shape, generator=generator(1), dtype=torch.float64).to(y)
    wanted = [tensor for tensor in leaves(x) if tensor.requires_grad]
    if isinstance(function, nn.Module):
        wanted += [parameter for parameter in function.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(y, wanted, cotangent, retain_graph=True, materialize_grads=True))
