"""What a recorded call tells, against loops and matrices made by hand."""

import pytest
import torch

from linrec import ops
from linrec.ops.core.call import recording
from linrec.ops.inspection import note, noting, token_mixing, transitions
from linrec.testing import (
    assert_agree,
    delta_rule_inputs,
    diagonal_ssm_inputs,
    gate_loop_inputs,
    generalized_delta_rule_inputs,
    long_conv_inputs,
    reset_mask,
    scan_inputs,
    selective_scan_inputs,
)

B, TIME = 2, 7
RESET = reset_mask(B, TIME, rate=0.3)


def recorded(function, inputs, **options):
    with recording() as calls:
        function(**inputs, **options)
    return calls[-1]


def test_transitions_of_scan():
    call = recorded(ops.scan, scan_inputs(B, TIME, 3))
    magnitude, phase = transitions(call)
    a = call.inputs.a
    assert_agree(magnitude, a.abs(), "magnitudes")
    assert (phase is None) == (not a.is_complex())
    constant = recorded(
        ops.scan, {"a": torch.tensor([0.5, 1j]), "x": torch.ones(B, TIME, 2, dtype=torch.complex64)}
    )
    magnitude, phase = transitions(constant)
    assert magnitude.tolist() == [0.5, 1.0] and phase.tolist() == [0.0, pytest.approx(torch.pi / 2)]


@pytest.mark.parametrize(
    ("decay", "phase"), [("bthk", "bthk"), ("bth", None), ("h", "hk"), (None, "h"), (None, None)]
)
def test_transitions_of_heads_are_those_of_key_channels(decay, phase):
    given = gate_loop_inputs(B, TIME, 2, 3, 4, log_decay=decay, phase=phase)
    found = transitions(recorded(ops.gate_loop, given))
    if decay is phase is None:
        assert found is None
        return
    magnitude, angle = found
    log_decay = torch.zeros(2) if decay is None else given["log_decay"]
    wide = log_decay if decay in ("bthk",) else log_decay[..., None].expand(*log_decay.shape, 3)
    expected = wide.exp().flatten(-2)
    assert_agree(magnitude, expected.to(magnitude), "magnitudes")
    assert (angle is None) == (phase is None)


def test_transitions_of_selective_scan():
    given = selective_scan_inputs(B, TIME, 3, 4)
    magnitude, phase = transitions(recorded(ops.selective_scan, given))
    expected = torch.exp(given["dt"][..., None] * given["A"]).flatten(2)
    assert_agree(magnitude, expected, "magnitudes")
    assert phase is None


def test_transitions_of_a_constant_system():
    given = diagonal_ssm_inputs(B, TIME, 3, 4)
    magnitude, phase = transitions(recorded(ops.diagonal_ssm, given))
    assert_agree(magnitude * torch.exp(1j * phase), given["a"].expand(3, 4).flatten(), "transitions")


def test_the_matrices_of_the_delta_rule_are_no_factors_of_channels():
    given = delta_rule_inputs(B, TIME, 2, 3, 4, log_decay="bth")
    assert transitions(recorded(ops.delta_rule, given)) is None
    given = generalized_delta_rule_inputs(B, TIME, 2, 3, 4)
    assert transitions(recorded(ops.generalized_delta_rule, given)) is None


def by_columns(function, inputs, reset):
    """|W| from the definition: the values of one step at a time are one, and all others zero."""
    columns = []
    for m in range(TIME):
        v = torch.zeros_like(inputs["v"][..., :1])
        v[:, m] = 1
        y, _ = function(**inputs | {"v": v}, state=None, reset=reset)
        columns.append(y[..., 0])
    return torch.stack(columns, -1).abs().mean(2)


@pytest.mark.parametrize(
    "name", ["gate_loop", "normalized_gate_loop", "delta_rule", "softmax_attention", "gate_loop_attention"]
)
def test_token_mixing_of_operators_with_values(name):
    function = getattr(ops, name)
    if name == "delta_rule":
        given = delta_rule_inputs(B, TIME, 2, 3, 4)
    else:
        given = gate_loop_inputs(B, TIME, 2, 3, 4)
    given = {key: x for key, x in given.items() if key != "state"}
    if name == "softmax_attention":
        given = {key: given[key].real for key in ("q", "k", "v")}
    found = token_mixing(recorded(function, given, reset=RESET))
    assert_agree(found, by_columns(function, given, RESET), "token mixing")


def test_weights_are_divided_as_outputs_are():
    given = {key: x for key, x in gate_loop_inputs(B, TIME, 2, 3, 4).items() if key != "state"}
    divisor = 1 + torch.rand(B, TIME, 2, 1)
    found = token_mixing(recorded(ops.gate_loop, given, reset=RESET), {"divisor": divisor})

    def divided(**inputs):
        y, state = ops.gate_loop(**inputs)
        return y / divisor, state

    assert_agree(found, by_columns(divided, given, RESET), "token mixing")


def test_a_gate_of_values_is_a_factor_of_columns():
    given, gate = gate_loop_inputs(B, TIME, 2, 3, 4) | {"state": None}, torch.rand(B, TIME, 2)
    call = recorded(ops.gate_loop, given, reset=RESET)
    expected = 0
    for h in (0, 1):
        head = {name: None if x is None else x[:, :, h : h + 1] for name, x in given.items()}
        expected += token_mixing(recorded(ops.gate_loop, head, reset=RESET)) * gate[:, None, :, h] / 2
    assert_agree(token_mixing(call, {"gate": gate}), expected, "token mixing")


