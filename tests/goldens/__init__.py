"""Outputs, states, gradients and what inspection shows, of every operator and mixer, as two numbers a tensor.

They guard changes of structure, after which everything must stay as it is. Where a result is to change, make
them again and say in the commit message what changed and why:

    python -m tests.goldens
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linrec import mixers, ops
from linrec.lab.train import LoopConfig, OptimConfig
from linrec.lab.train.recipes import get_recipe, recipe_names
from linrec.models import MemoryConfig, ModelConfig
from linrec.ops.core.backends import pairs
from linrec.testing import differentiable, generator, map_tree, reset_mask
from tests.mixers import variants
from tests.test_laws import OPERATORS, canonical_case

FOLDER = Path(__file__).parent
VERSION = ".".join(torch.__version__.split(".")[:2])
TIME, D_MODEL = 33, 8

Numbers = dict[str, list[list[float]]]


def digest(tree: Any) -> list[list[float]]:
    """Mean magnitude and a weighted mean of every tensor of a tree, its leaves in order."""
    found: list[list[float]] = []

    def add(tensor: Tensor) -> Tensor:
        x = tensor.detach()
        x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double().flatten()
        weights = torch.cos(torch.arange(len(x), dtype=torch.float64))
        means = (x.abs().mean(), (x * weights).mean()) if len(x) else (0.0, 0.0)
        found.append([float(f"{float(mean):.9g}") for mean in means])
        return tensor

    map_tree(add, tree)
    return found


def differences(found: Numbers, expected: Numbers) -> list[str]:
    """Names of the results that differ by more than rounding in single precision."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [name for name in found if not _close(found[name], expected[name])]


def _close(found: list[list[float]], expected: list[list[float]]) -> bool:
    pairs = list(zip(found, expected, strict=False))
    return len(found) == len(expected) and all(
        abs(mine - other) <= 2e-4 * magnitude + 1e-7
        for (size, mean), (magnitude, weighted) in pairs
        for mine, other in ((size, magnitude), (mean, weighted))
    )


def operator_cases() -> Iterator[tuple[str, str, str, str]]:
    """(operator, case, mode, backend) of everything that runs on the CPU."""
    for name, operator in OPERATORS.items():
        for case in operator.cases:
            given, backends = canonical_case(name, case), operator.function.operator.backends
            for mode, backend in pairs([entry for entry in backends if entry.accepts(given)]):
                if backend != "triton":
                    yield name, case, mode, backend


def of_operator(name: str, case: str, mode: str, backend: str) -> Numbers:
    """Digests of y, the state and every gradient of one operator, with a reset."""
    operator = OPERATORS[name]
    inputs = differentiable(operator.inputs(TIME, seed=5, **operator.cases[case]))
    options = {"reset": reset_mask(2, TIME, rate=0.1), "mode": mode, "backend": backend}
    y, state = operator.function(**inputs, **options, **operator.always)
    return {"y": digest(y), "state": digest(state), "gradients": digest(_gradients((y, state), inputs))}


def of_parameters(name: str, variant: str) -> dict[str, str]:
    """Names of a mixer's parameters and buffers, as in `state_dict`, with their shapes and dtypes."""
    mixer = mixers.build(name, D_MODEL, **variants.arguments(name, variant))
    return {
        key: f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" for key, x in mixer.state_dict().items()
    }


def of_defaults() -> dict[str, Any]:
    """Default arguments of mixers, operators and configurations, and what recipes have in their place."""
    functions: dict[str, Any] = {name: mixers.get(name) for name in mixers.names()}
    functions |= {name: function for name, function in vars(ops).items() if hasattr(function, "operator")}
    functions |= {config.__name__: config for config in (ModelConfig, MemoryConfig, LoopConfig, OptimConfig)}
    found: dict[str, Any] = {name: _defaults(function) for name, function in functions.items()}
    return found | {f"recipe {name}": _changed(get_recipe(name)) for name in recipe_names()}


def _defaults(function: Any) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: repr(p.default) for p in parameters if p.default is not inspect.Parameter.empty}


def _changed(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that do not have their defaults."""
    found = {}
    for field in dataclasses.fields(config):
        value, made = getattr(config, field.name), field.default_factory
        if field.name == "mixer_args" and isinstance(config.mixer, str):
            # configurations are filled with the defaults of the mixer
            defaults = _defaults(mixers.get(config.mixer))
            value = {name: x for name, x in value.items() if repr(x) != defaults[name]}
        if value != (field.default if made is dataclasses.MISSING else made()):
            found[field.name] = _changed(value) if dataclasses.is_dataclass(value) else repr(value)
    return found


def of_mixer(name: str, variant: str) -> Numbers:
    """Digests of a mixer: outputs, states, gradients, parameters as drawn, and what inspection shows."""
    torch.manual_seed(0)
    mixer = mixers.build(name, D_MODEL, **variants.arguments(name, variant))
    x = torch.randn(2, TIME, D_MODEL, generator=generator(3)).requires_grad_()
    y, state = mixer(x, reset=reset_mask(2, TIME, rate=0.1))
    following, last = mixer(x, state)
    numbers = {
        "parameters": digest(dict(mixer.state_dict())),
        "y": digest(y),
        "state": digest(state),
        "following": digest((following, last)),
        "gradients": digest(_gradients((y, following, last), (x, list(mixer.parameters())))),
    }
    shown = {"transitions": mixer.transitions, "token_mixing": mixer.token_mixing}
    with torch.no_grad():
        for what, function in shown.items():
            result = function(x)
            numbers[what] = [] if result is None else digest(result)
    return numbers


def _gradients(results: Any, inputs: Any) -> list[Tensor]:
    wanted: list[Tensor] = []
    outputs: list[Tensor] = []
    map_tree(lambda x: wanted.append(x) if x.requires_grad else None, inputs)
    map_tree(lambda x: outputs.append(x) if x.requires_grad else None, results)
    weights = [torch.cos(torch.arange(x.numel())).reshape(x.shape).to(x.dtype) for x in outputs]
    return list(torch.autograd.grad(outputs, wanted, weights, materialize_grads=True))


def path(kind: str) -> Path:
    """The file of "operators", "mixers", "parameters" or "defaults"."""
    return FOLDER / f"{kind}.json"


def write() -> None:
    """Make all files again, but for results that differ by rounding alone."""
    made: dict[str, dict[str, Any]] = {
        "defaults": of_defaults(),
        "parameters": {" | ".join(case): of_parameters(*case) for case in variants.cases()},
        "operators": {" | ".join(case): of_operator(*case) for case in operator_cases()},
        "mixers": {" | ".join(case): of_mixer(*case) for case in variants.cases()},
    }
    for kind, numbers in made.items():
        before = json.loads(path(kind).read_text())
        for name, found in numbers.items():
            if kind in ("operators", "mixers") and name in before and not differences(found, before[name]):
                numbers[name] = before[name]
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in numbers.items()]
        path(kind).write_text(f'{{"torch": "{VERSION}",\n' + ",\n".join(lines) + "}\n")


def read(kind: str) -> dict[str, Any]:
    """The results of a file, by case, and the version of torch that made them."""
    numbers: dict[str, Any] = json.loads(path(kind).read_text())
    if kind in ("parameters", "defaults"):
        return numbers
    bad = [name for name, value in numbers.items() if name != "torch" and not _finite(value)]
    assert not bad, bad
    return numbers


def _finite(numbers: Numbers) -> bool:
    return all(math.isfinite(x) for values in numbers.values() for pair in values for x in pair)
