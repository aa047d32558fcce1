"""The layer of Qwen3-Next in transformers is our `gated_delta_net`, with weights in another order."""

import pytest
import torch

from linrec import mixers
from linrec.testing import generator

from .models import randomize

pytest.importorskip("transformers", reason='the extra "text" is not installed')
modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


def converted(theirs: torch.nn.Module) -> mixers.Mixer:
    """Our layer of the same function.

    | theirs | ours |
    |---|---|
    | rows of q, k, v and z together, for each head of keys; b and a too | a matrix each, heads in order |
    | a head of queries and keys for several heads of values | repeated for each |
    | taps with that of the current step last | that of the current step first |
    | q divided by sqrt(dk), then a norm with eps | the norm, with dk eps |
    | q and k divided by sqrt(|q|^2 + 1e-6) | by max(|q|, 1e-6), the same but for very small ones |
    """
    keys, values, dk, dv = theirs.num_k_heads, theirs.num_v_heads, theirs.head_k_dim, theirs.head_v_dim
    shared = values // keys

    def repeated(rows: torch.Tensor) -> torch.Tensor:
        """Rows of each key head, (keys, dk, ..), for every value head, one below the other."""
        return rows.repeat_interleave(shared, 0).flatten(0, 1)

    groups = theirs.in_proj_qkvz.weight.unflatten(0, (keys, -1))
    q, k, v, z = groups.split([dk, dk, shared * dv, shared * dv], 1)
    b, a = theirs.in_proj_ba.weight.unflatten(0, (keys, -1)).split([shared, shared], 1)
    taps = theirs.conv1d.weight[:, 0].flip(-1).split([keys * dk, keys * dk, values * dv])
    q_taps, k_taps = (repeated(part.unflatten(0, (keys, dk))) for part in taps[:2])
    ours = mixers.build(
        "gated_delta_net",
        theirs.hidden_size,
        n_heads=values,
        d_qk=values * dk,
        d_v=values * dv,
        conv_size=theirs.conv_kernel_size,
        norm_eps=theirs.layer_norm_epsilon * dk,
    )
    ours.load_state_dict(
        {
            "q.weight": repeated(q),
            "k.weight": repeated(k),
            "v.weight": v.flatten(0, 1),
            "gate.weight": z.flatten(0, 1),
            "conv.weight": torch.cat([q_taps, k_taps, taps[2]]),
            "beta.projection.weight": b.flatten(0, 1),
            "alpha.weight": a.flatten(0, 1),
            "A_log": theirs.A_log,
            "dt_bias": theirs.dt_bias,
            "norm.weight": theirs.norm.weight,
            "out.weight": theirs.out_proj.weight,
        }
    )
    return ours


@pytest.mark.parametrize(("keys", "values", "eps"), [(2, 2, 1e-6), (2, 6, 1e-2), (1, 3, 1e-6)])
def test_outputs_are_those_of_transformers(keys, values, eps):
    config = modeling.Qwen3NextConfig(
        hidden_size=12,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=4,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
        rms_norm_eps=eps,
        num_hidden_layers=4,
    )
    torch.manual_seed(0)
    theirs = modeling.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    randomize(theirs)
    ours = converted(theirs)
    # more than one of their chunks
    x = torch.randn(2, 70, 12, generator=generator())
    with torch.no_grad():
        expected = theirs(x)
        y, _ = ours(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        left, state = ours(x[:, :65])
        steps = [left]
        for step in x[:, 65:].split(1, dim=1):
            y, state = ours(step, state)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
