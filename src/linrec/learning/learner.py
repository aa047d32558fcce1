"""The interface of all learners: steps and chunks of a stream, gradients, updates, memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from linrec.errors import CheckpointError, DivergedError
from linrec.models import LanguageModel, SequenceClassifier
from linrec.models.compilation import CapturedStep
from linrec.nn.added_loss import weighing_losses
from linrec.nn.mixer import Mixer
from linrec.rules import at_least
from linrec.trees import Tree, leaves, map_tree

__all__ = ["Learner", "Learnt", "Loss", "Piece", "Step", "step_losses"]

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""A function of predictions (b, t, ..) and targets (b, t, ..) that returns losses (b, t)."""


class Piece(NamedTuple):
    """The next t steps of b streams.

    Args:
        inputs: tokens (b, t) int64, or features (b, t, n).
        targets: targets of the steps, in the form that the loss takes.
        reset: (b, t) bool, true where a stream starts anew; None for no resets.
        weight: (b, t), factors of the losses; None for 1.
    """

    inputs: Num[Tensor, "b t *n"]
    targets: Num[Tensor, "b t *n"]
    reset: Bool[Tensor, "b t"] | None = None
    weight: Float[Tensor, "b t"] | None = None


class Step(NamedTuple):
    """The output of a learner for one step, or for a chunk of t steps.

    Args:
        prediction: the model's output before it learnt from the targets, (b, ..), or (b, t, ..) of a chunk.
        loss: losses without weights, (b,), or (b, t) of a chunk.
        updated: whether the parameters changed.
    """

    prediction: Float[Tensor, "b *t n"]
    loss: Float[Tensor, "b *t"]
    updated: bool


class Learnt(NamedTuple):
    """Results of a piece of a stream, before the learner keeps them.

    Args:
        prediction: the model's output, (b, t, ..).
        loss: losses without weights, (b, t).
        gradients: gradients of the weighted sum of losses, one for each of the learner's parameters, or None.
        memory: the memory after the piece.
    """

    prediction: Tensor
    loss: Tensor
    gradients: Sequence[Tensor | None]
    memory: dict[str, Tree]


def step_losses(prediction: Float[Tensor, "b t n"], targets: Num[Tensor, "b t *n"]) -> Float[Tensor, "b t"]:
    """Return the loss of each step, the default of all learners.

    Args:
        prediction: logits (b, t, n), or real predictions (b, t, n).
        targets: classes (b, t) int64, where -100 marks a step without a target; or reals (b, t, n).

    Returns:
        Cross-entropy in nats for classes, and the mean squared error over the n numbers of a step for reals.

    Example:
        >>> step_losses(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]))
        tensor([[1.3863, 0.0000]])
    """
    if targets.is_floating_point():
        return (prediction - targets).square().flatten(2).mean(2)
    flat = functional.cross_entropy(prediction.flatten(0, 1), targets.flatten().long(), reduction="none")
    return flat.unflatten(0, targets.shape)


