"""Where the cases of a file of Triton kernels run: on a GPU, or on small shapes in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is imported. So that no other test gets it,
tests/test_interpreter.py runs the cases of such files in processes of their own.
"""

import os

import pytest
import torch

from linrec.testing import assert_agree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
PAIR = {"mode": "scan", "backend": "triton"}

# Triton 3.9 announces a default of 3.10
quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
on_either = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="runs on a GPU, or in the interpreter's process"
)

if INTERPRETED:
    from triton import language
    from triton.runtime import interpreter

    put_in_place = interpreter._patch_lang

    def put_in_place_once(function):
        """What `_patch_lang` does, unless its functions are there: finding them takes as long as they do."""
        seen = [x for x in function.__globals__.values() if x is language or x is language.core]
        if any(language.core.is_builtin(module.load) for module in seen):
            return put_in_place(function)

    interpreter._patch_lang = put_in_place_once


def on_views(operator):
    """Return the operator on views: q and k have a single head, that all share; v is a part of a tensor."""

    def run(*, q, k, v, **given):
        heads = q.shape[2]
        q, k = (x[:, :, :1].expand(-1, -1, heads, -1) for x in (q, k))
        wider = torch.cat([k.flatten(2), v.flatten(2)], -1)
        return operator(q, k, wider[..., -heads * v.shape[-1] :].unflatten(-1, (heads, -1)), **given)

    return run


def check_two_documents(operator, inputs, over_time, at, **options):
    """What `linrec.testing.check_isolation` looks at, for two documents: the interpreter takes its time."""
    given = {name: x for name, x in inputs.items() if x is not None}
    reset = torch.zeros(given[over_time[0]].shape[:2], dtype=torch.bool, device=DEVICE)
    reset[:, at] = True

    def outcome(spoilt=slice(0), of_outputs=False):
        leaves = {name: x.detach().clone() for name, x in given.items()}
        for name in () if of_outputs else over_time:
            leaves[name][:, spoilt] = torch.nan
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        y, _ = operator(**{**inputs, **leaves}, reset=reset, **options)
        cotangent = torch.ones_like(y)
        if of_outputs:
            cotangent[:, spoilt] = torch.nan
        return y, *torch.autograd.grad(y, [leaves[name] for name in over_time], cotangent)

    expected = outcome()
    for spoilt, other in ((slice(at), slice(at, None)), (slice(at, None), slice(at))):
        for of_outputs in (False, True):
            found = outcome(spoilt, of_outputs)
            assert_agree([x[:, other] for x in found], [x[:, other] for x in expected])
            assert not found[1][:, spoilt].isfinite().all()
        assert found[0].isfinite().all() and outcome(spoilt)[0][:, spoilt].isnan().any()


def on_a_gpu(test):
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test)
    )
