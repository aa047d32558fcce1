"""Types in the public signatures: shapes, checked while operators, mixers and models run, and calls."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import linrec.export
from linrec import hippo, mixers, models, nn
from tests.tiers import thorough

# in a process of its own, since the hook must come before the first import of linrec
CHECKED = """
import pytest, torch
from jaxtyping import TypeCheckError, install_import_hook
with install_import_hook("linrec", "beartype.beartype"):
    from linrec import mixers, models, nn, ops
    from linrec.testing import (
        delta_rule_inputs, diagonal_ssm_inputs, dplr_ssm_inputs, gate_loop_inputs,
        generalized_delta_rule_inputs, long_conv_inputs, nonlinear_scan_inputs, reset_mask, scan_inputs,
        selective_scan_inputs, short_conv_inputs
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
    ops.generalized_delta_rule(**generalized_delta_rule_inputs(2, 9, 3, 4, 5, log_decay=decay), reset=reset)
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


# what type checkers must say about each line: the type that they reveal, or that they report an error
TYPED = {
    'reveal_type(mixers.build("mamba", 8))': "Mixer",
    "reveal_type(mixers.build(mixers.Mamba, 8, d_state=4))": "linrec.mixers.mamba.Mamba",
    'mixers.build("mambo", 8)': "error",
    'mixers.build("package.module:Class", 8)': "error",
    "mixers.Mambo": "error",
    "linrec.mixer": "error",
    "from linrec.mixers import HGRN": "error",
    "reveal_type(Mamba(8)(x))": "tuple[torch._tensor.Tensor, Any]",
    "reveal_type(Mamba(8)(x)[0])": "torch._tensor.Tensor",
    "Mamba(8)(x, resets=None)": "error",
    "reveal_type(models.LanguageModel(models.ModelConfig(vocab_size=6))(x)[0])": "torch._tensor.Tensor",
    "reveal_type(nn.FeedForward(4, 8)(x))": "torch._tensor.Tensor",
}


@thorough
def test_type_checkers_know_names_and_calls(tmp_path):
    lines = ["import torch", "import linrec", "from linrec import mixers, models, nn"]
    lines += ["from linrec.mixers import Mamba", "x = torch.zeros(2, 5, 8)", *TYPED]
    snippet, root = tmp_path / "snippet.py", Path(linrec.__file__).parents[2]
    snippet.write_text("\n".join(lines))
    result = subprocess.run(
        # with the cache of `make types`
        [sys.executable, "-m", "mypy", snippet],
        capture_output=True, text=True, cwd=root, env=os.environ | {"MYPYPATH": "src"},
    )  # fmt: skip
    found = re.findall(r"snippet\.py:(\d+): (.*)", result.stdout)
    for number, line in enumerate(lines, 1):
        about = " ".join(message for at, message in found if int(at) == number)
        expected = TYPED.get(line, "")
        assert expected in about and ("error" in about) == (expected == "error"), (line, result)


def typed_call(node):
    """Whether a class definition has `__call__ = forward` for type checkers."""
    return any(isinstance(part, ast.If) and "__call__ = forward" in ast.unparse(part) for part in node.body)


@pytest.mark.parametrize("package", [hippo, mixers, models, nn, linrec.export], ids=lambda p: p.__name__)
def test_calls_of_exported_modules_are_typed(package):
    kinds = [getattr(package, name) for name in package.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, torch.nn.Module)]
    for kind in kinds:
        ours = [base for base in kind.__mro__ if base.__module__.startswith("linrec.")]
        defined = [ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] for base in ours]
        assert any(map(typed_call, defined)) or kind.forward is torch.nn.Module.forward, kind


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
