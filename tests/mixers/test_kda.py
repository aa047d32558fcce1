import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from linrec import mixers
from linrec.mixers.kda import KimiDeltaAttention
from linrec.nn import groups_of
from linrec.ops.core.call import recording
from linrec.testing import assert_agree, generator

D = 8


def make(d_model: int = D, **arguments) -> KimiDeltaAttention:
    torch.manual_seed(0)
    mixer = mixers.build("kda", d_model, **{"conv_size": None} | arguments)
    assert isinstance(mixer, KimiDeltaAttention)
    return mixer.double()


def inputs(time: int = 7) -> Tensor:
    return torch.randn(2, time, D, generator=generator(), dtype=torch.float64)


def written_out(mixer: KimiDeltaAttention, x: Tensor, reset: Tensor, log_alpha: Tensor) -> Tensor:
    """The file's equations, a head and a step after the other; `log_alpha` is (b, t, h, dk)."""
    h, shared = mixer.n_heads, mixer.n_heads // mixer.qk_heads
    q, k = (functional.silu(part(x)).unflatten(-1, (h // shared, -1)) for part in (mixer.q, mixer.k))
    q, k = (part / part.norm(dim=-1, keepdim=True) for part in (q, k))
    v = functional.silu(mixer.v(x)).unflatten(-1, (h, -1))
    beta = torch.sigmoid(x @ mixer.beta.projection.weight.T)
    y = torch.zeros(*x.shape[:2], h, v.shape[-1], dtype=x.dtype)
    for b in range(len(x)):
        for head in range(h):
            S = torch.zeros(q.shape[-1], v.shape[-1], dtype=x.dtype)
            for t in range(x.shape[1]):
                if reset[b, t]:
                    S = torch.zeros_like(S)
                key = k[b, t, head // shared]
                S = (torch.eye(len(key)) - beta[b, t, head] * torch.outer(key, key)) @ (
                    log_alpha[b, t, head].exp()[:, None] * S
                )
                S = S + beta[b, t, head] * torch.outer(key, v[b, t, head])
                o = S.T @ q[b, t, head // shared]
                y[b, t, head] = o / (o.square().mean() + 1e-5).sqrt() * mixer.norm.weight
    return mixer.out(torch.sigmoid(mixer.gate(x)) * y.flatten(-2))


@pytest.mark.parametrize("arguments", [{"n_heads": 2}, {"n_heads": 4, "qk_heads": 2, "d_qk": 6}])
@pytest.mark.parametrize("decay", ["softplus", "bounded"])
def test_the_layer_is_its_equations(arguments, decay):
    mixer, x = make(decay=decay, **arguments), inputs()
    with torch.no_grad():
        mixer.norm.weight.uniform_(0.5, 2)
        mixer.A_log.uniform_(-1, 1)
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    made = (x @ mixer.alpha[0].weight.T @ mixer.alpha[1].weight.T + mixer.dt_bias).unflatten(
        -1, (mixer.n_heads, -1)
    )
    A = mixer.A_log.exp()[:, None]
    log_alpha = -A * torch.log(1 + made.exp()) if decay == "softplus" else -5 * torch.sigmoid(A * made)
    assert_agree(mixer(x, reset=reset)[0], written_out(mixer, x, reset, log_alpha))


@pytest.mark.parametrize("time", [1, 70])
def test_outputs_are_those_of_transformers(time):
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = modeling.KimiLinearConfig(
        hidden_size=12,
        linear_num_heads=2,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        num_hidden_layers=4,
    )
    torch.manual_seed(0)
    theirs = modeling.KimiLinearDeltaAttention(config, layer_idx=0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator(parameter.numel())))
    ours = mixers.build("kda", 12, n_heads=2, d_v=16, qk_eps=1e-6, norm_eps=8e-5, gate_bias=False)
    given = dict(theirs.named_parameters())
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "b_proj": "beta.projection", "o_norm": "norm"}
    names |= {"o_proj": "out", "g_a_proj": "gate.0", "g_b_proj": "gate.1"}
    names |= {"forget_gate.f_a_proj": "alpha.0", "forget_gate.f_b_proj": "alpha.1"}
    weights = {f"{mine}.weight": given[f"{theirs}.weight"] for theirs, mine in names.items()}
    weights["conv.weight"] = given["conv1d.weight"][:, 0].flip(-1)
    weights["A_log"], weights["dt_bias"] = given["forget_gate.A_log"].flatten(), given["forget_gate.dt_bias"]
    ours.load_state_dict(weights)
    x = torch.randn(2, time, 12, generator=generator())
    with torch.no_grad():
        expected = theirs(x)
        torch.testing.assert_close(ours(x)[0], expected, rtol=2e-5, atol=2e-5)
        steps, state = [], None
        for step in x.split(1, dim=1):
            y, state = ours(step, state)
            steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=2e-5, atol=2e-5)
    assert expected.std() > 0.1


def test_token_mixing_is_the_mean_over_heads_of_products_of_transitions():
    # o_n = sum_m beta_m (k_m^T A_{m+1} .. A_n q_n) v_m with A_j = Diag(alpha_j) (I - beta_j k_j k_j^T)
    mixer, x = make(n_heads=2), inputs()
    with torch.no_grad():
        # decays as drawn are alike
        mixer.alpha[1].weight *= 10
    reset = torch.zeros(2, 7, dtype=torch.bool)
    reset[1, 3] = True
    with recording() as calls:
        mixer(x)
    q, k, _, beta, log_alpha = calls[-1].inputs[:5]
    expected = torch.zeros(2, 7, 7, dtype=torch.float64)
    for b, h, n in itertools.product(range(2), range(2), range(7)):
        reached = q[b, n, h]
        for m in range(n, -1, -1):
            written = beta[b, m, h] * k[b, m, h] @ reached
            expected[b, n, m] += written.abs() / 2
            if reset[b, m]:
                break
            reached = log_alpha[b, m, h].exp() * (reached - written * k[b, m, h])
    assert_agree(mixer.token_mixing(x, reset=reset), expected)
    assert mixer.transitions(x) is None


@pytest.mark.parametrize("decay", ["softplus", "bounded"])
def test_decays_stay_in_float32(decay):
    mixer, x, found = make(n_heads=2, decay=decay), inputs().bfloat16(), {}
    with torch.no_grad():
        # without rounding in the first matrix, which is in bfloat16 as other layers are
        mixer.alpha[0].weight.copy_(torch.eye(4, D))
    for dtype in (torch.float64, torch.float32):
        with recording() as calls, torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            mixer.to(dtype)(x.to(dtype))
        found[dtype] = calls[-1].inputs.log_decay
    assert found[torch.float32].dtype == torch.float32
    assert_agree(found[torch.float32], found[torch.float64])


def test_parameters_of_the_published_model():
    # 32 heads of 128 channels in a width of 2304
    with torch.device("meta"):
        mixer = mixers.build("kda", 2304, n_heads=32, d_v=4096, gate_bias=False)
    projections = 4 * 2304 * 4096
    low_rank = 2 * (2304 * 128 + 128 * 4096)
    others = 2304 * 32 + 3 * 4096 * 4 + 32 + 4096 + 128
    assert sum(parameter.numel() for parameter in mixer.parameters()) == projections + low_rank + others


@pytest.mark.parametrize(("beta", "scale"), [("sigmoid", 1), ("double_sigmoid", 2)])
def test_strengths_and_decays_have_their_bounds(beta, scale):
    mixer, x = make(n_heads=2, beta=beta, decay="bounded", lower_bound=-3.0, rank=3), inputs()
    with torch.no_grad():
        mixer.A_log.uniform_(-1, 1)
    with recording() as calls:
        mixer(x)
    given = calls[-1].inputs
    assert_agree(given.beta, scale * torch.sigmoid(x @ mixer.beta.projection.weight.T))
    made = (x @ mixer.alpha[0].weight.T @ mixer.alpha[1].weight.T + mixer.dt_bias).unflatten(-1, (2, -1))
    assert_agree(given.log_decay, -3 * torch.sigmoid(mixer.A_log.exp()[:, None] * made))


def test_rank_is_of_both_products():
    mixer = make(n_heads=2, rank=3)
    assert [tuple(part.weight.shape) for part in (*mixer.alpha, *mixer.gate)] == [(3, D), (D, 3)] * 2
    assert make(n_heads=2).alpha[0].weight.shape == (4, D)


def test_decays_start_as_in_the_released_code():
    mixer = make(2048, n_heads=512)
    A, dt = mixer.A_log.exp(), functional.softplus(mixer.dt_bias)
    assert 1 <= A.min() < 1.2 and 15.8 < A.max() <= 16
    assert abs(A.mean() - 8.5) < 4 * 15 / math.sqrt(12 * 512)
    assert 0.00099 < dt.min() < 0.00105 and 0.095 < dt.max() < 0.101
    assert abs(dt.log10().mean() + 2) < 4 * 2 / math.sqrt(12 * 2048)
    assert (make(decay="bounded", n_heads=4).A_log == 0).all()
    groups = groups_of(mixer)
    assert {name for name, group in groups.items() if not group.weight_decay} >= {"A_log", "dt_bias"}


def test_heads_have_at_least_128_channels():
    assert [make(width).n_heads for width in (64, 256, 384, 1024)] == [1, 2, 3, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"decay": "none"}, "decay"),
        ({"lower_bound": 1.0}, "`lower_bound` must be below 0, the least log alpha; got 1.0"),
        ({"n_heads": 3}, "`d_v`"),
        ({"n_heads": 4, "qk_heads": 3}, "`qk_heads`"),
        ({"rank": 0}, "`rank` must be at least 1"),
        ({"norm_eps": 0.0}, "`norm_eps`"),
    ],
)
def test_argument_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)
