"""A trainable initial state of a language model."""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linrec.mixers import State
from linrec.models.language_model import LanguageModel
from linrec.nn.parameters import Float32Module, tensor_options
from linrec.trees import leaves, map_tree

__all__ = ["InitialState"]


class InitialState(Float32Module):
    """S_0, the state before the first step, as parameters ("state tuning").

    A recurrent model that starts from a trained state behaves as if it had read a long prompt, at no cost per
    step. All other parameters may stay as they are. A reset starts from zeros, not from the trained state.

    The parameters start at the values of `model.init_state`, so the model first computes the same logits. All
    floating-point and complex tensors of the state are trained, in float32; counters and empty caches of
    attention are not. A running maximum, whose initial value is minus infinity, is 0 instead and is not
    trained; this changes no output, because the sums under it are zero.

    Args:
        model: the model that takes the state.

    Raises:
        ValueError: the model has no state to train.

    Source:
        State tuning of RWKV (Peng and others, RWKV-LM, 2024).

    Example:
        >>> from linrec.models import ModelConfig
        >>> model = LanguageModel(ModelConfig(vocab_size=6, d_model=8, n_layers=1, mixer="gla"))
        >>> start, tokens = InitialState(model), torch.zeros(3, 5, dtype=torch.int64)
        >>> logits, state = model(tokens, start(model.init_state(3)))
        >>> sum(parameter.numel() for parameter in start.parameters()) == model.state_size
        True
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        # the values of tensors on the meta device are unknown
        device = tensor_options(model)["device"]
        for place, tensor in enumerate(leaves(model.init_state(1, device="cpu"))):
            if _is_trained(tensor):
                # files of tensors and optimisers differ in their support of complex numbers
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                if real.isfinite().all():
                    self.register_parameter(f"part_{place}", nn.Parameter(real.to(device, copy=True)))
                else:
                    self.register_buffer(f"part_{place}", torch.zeros_like(real, device=device))
        if not self._parameters:
            raise ValueError("`model` must have a state of fixed size to train; it has none.")
        self.keep_float32(*self._parameters, *self._buffers)

    def forward(self, state: tuple[State, ...]) -> tuple[State, ...]:
        """Return the trained state for all rows of `state`, which `model.init_state(batch)` returned."""
        places = itertools.count()

        def trained(tensor: Tensor) -> Tensor:
            place = next(places)
            if not _is_trained(tensor):
                return tensor
            part: Tensor = getattr(self, f"part_{place}").to(tensor.real.dtype)
            return (torch.view_as_complex(part) if tensor.is_complex() else part).expand_as(tensor)

        found: tuple[State, ...] = map_tree(trained, state)
        return found

    if TYPE_CHECKING:
        __call__ = forward


def _is_trained(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0