def test_token_mixing_of_scan_is_the_gate_times_products():
    a, gate = torch.rand(B, TIME, 3), torch.rand(B, TIME, 3)
    call = recorded(ops.scan, {"a": a, "x": torch.randn(B, TIME, 3)}, reset=RESET)
    expected = torch.zeros(B, TIME, TIME)
    for b in range(B):
        for n in range(TIME):
            product = torch.ones(3)
            for m in range(n, -1, -1):
                expected[b, n, m] = (gate[b, m] * product).mean()
                product = torch.zeros(3) if RESET[b, m] else product * a[b, m]
    assert_agree(token_mixing(call, {"gate": gate}), expected, "token mixing")
    assert_agree(token_mixing(call, {"gate": 1j * gate}), expected, "token mixing of a complex gate")


@pytest.mark.parametrize("groups", [None, 2])
def test_token_mixing_of_selective_scan_is_what_impulses_become(groups):
    given = selective_scan_inputs(B, TIME, 4, 3, groups=groups) | {"D": None, "state": None}
    found = token_mixing(recorded(ops.selective_scan, given, reset=RESET))
    for m in range(TIME):
        impulse = torch.zeros_like(given["x"])
        impulse[:, m] = 1
        y, _ = ops.selective_scan(**given | {"x": impulse}, reset=RESET)
        assert_agree(found[:, :, m], y.abs().mean(2), "token mixing")


def test_token_mixing_of_filters_are_their_taps():
    given = long_conv_inputs(B, TIME, 3, TIME - 2)
    kernel = given["kernel"]
    found = token_mixing(recorded(ops.long_conv, {"u": given["u"], "kernel": kernel}, reset=RESET))
    document = RESET.cumsum(1)
    for b in range(B):
        for n in range(TIME):
            for m in range(TIME):
                seen = m <= n and document[b, n] == document[b, m] and n - m < kernel.shape[-1]
                expected = kernel[:, n - m].abs().mean() if seen else torch.zeros(())
                assert_agree(found[b, n, m], expected.to(found), "token mixing")


def test_token_mixing_of_a_system_is_the_mean_over_its_outputs():
    A, B, C = torch.diag(torch.tensor([0.5, -0.8])), torch.ones(2), torch.tensor([[1.0, 2.0], [0.0, -3.0]])
    call = recorded(ops.dense_ssm, {"u": torch.randn(2, TIME, 3), "A": A, "B": B, "C": C}, reset=RESET)
    kernel = torch.stack([C @ torch.matrix_power(A, lag) @ B for lag in range(TIME)]).abs().mean(1)
    document = RESET.cumsum(1)
    steps = torch.arange(TIME)
    lag = steps[:, None] - steps
    expected = kernel[lag.clamp(min=0)] * ((lag >= 0) & (document[:, :, None] == document[:, None]))
    assert_agree(token_mixing(call), expected, "token mixing")


def test_notes_are_kept_by_the_innermost_context_alone():
    note(gate=torch.zeros(1))
    with noting() as outer:
        note(gate=torch.ones(1))
        with noting() as inner:
            note(other=torch.ones(2))
    note(gate=torch.zeros(1))
    assert outer == {"gate": torch.ones(1)} and list(inner) == ["other"]


EMPTY = {
    "scan": ((3,), (2, 3)),
    "gate_loop": ((2, 3, 4), (2, 2, 3, 4)),
    "normalized_gate_loop": ((2, 3, 4), (2, 2, 3, 5)),
    "delta_rule": ((2, 3, 4), (2, 2, 3, 4)),
    "selective_scan": ((3, 4), (2, 3, 4)),
    "diagonal_ssm": ((3, 4), (2, 3, 4)),
    "short_conv": ((4, 3), (2, 3, 3)),
    "long_conv": ((0, 3), (2, 0, 3)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_states(name):
    sizes, shape = EMPTY[name]
    function = getattr(ops, name)
    state = function.empty_state(2, *sizes, dtype=torch.complex128, device="cpu")
    assert state.shape == shape and state.dtype == torch.complex128 and not state.any()
    assert function.empty_state(2, *sizes, device="meta").device.type == "meta"
    with pytest.raises(ValueError, match=rf"`sizes` of the state of `{name}` must be \(\w.*\); got"):
        function.empty_state(2, *sizes, 1)


def test_the_empty_state_of_attention_is_a_cache_of_no_steps():
    cache = ops.softmax_attention.empty_state(2, 3, 4, 5)
    assert cache.k.shape == (2, 0, 3, 4) and cache.v.shape == (2, 0, 3, 5) and cache.alive is None
    q, v = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 5)
    assert_agree(ops.softmax_attention(q, q, v, state=cache), ops.softmax_attention(q, q, v), "outputs")


def test_token_mixing_of_half_precision_is_computed_in_single_precision_and_batches_may_be_empty():
    given = diagonal_ssm_inputs(B, TIME, 3, 4) | {"state": None}
    exact = token_mixing(recorded(ops.diagonal_ssm, given))
    rounded = given | {"u": given["u"].bfloat16()}
    found = token_mixing(recorded(ops.diagonal_ssm, rounded))
    assert found.dtype == torch.float32
    assert_agree(found, exact.float(), "token mixing", dtype=torch.float32)
    assert token_mixing(recorded(ops.diagonal_ssm, given | {"u": given["u"][:0]})).shape == (0, TIME, TIME)