class Learner(ABC):
    """Learn from a stream, step by step or in chunks, in memory that does not grow with time.

    A learner predicts from the past and the present input, receives the target, and adds the gradient of the
    weighted losses to its gradients. An update divides the gradients by the sum of weights, clips them, and
    runs the optimiser. Losses and gradients belong to the parameters before the update.

    Args:
        model: a causal model `model(inputs, state, reset=reset) -> (prediction, state)` with `init_state`: a
            `LanguageModel`, a `Mixer`, or another module. A causal `SequenceClassifier` without mean pooling
            streams too.
        optimizer: an optimiser of the model's parameters, or several, each of some of them; None computes
            gradients only.
        loss: losses (b, t) of predictions and targets; None is `step_losses`.
        update_every: steps between updates, counted from the start; "chunk" updates at the end of a chunk. A
            chunk is learnt in pieces that end at updates.
        clip_norm: maximum norm of the gradients at an update; None disables clipping.
        capture: on a CUDA device, replay pieces of one shape as a CUDA graph: a single launch in place of
            hundreds. The model must not read values on the host. Losses and gradients are the same.

    Attributes:
        name: the learner's name.
        chunk_only: why the learner has no `step`; None for learners that have.
        network: the class of the only models that the learner trains, called with `n_features`, `n_outputs`
            and `vocab_size`; None for learners of other models.
        memory: a dict of trees of tensors (b, ..), carried from step to step: "state" is the model's state.
            None before the first step. Values may be replaced.
        shared: names of entries of the memory that all rows share; `reset` with `rows` leaves them.
        steps: number of steps seen.
        updates: number of updates of the parameters.

    Raises:
        ValueError: the model does not stream; the message names the layer.
    """

    name: ClassVar[str]
    chunk_only: ClassVar[str | None] = None
    shared: ClassVar[frozenset[str]] = frozenset()
    network: ClassVar[type[nn.Module] | None] = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        loss: Loss | None = None,
        update_every: int | Literal["chunk"] = "chunk",
        clip_norm: float | None = None,
        capture: bool = False,
    ) -> None:
        _check_streams(model)
        if self.network is not None and not isinstance(model, self.network):
            raise ValueError(
                f"`model` must be a {self.network.__name__} for `{self.name}`; got {type(model).__name__}."
            )
        if update_every != "chunk":
            at_least(1, update_every=update_every, cure="'chunk' updates at the end of each chunk.")
        at_least(0, clip_norm=clip_norm, or_none=True, cure="None disables clipping.")
        self.model = model
        self.optimizers: list[Optimizer] = []
        if optimizer is not None:
            self.optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        self.loss = step_losses if loss is None else loss
        self.update_every, self.clip_norm, self.capture = update_every, clip_norm, capture
        self.steps = self.updates = 0
        self.memory: dict[str, Tree] | None = None
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._gradients: list[Tensor | None] = [None] * len(self._named)
        self._weight = 0.0
        self._captured: CapturedStep | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that learn, in the order of `model.named_parameters()`."""
        return [*self._named.values()]

    def step(
        self,
        inputs: Num[Tensor, "b *n"],
        targets: Num[Tensor, "b *n"],
        reset: Bool[Tensor, "b"] | None = None,
        weight: Float[Tensor, "b"] | None = None,
        *,
        update: bool = True,
    ) -> Step:
        """Learn from one step; arguments and errors as in `chunk`, without the axis of time."""
        if self.chunk_only is not None:
            raise ValueError(f"`{self.name}` learns from chunks only: {self.chunk_only} Call `chunk`.")
        piece = map_tree(lambda tensor: tensor.unsqueeze(1), Piece(inputs, targets, reset, weight))
        step = self.chunk(*piece, update=update)
        return Step(step.prediction.squeeze(1), step.loss.squeeze(1), step.updated)

    def chunk(
        self,
        inputs: Num[Tensor, "b t *n"],
        targets: Num[Tensor, "b t *n"],
        reset: Bool[Tensor, "b t"] | None = None,
        weight: Float[Tensor, "b t"] | None = None,
        *,
        update: bool = True,
    ) -> Step:
        """Learn from the next t steps of b streams.

        Args:
            inputs: tokens (b, t) int64, or features (b, t, n).
            targets: targets of the steps, in the form that the loss takes.
            reset: (b, t) bool, true where a stream starts anew: state and traces are those of a new learner.
            weight: (b, t), factors of the losses; 0 at steps without a target. None is 1.
            update: whether parameters may change. If not, gradients accumulate.

        Raises:
            ValueError: a shape is wrong, there are no steps, or the number of rows changed.
            DivergedError: an input, a target or a loss is NaN or infinite. The message gives the step's
                number. Parameters, memory and gradients are then as before the piece that contains the step.
            TypeError: `reset` is not bool, or `weight` is not of a floating dtype.
        """
        self._check(Piece(inputs, targets, reset, weight))
        if weight is not None and targets.is_floating_point():
            # NaN stays NaN under a weight of 0
            none = (weight == 0).reshape(*weight.shape, *[1] * (targets.dim() - 2))
            targets = targets.masked_fill(none, 0)
        self._require_finite("targets", targets)
        whole, found = Piece(inputs, targets, reset, weight), list[Step]()
        for start, stop in self._spans(inputs.shape[1], update):
            part = Piece(*(None if x is None else x[:, start:stop] for x in whole))  # type: ignore[arg-type]
            learnt = self._learn_finite(part)
            due = update and bool(self.optimizers) and self._is_due(stop, inputs.shape[1])
            if due:
                self.update()
            found.append(Step(learnt.prediction.detach(), learnt.loss.detach(), due))
        return Step(
            torch.cat([step.prediction for step in found], 1),
            torch.cat([step.loss for step in found], 1),
            any(step.updated for step in found),
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients since the last update, of the sum of weighted losses over rows and steps."""
        pairs = zip(self._named.items(), self._gradients, strict=True)
        return {name: torch.zeros_like(p) if of is None else of for (name, p), of in pairs}

    def update(self) -> Float[Tensor, ""] | None:
        """Run the optimiser on the gradients per unit of weight, and set the gradients to zero.

        Returns:
            The norm of these gradients before clipping; None without any weight since the last update, when
            nothing changes.

        Raises:
            ValueError: there is no optimiser.
            DivergedError: a gradient is NaN or infinite. Parameters do not change.
        """
        if not self.optimizers:
            raise ValueError("`update` needs an optimiser; got None. Pass `optimizer` to `build_learner`.")
        if not self._weight:
            return None
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad = None if gradient is None else (gradient / self._weight).to(p.dtype)
        self.before_update()
        norm = nn.utils.get_total_norm(p.grad for p in self.parameters if p.grad is not None)
        self._gradients, self._weight = [None] * len(self._named), 0.0
        if not norm.isfinite():
            self._clear()
            raise DivergedError(
                f"a gradient of `{self.name}` is NaN or infinite at step {self.steps}; the parameters are as "
                "before. Take a smaller learning rate, or clip by `clip_norm`."
            )
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.after_update()
        self._clear()
        self.updates += 1
        for module in self.model.modules():
            # such as the clipped weights of `ind_rnn`
            if callable(after_update := getattr(module, "after_update", None)):
                after_update(self.updates)
        return norm

    def before_update(self) -> None:  # noqa: B027
        """Change the gradients `p.grad` of an update, before they are clipped; a learner may override it."""

    def after_update(self) -> None:  # noqa: B027
        """Follow a step of the optimiser; a learner may override it."""

    def reset(self, rows: Bool[Tensor, "b"] | None = None) -> None:
        """Set the memory to that of a new learner.

        Args:
            rows: (b,) bool, the rows to reset; None is all, after which the number of rows may change.
        """
        if rows is None or self.memory is None or (n_rows := self.n_rows) is None:
            self.memory = None
            return
        if rows.dtype != torch.bool or rows.shape != (n_rows,):
            raise ValueError(
                f"`rows` must be bool of shape (batch,) = ({n_rows},); got {rows.dtype} {tuple(rows.shape)}. "
                "Pass one flag per stream."
            )
        own = {name: tree for name, tree in self.memory.items() if name not in self.shared}
        first = self.first_memory(n_rows, rows.device)
        fresh = iter(leaves({name: first[name] for name in own}))

        def renewed(tensor: Tensor) -> Tensor:
            return torch.where(rows.reshape(-1, *[1] * (tensor.dim() - 1)), next(fresh), tensor)

        self.memory = self.memory | map_tree(renewed, own)

    @property
    def n_rows(self) -> int | None:
        """The number of streams b that the memory is for; None before the first step."""
        return None if self.memory is None else len(leaves(self.memory)[0])

    def state_dict(self) -> dict[str, Any]:
        """Return all that a run needs to go on: parameters, optimiser, memory, gradients, step."""
        return {
            "learner": self.name,
            "options": self.options(),
            "rows": self.n_rows,
            "steps": self.steps,
            "updates": self.updates,
            "weight": self._weight,
            "gradients": self.gradients() if self._weight else {},
            "memory": self.memory,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another learner was when it returned `state_dict()`.

        Raises:
            CheckpointError: the state is of another learner, of other options, or of another model.
        """
        if state["learner"] != self.name:
            raise CheckpointError(
                f"the learner of the checkpoint must be `{self.name}`; it is `{state['learner']}`. Build "
                "that learner."
            )
        if state["options"] != self.options():
            raise CheckpointError(
                f"the options of `{self.name}` in the checkpoint must be {self.options()}; they are "
                f"{state['options']}. Build the learner with those options."
            )
        rows = self.n_rows
        if None not in (rows, state["rows"]) and rows != state["rows"]:
            raise CheckpointError(
                f"the checkpoint must be of {rows} streams; it is of {state['rows']}. Call `reset()` first."
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        if shapes != found:
            names = sorted({*shapes.items()} ^ {*found.items()})
            raise CheckpointError(
                f"the checkpoint must be of the learner's model; `{names[0][0]}` differs. Build the "
                "same model."
            )
        self.model.load_state_dict(state["model"])
        for optimizer, stored in zip(self.optimizers, state["optimizers"], strict=False):
            optimizer.load_state_dict(stored)
        self.memory = map_tree(Tensor.clone, state["memory"])
        self.steps, self.updates, self._weight = state["steps"], state["updates"], state["weight"]
        self._gradients = [
            state["gradients"][name].clone() if name in state["gradients"] else None for name in self._named
        ]

    def options(self) -> dict[str, Any]:
        """Return the learner's own options, plain values that a checkpoint compares."""
        return {"update_every": self.update_every, "clip_norm": self.clip_norm}

    def first_memory(self, rows: int, device: torch.device) -> dict[str, Tree]:
        """Return the memory before the first step of `rows` streams."""
        return {"state": self.model.init_state(rows, device=device)}  # type: ignore[operator]

    @abstractmethod
    def learn(self, piece: Piece, memory: dict[str, Tree]) -> Learnt:
        """Return predictions, losses, gradients and the memory after a piece; do not change `self`."""

    def run(self, inputs: Tensor, state: Tree, reset: Tensor | None) -> tuple[Tensor, Tree]:
        """Run the model on the next steps of its streams."""
        if isinstance(self.model, SequenceClassifier):
            return self.model.stream(inputs, state, reset=reset)
        prediction, state = self.model(inputs, state, reset=reset)
        return prediction, state

    def weighted(self, loss: Tensor, weight: Tensor | None) -> Tensor:
        """Return the sum of losses (b, t) under their weights."""
        return loss.sum() if weight is None else (loss * weight).sum()

    def piece_end(self, step: int) -> int | None:
        """Return the step before which a piece must end that starts at `step`; None if it may be long."""
        return None

    def __repr__(self) -> str:
        """Return the learner's name and options."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{self.name}({options})"

    def _clear(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _spans(self, time: int, update: bool) -> Iterator[tuple[int, int]]:
        """Yield start and stop of the pieces of a chunk."""
        start, at = 0, self.steps
        while start < time:
            ends = [time - start]
            if update and isinstance(self.update_every, int):
                ends.append(self.update_every - at % self.update_every)
            if (end := self.piece_end(at)) is not None:
                ends.append(end - at)
            yield start, start + min(ends)
            start, at = start + min(ends), at + min(ends)

    def _is_due(self, stop: int, time: int) -> bool:
        """Return whether an update follows a piece, which `steps` counts, that ends at `stop` of a chunk."""
        return stop == time if self.update_every == "chunk" else self.steps % self.update_every == 0

    def _learn_finite(self, piece: Piece) -> Learnt:
        """Learn from a piece; keep no result of a piece whose losses are not finite."""
        memory = self.memory
        if memory is None:
            memory = self.first_memory(len(piece.inputs), piece.inputs.device)
        weight = float(piece.inputs.shape[:2].numel() if piece.weight is None else piece.weight.sum())
        run = self._replayed if self.capture and piece.inputs.is_cuda else self._weighed
        learnt = run(piece, memory, weight)
        if learnt.memory.keys() != memory.keys():
            raise ValueError(
                f"`learn` of `{self.name}` must return the entries of `first_memory`, {sorted(memory)}; got "
                f"{sorted(learnt.memory)}. Make every entry in `first_memory`, or reset cannot clear it."
            )
        self._require_finite("loss", learnt.loss)
        # detached: a graph of the past would grow without end
        self.memory = map_tree(Tensor.detach, learnt.memory)
        self._gradients = [
            old if new is None else (new.detach() if old is None else old + new.detach())
            for old, new in zip(self._gradients, learnt.gradients, strict=True)
        ]
        self._weight += weight
        self.steps += piece.inputs.shape[1]
        return learnt

    def _weighed(self, piece: Piece, memory: dict[str, Tree], weight: float | Tensor) -> Learnt:
        # a layer's own loss counts once per update, which divides by the weights of its pieces
        with weighing_losses(weight):
            return self.learn(piece, memory)

    def _replayed(self, piece: Piece, memory: dict[str, Tree], weight: float) -> Learnt:
        """Learn from a piece by a CUDA graph, once a few pieces of the same shape were learnt eagerly."""

        def step(weight: Tensor, *arguments: Tensor | None) -> None:
            given = iter(arguments[len(Piece._fields) :])
            held = map_tree(lambda leaf: next(given), self._form)
            learnt = self._weighed(Piece(*arguments[: len(Piece._fields)]), held, weight)  # type: ignore[arg-type]
            self._learnt = map_tree(Tensor.detach, learnt)

        if self._captured is None:
            self._captured = CapturedStep(step, in_place=lambda: self.parameters)
        self._form = memory
        self._captured(torch.tensor(weight, device=piece.inputs.device), *piece, *leaves(memory))
        # a replay overwrites the results of the last one
        learnt: Learnt = map_tree(Tensor.clone, self._learnt)
        return learnt

    def _check(self, piece: Piece) -> None:
        """Raise an error for arguments that `chunk` does not take."""
        inputs, _, reset, weight = piece
        if inputs.dim() < 2 or not inputs.shape[0] or not inputs.shape[1]:
            raise ValueError(
                "`inputs` must have shape (batch, time, ..) with at least one row and one step; got "
                f"{tuple(inputs.shape)}. A single step has time 1, or goes to `step` without that axis."
            )
        shape = inputs.shape[:2]
        for name, tensor in zip(piece._fields[1:], piece[1:], strict=True):
            more = name == "targets"
            if tensor is not None and (tensor.shape[:2] if more else tensor.shape) != shape:
                raise ValueError(
                    f"`{name}` must have shape (batch, time{', ..' if more else ''}) with (batch, time) = "
                    f"{tuple(shape)}; got {tuple(tensor.shape)}. Pass one value per stream and step."
                )
        if reset is not None and reset.dtype != torch.bool:
            raise TypeError(f"`reset` must be bool; got {reset.dtype}. Pass `reset != 0`.")
        if weight is not None and not weight.is_floating_point():
            raise TypeError(
                f"`weight` must be of a floating dtype; got {weight.dtype}. Pass `weight.float()`."
            )
        if (rows := self.n_rows) not in (None, len(inputs)):
            raise ValueError(
                f"`inputs` must have {rows} rows, as before; got {len(inputs)}. Call `reset()` to start anew."
            )
        self._require_finite("inputs", inputs)

    def _require_finite(self, name: str, values: Tensor) -> None:
        """Raise DivergedError with the number of the first step of (b, t, ..) that is not finite."""
        if not values.is_floating_point() or values.isfinite().all():
            return
        finite = values.isfinite().reshape(*values.shape[:2], -1).all(2)
        step = int((~finite).any(0).nonzero()[0])
        row = int((~finite[:, step]).nonzero()[0])
        raise DivergedError(
            f"`{name}` must be finite; row {row} is not at step {self.steps + step}. Nothing of this piece "
            "was learnt. Give steps without a target the weight 0."
        )


def _check_streams(model: nn.Module) -> None:
    """Raise ValueError unless the model reads a stream in constant memory; name the layer that does not."""
    if isinstance(model, SequenceClassifier):
        config = model.config
        if config.bidirectional or config.pooling == "mean" or config.pairs:
            raise ValueError(
                "a learner needs a causal model, and outputs of a single step; got a SequenceClassifier with "
                f"`bidirectional` = {config.bidirectional}, `pooling` = {config.pooling!r} and `pairs` = "
                f"{config.pairs}. Build it with `bidirectional` = False and `pooling` = 'none' or 'last'."
            )
    if isinstance(model, LanguageModel) and model.memory is not None:
        raise ValueError(
            f"a learner needs a state per layer; got `memory.kind` = {model.config.memory.kind!r}, a memory "
            "across the stack. Use a model with `memory.kind` = 'none'."
        )
    for path, layer in model.named_modules():
        if isinstance(layer, Mixer) and (layer.state_grows or not layer.is_causal):
            what = "sees later steps" if not layer.is_causal else "keeps every step"
            raise ValueError(
                f"a learner needs constant memory; `{path or 'model'}` ({type(layer).__name__}) {what}. "
                "Use a recurrent mixer, or `linrec train` without a learner."
            )
    if not callable(getattr(model, "init_state", None)):
        raise TypeError(
            f"`model` must have `init_state(batch, device=)`; {type(model).__name__} has not. Pass a "
            "LanguageModel, a Mixer or a module with that method."
        )
