"""Tolerances, test inputs, and the laws that every mixer and operator obeys; use them to test your own.

A law is a function that returns None or raises AssertionError. Most laws accept any function
`function(x, state=None, *, reset=None) -> (y, state)`: a mixer, or an operator whose inputs over time are the
tensors of `x`. `x` is a tensor, or a nested dict or tuple of tensors of shape (batch, time, ...). States are
compared by the outputs that follow from them, so they may have any structure. `check_mixer` runs every law on
a mixer.

Example:
    >>> import torch
    >>> def forgetful(x, state=None, *, reset=None):
    ...     return x.cumsum(1), None
    >>> check_steps(forgetful, torch.ones(1, 2, 1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: one step at a time against one pass...
"""

from linrec.testing.draws import generator, reset_mask
from linrec.testing.fakes import CheckFakeKernels
from linrec.testing.inputs import (
    delta_rule_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    scan_inputs,
    selective_scan_inputs,
)
from linrec.testing.laws import (
    check_batch_independence,
    check_causality,
    check_compile,
    check_empty,
    check_gradients,
    check_isolation,
    check_layout,
    check_reset,
    check_split,
    check_stability,
    check_steps,
)
from linrec.testing.suites import (
    check_autocast,
    check_derivatives,
    check_init_state,
    check_mixer,
    check_operator,
    check_outputs,
    check_promises,
    check_state_dict,
    check_times,
)
from linrec.testing.system_inputs import (
    dense_ssm_inputs,
    diagonal_ssm_inputs,
    dplr_ssm_inputs,
    long_conv_inputs,
    nonlinear_scan_inputs,
    short_conv_inputs,
)
from linrec.testing.tolerances import assert_agree, tolerance
from linrec.trees import differentiable, map_tree

__all__ = [
    "CheckFakeKernels",
    "assert_agree",
    "check_autocast",
    "check_batch_independence",
    "check_causality",
    "check_compile",
    "check_derivatives",
    "check_empty",
    "check_gradients",
    "check_init_state",
    "check_isolation",
    "check_layout",
    "check_mixer",
    "check_operator",
    "check_outputs",
    "check_promises",
    "check_reset",
    "check_split",
    "check_stability",
    "check_state_dict",
    "check_steps",
    "check_times",
    "delta_rule_inputs",
    "dense_ssm_inputs",
    "diagonal_ssm_inputs",
    "differentiable",
    "dplr_ssm_inputs",
    "gate_loop_inputs",
    "generalized_delta_rule_inputs",
    "generator",
    "long_conv_inputs",
    "map_tree",
    "nonlinear_scan_inputs",
    "reset_mask",
    "scan_inputs",
    "selective_scan_inputs",
    "short_conv_inputs",
    "tolerance",
]
