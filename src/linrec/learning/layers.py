"""Recurrent layers of a model as real-time recurrent learning sees them: which channel owns which parameter.

A layer's state h (b, n) is element-wise if d h_t[i] / d h_{t-1}[j] = 0 for i != j. Channel o owns an entry of
a parameter if the entry changes no other channel of the state. One trace per entry then holds its influence.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from typing_extensions import override

from linrec.nn.mixer import Mixer
from linrec.nn.segment_mixer import SegmentMixer
from linrec.ops.core.call import Call, Result, handling
from linrec.trees import Tree, leaves, map_tree

__all__ = [
    "Layer", "Parts", "Past", "find_layers", "influences", "outermost", "replacing", "split", "watching",
]  # fmt: skip

# the probe's rows and steps, and the largest relative difference that counts as rounding
ROWS = 64
STEPS = 3
ROUNDING = 1e-7

Parts: TypeAlias = tuple[slice | None, ...]
"""The channels of each leaf of a state that are traced, with the axes after the batch flattened."""


class Layer(NamedTuple):
    """A recurrent layer, and what its channels own.

    Args:
        path: the layer's name in the model.
        mixer: the layer.
        owners: for each traced parameter, the channel that owns each entry, int64 in the parameter's shape,
            but of size 1 along axes of a single owner.
        untraced: parameters that change the state, but more than one channel of it.
        parts: the channels of the state that are traced.
        is_complex: whether these channels are complex.
    """

    path: str
    mixer: Mixer
    owners: Mapping[str, Tensor]
    untraced: tuple[str, ...]
    parts: Parts
    is_complex: bool

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The layer's parameters by their names within the layer."""
        return dict(self.mixer.named_parameters())


class Past(NamedTuple):
    """One call of a layer.

    Args:
        starts: the traced channels of the state before the call, leaves of the graph.
        weights: the traced parameters, a copy (b, *shape of p) for each row; for a single row, themselves.
        last: the traced channels after the call (b, n).
    """

    starts: list[Tensor]
    weights: list[Tensor]
    last: Tensor


def split(state: Tree, parts: Parts) -> tuple[Tree, list[Tensor]]:
    """Return the state with its traced channels as new leaves that require gradients, and these leaves."""
    parts_left, starts = iter(parts), []

    def renewed(leaf: Tensor) -> Tensor:
        part = next(parts_left)
        leaf = leaf.detach()
        if part is None:
            return leaf
        flat = leaf.flatten(1)
        starts.append(flat[:, part].clone().requires_grad_())
        pieces = [flat[:, : part.start], starts[-1], flat[:, part.stop :]]
        return torch.cat([piece for piece in pieces if piece.shape[1]], 1).view(leaf.shape)

    return map_tree(renewed, state), starts


def channels(state: Tree, parts: Parts) -> Tensor:
    """Return the traced channels of a state (b, n)."""
    pairs = zip(leaves(state), parts, strict=True)
    return torch.cat([leaf.flatten(1)[:, part] for leaf, part in pairs if part is not None], 1)


def find_layers(
    model: nn.Module, traced: Callable[[Mixer], Parts | None] = lambda mixer: None
) -> list[Layer]:
    """Return the outermost mixers of a model that have a state, after a probe of each.

    Args:
        model: the model.
        traced: returns the channels of a mixer's state to trace; the others are then inputs of each step.
            None traces all that depend on parameters.
    """
    return [_probed(path, mixer, traced(mixer)) for path, mixer in outermost(model).items()]


def outermost(model: nn.Module) -> dict[str, Mixer]:
    """Return the outermost mixers of a model that have a state, by their paths."""
    found: dict[str, Mixer] = {}
    for path, mixer in model.named_modules():
        inside = any(not above or path.startswith(f"{above}.") for above in found)
        if isinstance(mixer, SegmentMixer):
            raise ValueError(
                f"traces need a state that changes at each step; the state of `{path or 'model'}` "
                f"({type(mixer).__name__}) changes at ends of segments, every {mixer.segment_length} steps. "
                "Take 'tbptt', whose window may hold several segments."
            )
        if isinstance(mixer, Mixer) and not inside and leaves(mixer.init_state(1, device="meta")):
            found[path] = mixer
    return found


