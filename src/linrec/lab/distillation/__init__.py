"""Distillation of long convolutions into recurrences, so that a trained model decodes in constant memory.

`distill` converts a model or a mixer. The other functions fit the modes of a given kernel.
"""

from linrec.lab.distillation.modes import exact_modes, fit_modes, hankel_singular_values
from linrec.lab.distillation.replace import distill

__all__ = ["distill", "exact_modes", "fit_modes", "hankel_singular_values"]
