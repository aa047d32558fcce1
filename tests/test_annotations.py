"""The shapes in the public signatures: checked while operators, mixers and models run, in tests only."""

import os
import re
import subprocess
import sys
from pathlib import Path

import linrec
from tests.tiers import thorough

# in a process of its own, since the hook must come before the first import of linrec
CHECKED = """
import pytest, torch
from jaxtyping import TypeCheckError, install_import_hook
with install_import_hook("linrec", "beartype.beartype"):
    from linrec import mixers, models, nn, ops
    from linrec.testing import (
        delta_rule_inputs, diagonal_ssm_inputs, dplr_ssm_inputs, gate_loop_inputs, long_conv_inputs,
        nonlinear_scan_inputs, reset_mask, scan_inputs, selective_scan_inputs, short_conv_inputs
    )

reset = reset_mask(2, 9)
ops.scan(**scan_inputs(2, 9, 3), reset=reset)
ops.short_conv(**short_conv_inputs(2, 9, 3), reset=reset)
ops.long_conv(**long_conv_inputs(2, 9, 3), reset=reset)
for is_complex in (True, False):
    inputs = diagonal_ssm_inputs(2, 9, 3, 4, is_complex=is_complex)
    ops.diagonal_ssm(**inputs, reset=reset)
    ops.vandermonde_kernel(inputs["a"], inputs["state"], 9)
    ops.discretize_diagonal(-inputs["a"].abs(), inputs["b"], torch.rand(3, 1))
ops.nonlinear_scan(**nonlinear_scan_inputs(2, 9, 3), reset=reset, mode="newton")
ops.dplr_ssm(**dplr_ssm_inputs(2, 9, 3, 4), reset=reset)
pairs = torch.randn(3, 4, dtype=torch.complex64)
ops.cauchy_kernel(pairs - 9, pairs[..., None], pairs, pairs, torch.ones(3), 9)
for decay, phase in (("bthk", "bthk"), ("h", "hk"), (None, None)):
    inputs = gate_loop_inputs(2, 9, 3, 4, 5, log_decay=decay, phase=phase)
    ops.gate_loop(**inputs, bonus=torch.ones(3, 4), reset=reset)
    inputs = gate_loop_inputs(2, 9, 3, 4, 5, log_decay=decay, phase=phase)
    ops.normalized_gate_loop(**inputs | {"v": inputs["v"][..., :4]}, floor=torch.ones(2, 9, 3), reset=reset)
    without = {name: inputs[name] for name in ("q", "k", "log_decay", "phase")}
    ops.gate_loop_matrix(**without, reset=reset)
    ops.gate_loop_attention(**without, v=inputs["v"], reset=reset)
    ops.softmax_attention(inputs["q"], inputs["k"], inputs["v"], reset=reset)
    ops.laplace_attention(inputs["q"], inputs["k"][:, :, :1], inputs["v"][:, :, :1], reset=reset)
for groups in (None, 3):
    ops.selective_scan(**selective_scan_inputs(2, 9, 6, 4, groups=groups), reset=reset)
for decay in ("bthk", "bth", "h", None):
    ops.delta_rule(**delta_rule_inputs(2, 9, 3, 4, 5, log_decay=decay), reset=reset)
for name in mixers.names():
    y, state = mixers.build(name, 8)(torch.randn(2, 9, 8), reset=reset)
    mixers.build(name, 8)(y, state)
config = models.ModelConfig(vocab_size=6, n_layers=2, d_model=8)
models.LanguageModel(config)(torch.zeros(2, 9, dtype=torch.int64))
config = models.SequenceClassifierConfig(n_outputs=3, vocab_size=6, n_layers=1, d_model=8)
models.SequenceClassifier(config)(torch.zeros(2, 9, dtype=torch.int64), lengths=torch.tensor([9, 4]))
config = models.SequenceClassifierConfig(n_outputs=3, vocab_size=6, n_layers=1, d_model=8, pairs=True)
models.SequenceClassifier(config)(torch.zeros(2, 2, 9, dtype=torch.int64), lengths=torch.ones(2, 2).long())
config = models.ImageClassifierConfig(n_outputs=3, patch_size=2, n_layers=1, d_model=8)
models.ImageClassifier(config)(torch.randn(2, 3, 4, 6))
# and they would be seen to be wrong
with pytest.raises(TypeCheckError):
    ops.gate_loop_matrix(torch.randn(2, 9, 3, 4), torch.randn(2, 9, 3, 5))
with pytest.raises(TypeCheckError):
    nn.FeedForward(4, 8)("x")
"""


@thorough
def test_signatures_say_what_runs():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", CHECKED]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def test_shapes_are_of_classes():
    # from numpy 2.5 on NDArray is an alias, which jaxtyping does not take: modules could not be imported
    source = Path(linrec.__file__).parent
    shaped = re.compile(r"\w\[NDArray\b.*\"")
    assert not [path for path in source.rglob("*.py") if shaped.search(path.read_text())]