def _probed(path: str, mixer: Mixer, parts: Parts | None) -> Layer:
    """Find what each channel of a mixer owns.

    The last state of a few random steps is differentiated with three cotangents: ones, the channels' numbers,
    and random numbers. The second gradient over the first is the owner, and the third over the first must be
    the owner's random number. Random weights of the rows keep their contributions from cancelling.
    """
    steps = STEPS if parts is None else 1
    learning = {name for name, p in mixer.named_parameters() if p.requires_grad}
    device = next(mixer.parameters()).device
    # on the CPU: float64 exists there, and the random states of other devices stay as they are
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        twin = copy.deepcopy(mixer).cpu().double().eval().requires_grad_()
        x = torch.randn(ROWS, steps, mixer.d_model, dtype=torch.float64)
        weight = torch.rand(ROWS, 1, dtype=torch.float64) + 0.5
        start = map_tree(_drawn, twin(x)[1])
        weights = {name: p for name, p in twin.named_parameters() if name in learning}
        read: set[str] = set()
        if parts is None:
            parts, read = _dependent(twin, x, start, weights)
        # the random numbers are distinct: ranks in a random order
        order = torch.randperm(sum(part.stop - part.start for part in parts if part is not None))
    if not len(order):
        return Layer(path, mixer, {}, (), parts, is_complex=False)
    state, starts = split(start, parts)
    h = channels(twin(x, state)[1], parts)
    numbers = torch.arange(len(order), dtype=torch.float64)
    random = 1 + order / len(order)
    # complex channels have two: that of the real part, and that of the imaginary part
    passes = [
        [
            _gradients((weight * c * part).sum(), [*weights.values()], starts)
            for c in (numbers**0, numbers, random)
        ]
        for part in _parts_of(h)
    ]
    is_elementwise = all(
        _equal(second, numbers * first) and _equal(third, random * first)
        for (_, first), (_, second), (_, third) in passes
    )
    if h.is_complex():
        # a holomorphic function turns the gradient as the cotangent turns
        is_elementwise = is_elementwise and _equal(passes[1][0][1], 1j * passes[0][0][1])
    owners: dict[str, Tensor] = {}
    untraced: list[str] = []
    for place, name in enumerate(weights):
        each = [[gradients[place] for gradients, _ in triple] for triple in passes]
        first, second = (torch.stack([triple[i] for triple in each]) for i in (0, 1))
        strongest = first.abs().argmax(0, keepdim=True)
        first, second = (g.gather(0, strongest)[0] for g in (first, second))
        if not first.any():
            continue
        owner = (second / torch.where(first == 0, 1, first)).round().long().clamp(0, len(order) - 1)
        owned = all(_equal(b, owner * a) and _equal(c, random[owner] * a) for a, b, c in each)
        if is_elementwise and owned and name not in read:
            owners[name] = _narrow(owner).to(device)
        else:
            untraced.append(name)
    return Layer(path, mixer, owners, tuple(untraced), parts, h.is_complex())


def _drawn(leaf: Tensor) -> Tensor:
    """Return random numbers of a leaf's shape; counters and flags stay as they are."""
    return torch.randn_like(leaf) if leaf.is_floating_point() or leaf.is_complex() else leaf.detach()


def _parts_of(h: Tensor) -> list[Tensor]:
    return [h.real, h.imag] if h.is_complex() else [h]


