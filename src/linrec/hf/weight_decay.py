"""Names by which the Trainer of transformers leaves parameters out of weight decay."""

from torch import nn

from linrec.nn.parameters import groups_of

__all__ = ["Undecayed", "name_undecayed"]


class Undecayed(str):
    """The name of a parameter without weight decay.

    The Trainer asks no model which parameters decay: it searches the names of parameters, in lower case, for
    "bias". In lower case, this name ends so; otherwise it is the parameter's name, as in checkpoints.
    """

    __slots__ = ()

    def lower(self) -> str:
        """Return the name as the Trainer reads it."""
        return f"{super().lower()}.bias"


def name_undecayed(model: nn.Module) -> None:
    """Rename the parameters without weight decay in `linrec train`: marked ones, and those below two axes."""
    groups = groups_of(model)
    undecayed = {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or not groups[name].weight_decay
    }
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            # in the order that they have
            del module._parameters[name]
            module._parameters[Undecayed(name) if parameter in undecayed else name] = parameter