def _gradients(seen: Tensor, weights: list[Tensor], starts: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the gradients by weights, and by all traced channels (b, n); zeros for unused inputs."""
    inputs = [*weights, *starts]
    found = torch.autograd.grad(seen, inputs, retain_graph=True, allow_unused=True)
    full = [torch.zeros_like(of) if g is None else g for g, of in zip(found, inputs, strict=True)]
    return full[: len(weights)], torch.cat(full[len(weights) :], 1)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors are equal but for rounding of their largest entries."""
    return bool((a - b).abs().amax() <= ROUNDING * (a.abs().amax() + b.abs().amax()))


def _dependent(twin: Mixer, x: Tensor, start: Tree, weights: Mapping[str, Tensor]) -> tuple[Parts, set[str]]:
    """Return the channels to trace, and the parameters that other channels carry to later steps.

    The leaves to trace depend on parameters. A leaf that others read, such as a convolution's tail, is no
    element-wise state: it is an input of the step, and the parameters that it depends on have no trace.
    """
    everything = tuple(slice(0, leaf[0].numel()) if _is_number(leaf) else None for leaf in leaves(start))
    state, starts = split(start, everything)
    last, takes = leaves(twin(x, state)[1]), iter(starts)
    first = [None if part is None else next(takes) for part in everything]

    def changing(leaf: Tensor, inputs: Mapping[Any, Tensor]) -> set[Any]:
        """Return the names of the inputs that change a leaf."""
        if not leaf.requires_grad or not inputs:
            return set()
        seen = torch.stack([part.sum() for part in _parts_of(leaf)]).sum()
        found = torch.autograd.grad(seen, [*inputs.values()], retain_graph=True, allow_unused=True)
        return {name for name, g in zip(inputs, found, strict=True) if g is not None and g.any()}

    by = [
        set() if part is None else changing(leaf, weights)
        for leaf, part in zip(last, everything, strict=True)
    ]
    traced = {place: of for place, of in enumerate(first) if of is not None and by[place]}
    read = {
        place
        for other in traced
        for place in changing(last[other], {p: of for p, of in traced.items() if p != other})
    }
    # leaves that all read each other, as a numerator and a maximum may, are one state
    if read == set(traced):
        read = set()
    parts = tuple(
        part if place in traced and place not in read else None for place, part in enumerate(everything)
    )
    return parts, {name for place in read for name in by[place]}


def _is_number(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _narrow(owner: Tensor) -> Tensor:
    """Return the owners with size 1 along the axes that have the same owner everywhere."""
    for axis in range(owner.dim()):
        first = owner.narrow(axis, 0, 1)
        owner = first if (owner == first).all() else owner
    return owner


def influences(layer: Layer, past: Past) -> tuple[list[Tensor], Tensor]:
    """Return how the steps of a call changed the layer's last state.

    Returns:
        d h_T[o(p)] / d p for each traced parameter p, with the state before the call held, (b, *shape of p),
        complex where the state is; and d h_T / d h_0, the product of the transitions, (b, n).
    """
    if not past.weights:
        return [], past.last
    found = [_gradients(part.sum(), past.weights, past.starts) for part in _parts_of(past.last)]
    shapes = [(len(past.last), *layer.weights[name].shape) for name in layer.owners]
    of_weights = [[g.view(shape) for g, shape in zip(gs, shapes, strict=True)] for gs, _ in found]
    if not past.last.is_complex():
        return of_weights[0], found[0][1]
    return [torch.complex(re, im) for re, im in zip(*of_weights, strict=True)], found[0][1].conj()


@contextmanager
def watching(
    layers: Sequence[Layer], one_step: Mapping[str, Mapping[str, Tensor]] | None = None
) -> Iterator[dict[str, Past]]:
    """Within the context, give layers states that are leaves, and collect their calls by path.

    Args:
        layers: the layers, each of which runs once.
        one_step: None for credit through all steps of a call. Otherwise errors pass down at the same step
            only, and so do gradients of these copies of parameters, by path and name.
    """
    calls: dict[str, Past] = {}

    def watched(layer: Layer, run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Tensor, state: Tree | None = None, **options: Any) -> tuple[Tensor, Tree]:
            if layer.path in calls:
                raise ValueError(f"`{layer.path}` must run once in a call of the model; it runs again.")
            if state is None:
                state = layer.mixer.init_state(len(x), device=x.device)
            state, starts = split(state, layer.parts)
            own, seen = layer.weights, x if one_step is None else x.detach()
            weights: list[Tensor] = [own[name] for name in layer.owners]
            if len(x) == 1 or not weights:
                y, after = run(seen, state, **options)
            else:
                weights = [p.expand(len(x), *p.shape) for p in weights]
                y, after = _by_rows(_Run(layer.mixer, run), layer, weights, seen, state, options)
            last = channels(after, layer.parts) if starts else x.new_zeros(len(x), 0)
            calls[layer.path] = Past(starts, weights, last)
            if one_step is None:
                return y, after
            held = {f"mixer.{name}": p.detach() for name, p in own.items()}
            held |= {f"mixer.{name}": p for name, p in one_step[layer.path].items()}
            with handling(_same_step):
                same, _ = functional_call(
                    _Run(layer.mixer, run), held, (x, map_tree(Tensor.detach, state)), options
                )
            return y + (same - same.detach()), after

        return forward

    with replacing({layer.mixer: watched(layer, layer.mixer.forward) for layer in layers}):
        yield calls


@contextmanager
def replacing(forwards: Mapping[Mixer, Callable[..., Any]]) -> Iterator[None]:
    """Within the context, give mixers other `forward` functions."""
    # a user may have given a mixer a `forward` of its own
    own: dict[Mixer, Any] = {mixer: vars(mixer).get("forward") for mixer in forwards}
    try:
        for mixer, forward in forwards.items():
            mixer.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for mixer, before in own.items():
            vars(mixer).pop("forward", None)
            if before is not None:
                mixer.forward = before  # type: ignore[method-assign]


class _Run(nn.Module):
    """A mixer without its hooks, which have seen the call, for `functional_call`."""

    def __init__(self, mixer: Mixer, run: Callable[..., Any]) -> None:
        super().__init__()
        self.mixer, self.run = mixer, run

    @override
    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tree]:
        return self.run(*arguments, **options)


def _by_rows(
    run: _Run, layer: Layer, weights: list[Tensor], x: Tensor, state: Tree, options: dict[str, Any]
) -> tuple[Tensor, Tree]:
    """Run each row with traced parameters of its own, so that one backward pass keeps the rows apart."""
    others = {f"mixer.{name}": p for name, p in layer.weights.items() if name not in layer.owners}
    timed = {name: value for name, value in options.items() if isinstance(value, Tensor)}

    def row(weights: list[Tensor], x: Tensor, state: Tree, timed: dict[str, Tensor]) -> Tree:
        given = others | {f"mixer.{name}": p for name, p in zip(layer.owners, weights, strict=True)}
        arguments, one = map_tree(lambda tensor: tensor[None], ((x, state), timed))
        return map_tree(lambda tensor: tensor[0], functional_call(run, given, arguments, options | one))

    return vmap(row, randomness="different")(weights, x, state, timed)


def _same_step(call: Call, proceed: Callable[[], Result]) -> Result:
    """Run `scan` such that gradients do not pass from step to step."""
    if call.operator.name != "scan":
        return proceed()
    given = call.inputs
    h, state = proceed()
    before = torch.cat([given.state[:, None].to(h.dtype), h[:, :-1]], 1).detach()
    if given.reset is not None:
        before = before.masked_fill(given.reset.reshape(*given.reset.shape, *[1] * (h.dim() - 2)), 0)
    return given.a * before + given.x, state.detach()
