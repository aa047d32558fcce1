"""The laws hold for a mixer that is right, and each is able to fail: one broken mixer per way to break it."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from linrec import testing
from linrec.mixers import Mixer
from linrec.ops import scan
from linrec.testing import assert_agree, check_mixer, generator, scan_inputs, tolerance
from tests.tiers import thorough


class Decay(Mixer):
    """h_n = decay h_{n-1} + weight x_n, one channel at a time: the smallest mixer that is right."""

    def __init__(self, d_model: int = 3) -> None:
        super().__init__(d_model)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, d_model))
        self.decay = nn.Parameter(torch.linspace(0.5, 0.95, d_model))

    def forward(self, x: Tensor, state: Tensor | None = None, *, reset: Tensor | None = None):
        self.check_input(x)
        h, outputs = self.init_state(len(x)) if state is None else state, []
        for n in range(x.shape[1]):
            if reset is not None:
                h = torch.where(reset[:, n, None], 0.0, h)
            h = self.decay * h + self.weight * x[:, n]
            outputs.append(h.to(x.dtype))
        return torch.stack(outputs, 1) if outputs else x, h

    def init_state(self, batch: int, *, device=None) -> Tensor:
        return torch.zeros(batch, self.d_model, **self.factory_kwargs(device))

    @property
    def state_size(self) -> int:
        return self.d_model


class LooksAhead(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y + 1e-3 * torch.cat([x[:, 1:], x[:, :1] * 0], 1), state


class DropsState(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x, None, reset=reset)


class StateIsOneStepLate(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, last = super().forward(x, state, reset=reset)
        return y, super().forward(x[:, :-1], state)[1] if x.shape[1] > 1 else last


class DetachesState(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y, state.detach()


class MixesRows(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x - x.mean(0, keepdim=True), state, reset=reset)


class MixesRowsOfTheState(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y, state.roll(1, 0)


class IgnoresReset(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x, state)


class ResetsOneStepLate(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x, state, reset=None if reset is None else reset.roll(1, 1))


class KeepsTheGivenStateThroughReset(Decay):
    def forward(self, x, state=None, *, reset=None):
        if reset is not None:
            reset = torch.cat([torch.zeros_like(reset[:, :1]), reset[:, 1:]], 1)
        return super().forward(x, state, reset=reset)


class ResetsEveryRow(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x, state, reset=None if reset is None else reset.any(0).expand_as(reset))


class ResetsByAProduct(Decay):
    def forward(self, x, state=None, *, reset=None):
        h, outputs = self.init_state(len(x)) if state is None else state, []
        for n in range(x.shape[1]):
            link = self.decay if reset is None else self.decay * ~reset[:, n, None]
            h = link * h + self.weight * x[:, n]
            outputs.append(h.to(x.dtype))
        return torch.stack(outputs, 1) if outputs else x, h


class _AddsZeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx + 0 * dx.sum(1, keepdim=True)


class MixesGradientsOfDocuments(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return _AddsZeros.apply(y), state


class HidesNaN(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x.nan_to_num(), state, reset=reset)


class DiffersWhenCompiled(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return (y * 1.01 if torch.compiler.is_compiling() else y), state


class Explodes(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y * torch.exp(0.1 * torch.arange(x.shape[1], dtype=x.dtype))[:, None], state


class HasNoGradientAtZero(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x.clamp(min=0).sqrt(), state, reset=reset)


class HidesItsWeight(Decay):
    def __init__(self):
        super().__init__()
        weight = self.weight.detach()
        del self.weight
        self.weight = weight


class ReadsNoWeights(Decay):
    def forward(self, x, state=None, *, reset=None):
        state = self.init_state(len(x)) if state is None else state
        sums = torch.cat([state[:, None], x], 1).cumsum(1)
        return sums[:, 1:], sums[:, -1]


class MiscountsItsState(Decay):
    state_size = 4


class Segmented(Decay):
    """A state that a boundary after every second step empties; the position is a second element."""

    segment_length = 2
    state_size = 4

    def forward(self, x, state=None, *, reset=None):
        state = self.init_state(len(x)) if state is None else state
        h, position = state
        outputs = []
        for n in range(x.shape[1]):
            if reset is not None:
                h = h.masked_fill(reset[:, n, None], 0)
            h = self.decay * h + self.weight * x[:, n]
            outputs.append(h.to(x.dtype))
            position = position + 1
            h = h.masked_fill(position % 2 == 0, 0)
        return torch.stack(outputs, 1) if outputs else x, (h, position)

    def init_state(self, batch, *, device=None, position=0):
        h = super().init_state(batch, device=device)
        return h, torch.full((batch, 1), position, device=h.device)


class StartsSegmentsAtResets(Segmented):
    def forward(self, x, state=None, *, reset=None):
        h, position = self.init_state(len(x)) if state is None else state
        if reset is None or x.shape[1] == 0:
            return super().forward(x, (h, position))
        outputs = []
        for n in range(x.shape[1]):
            position = position.masked_fill(reset[:, n, None], 0)
            now = slice(n, n + 1)
            y, (h, position) = super().forward(x[:, now], (h, position), reset=reset[:, now])
            outputs.append(y)
        return torch.cat(outputs, 1), (h, position)


class MiscountsItsSegments(Segmented):
    state_size = 3


class GrowsBeyondItsSegments(Segmented):
    state_size = 5

    def forward(self, x, state=None, *, reset=None):
        h, position, steps = self.init_state(len(x)) if state is None else state
        y, (h, position) = super().forward(x, (h, position), reset=reset)
        kept = min(1, steps.shape[1] + x.shape[1])
        return y, (h, position, steps.new_zeros(len(x), kept))

    def init_state(self, batch, *, device=None, position=0):
        h, position = super().init_state(batch, device=device, position=position)
        return h, position, h.new_zeros(batch, 0)


class Timed(Mixer):
    """h_t = decay^dt_t h_{t-1} + x_t."""

    takes_dt = True

    def __init__(self, d_model: int = 3) -> None:
        super().__init__(d_model)
        self.decay = nn.Parameter(torch.linspace(0.5, 0.95, d_model))

    def mix(self, x, state, reset, dt=None):
        decay = self.decay.to(self.state_dtype)
        a = decay.expand(x.shape) if dt is None else decay ** dt.to(decay.dtype)[..., None]
        return scan(a, x, state=state, reset=reset)

    def init_state(self, batch: int, *, device=None) -> Tensor:
        return scan.empty_state(batch, self.d_model, **self.factory_kwargs(device))


class CountsTimeFromTheFirstStep(Timed):
    def mix(self, x, state, reset, dt=None):
        return super().mix(x, state, reset, None if dt is None else dt.cumsum(1))


class TakesTimesOfTheFirstRow(Timed):
    def mix(self, x, state, reset, dt=None):
        return super().mix(x, state, reset, None if dt is None else dt[:1].expand_as(dt))


class HasAnotherUnit(Timed):
    def mix(self, x, state, reset, dt=None):
        return super().mix(x, state, reset, None if dt is None else 2 * dt)


class LooksAtTheNextTime(Timed):
    def mix(self, x, state, reset, dt=None):
        return super().mix(x, state, reset, None if dt is None else dt.roll(-1, dims=1))


class StartsElsewhere(Decay):
    def init_state(self, batch, *, device=None):
        return torch.ones(batch, self.d_model)

    def forward(self, x, state=None, *, reset=None):
        state = torch.zeros(len(x), self.d_model) if state is None else state
        return super().forward(x, state, reset=reset)


class ForgetsWithoutSteps(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x, state if x.shape[1] else None, reset=reset)


class ReadsRawMemory(Decay):
    def forward(self, x, state=None, *, reset=None):
        strides = torch.empty(x.shape, device="meta").stride()
        return super().forward(x.as_strided(x.shape, strides), state, reset=reset)


class RoundsItsPhase(Decay):
    def forward(self, x, state=None, *, reset=None):
        angle = 100 * x.bfloat16() if torch.is_autocast_enabled("cpu") else 100 * x
        return super().forward(torch.cos(angle.to(x.dtype)), state, reset=reset)


class Centred(Decay):
    """Sees the next step, as convolutions with symmetric padding do."""

    def forward(self, x, state=None, *, reset=None):
        return nn.functional.pad(self.weight * x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1), None

    def init_state(self, batch, *, device=None):
        return None

    @property
    def state_size(self):
        return 0


class NormalisesOverTimeInTraining(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x / x.abs().amax(1, keepdim=True) if self.training else x, state, reset=reset)


class OfWidthOne(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y[..., :1], state


class LosesAStep(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y[:, 1:], state


class Rounds(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y.bfloat16(), state


class ReturnsNoState(Decay):
    def forward(self, x, state=None, *, reset=None):
        return super().forward(x, state, reset=reset)[0]


class TakesNoState(Decay):
    def forward(self, x):
        return self.weight * x, None


class TakesNoReset(Decay):
    forward = Mixer.forward

    def mix(self, x, state):
        return self.weight * x, None


class _Holds(Decay):
    part = None

    def forward(self, x, state=None, *, reset=None):
        state = self.init_state(len(x)) if state is None else state
        y, h = super().forward(x, state[0], reset=reset)
        return y, (h, self.part)

    def init_state(self, batch, *, device=None):
        return super().init_state(batch, device=device), self.part


class HoldsAnInteger(_Holds):
    part = 3


class HoldsAList(_Holds):
    part = [0]  # noqa: RUF012


class HoldsAWord(_Holds):
    part = "h"


class LosesAPartOfTheState(_Holds):
    part = torch.zeros(2, 1)

    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        return y, (state[0], None)


class HasAnotherState(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, h = super().forward(x, None if state is None else state[:, 0], reset=reset)
        return y, h[:, None]


class RemembersTheLastCall(Decay):
    last = 0.0

    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        y, self.last = y + self.last, y.detach().mean()
        return y, state


class WritesToItsBuffer(Decay):
    def forward(self, x, state=None, *, reset=None):
        y, state = super().forward(x, state, reset=reset)
        vars(self).setdefault("buffer", torch.zeros_like(y.detach())).copy_(y.detach())
        return y.detach().set_(self.buffer), state


class Pointwise(Mixer):
    """Sees a step alone: causal, without a state."""

    def __init__(self, d_model: int = 3) -> None:
        super().__init__(d_model)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, d_model))

    def mix(self, x, state, reset):
        return self.weight.to(x.dtype) * x, None

    def init_state(self, batch, *, device=None):
        return None


def inputs(time: int = 9) -> Tensor:
    return torch.randn(3, time, 3, generator=generator())


def test_a_right_mixer_passes_every_law():
    check_mixer(Decay(), time=9, long=500, compiler="aot_eager")
    check_mixer(Decay().double(), time=9, long=2, compiler=None)


@pytest.mark.parametrize(
    ("broken", "law", "message"),
    [
        (LooksAhead, testing.check_causality, "outputs before step 1"),
        (DropsState, testing.check_split, "two segments, split at 1, against one pass"),
        (DropsState, testing.check_steps, "one step at a time"),
        (StateIsOneStepLate, testing.check_split, "two segments"),
        (DetachesState, testing.check_split, "gradients of two segments"),
        (MixesRows, testing.check_batch_independence, "batch row 0 alone"),
        (MixesRowsOfTheState, testing.check_batch_independence, "state of batch row 0"),
        (IgnoresReset, testing.check_reset, "against separate segments"),
        (ResetsOneStepLate, testing.check_reset, "against separate segments"),
        (KeepsTheGivenStateThroughReset, testing.check_reset, "with resets at [0] against separate segments"),
        (ResetsEveryRow, testing.check_reset, "against separate segments"),
        (ResetsByAProduct, testing.check_isolation, "outputs of other documents with nan in the inputs"),
        (MixesGradientsOfDocuments, testing.check_isolation, "NaN in the gradients of document 0"),
        (HidesNaN, testing.check_isolation, "outputs are finite with nan in the inputs of document 0"),
        (HidesItsWeight, testing.check_state_dict, "after loading"),
        (ReadsNoWeights, testing.check_state_dict, "do not depend on the weights"),
        (MiscountsItsState, testing.check_init_state, "holds 3.0 elements per sequence; `state_size` is 4"),
        (
            MiscountsItsSegments,
            testing.check_init_state,
            "holds 4.0 elements per sequence; `state_size` is 3",
        ),
        (GrowsBeyondItsSegments, testing.check_init_state, "after a boundary the state holds"),
        (StartsSegmentsAtResets, testing.check_reset, "against separate segments"),
        (CountsTimeFromTheFirstStep, testing.check_times, "two segments, split at 1, against one pass"),
        (LooksAtTheNextTime, testing.check_times, "two segments, split at 1, against one pass"),
        (TakesTimesOfTheFirstRow, testing.check_times, "batch row 1 alone"),
        (HasAnotherUnit, testing.check_times, "outputs with `dt` of 1 everywhere"),
        (StartsElsewhere, testing.check_init_state, "outputs from `init_state`"),
        (ForgetsWithoutSteps, testing.check_empty, "state after zero steps"),
        (ReadsRawMemory, testing.check_layout, "strided inputs"),
        (RoundsItsPhase, testing.check_autocast, "under autocast"),
    ],
)
def test_a_broken_mixer_fails_its_law(broken, law, message):
    with pytest.raises(AssertionError) as error:
        law(broken(), inputs())
    assert message in str(error.value)
    with pytest.raises(AssertionError):
        check_mixer(broken(), time=9, long=2, compiler=None)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Centred, "causality: outputs before step 1"),
        (LooksAhead, "causality: outputs before step 1"),
        (NormalisesOverTimeInTraining, "causality in training: outputs before step 1"),
        (OfWidthOne, r"outputs: y of OfWidthOne must have the shape of `x`, (2, 9, 3); got (2, 9, 1)"),
        (LosesAStep, r"outputs: y of LosesAStep must have the shape of `x`, (2, 9, 3); got (2, 8, 3)"),
        (Rounds, "outputs: y of Rounds must have the dtype of `x`, torch.float32; got torch.bfloat16"),
        (ReturnsNoState, "outputs: ReturnsNoState must return (y, state), y a tensor; got a tensor"),
        (TakesNoState, "or `forward(x, state=None, *, reset=None)`; too many positional arguments"),
        (TakesNoReset, "outputs: TakesNoReset must define `mix(x, state, reset)` or"),
        (
            HoldsAnInteger,
            "the state of HoldsAnInteger must be a tensor, None, or a tuple of such; got (tensor",
        ),
        (HoldsAList, "the state of HoldsAList must be a tensor, None, or a tuple of such; got (tensor"),
        (HoldsAWord, "the state of HoldsAWord must be a tensor, None, or a tuple of such; got (tensor"),
        (LosesAPartOfTheState, "must have the shapes of `init_state`, "),
        (HasAnotherState, "must have the shapes of `init_state`, "),
        (RemembersTheLastCall, "after a call with other inputs, against those before it"),
        (WritesToItsBuffer, "after a later call, which must not change them"),
        (MixesRows, "independent batch rows: batch row 0 alone"),
        (DropsState, "splits: two segments, split at 1"),
    ],
)
def test_a_promise_that_training_relies_on_is_checked(broken, message):
    with pytest.raises(AssertionError) as error:
        testing.check_promises(broken())
    assert message in str(error.value)
    with pytest.raises(AssertionError):
        testing.check_mixer(broken(), time=9, long=2, compiler=None)


def test_mixers_that_say_that_they_see_later_steps_are_not_asked_for_causality():
    class Encoder(Centred):
        is_causal = False

    testing.check_promises(Encoder())
    assert not Encoder().is_causal and Pointwise().is_causal


def test_a_causal_mixer_may_have_no_state():
    testing.check_promises(Pointwise())
    check_mixer(Pointwise(), time=9, long=2, compiler=None)


def test_a_mixer_with_irregular_steps_obeys_the_laws():
    check_mixer(Timed(), time=9, long=2, compiler=None)


def test_a_mixer_with_segments_obeys_the_laws():
    check_mixer(Segmented(), time=9, long=2, compiler=None)


def test_resets_of_the_callers_choice():
    reset = torch.zeros(3, 9, dtype=torch.bool)
    testing.check_reset(IgnoresReset(), inputs(), reset=reset)
    reset[1, 4] = True
    with pytest.raises(AssertionError, match=r"batch row 1 with resets at \[4\]"):
        testing.check_reset(IgnoresReset(), inputs(), reset=reset)


@thorough
def test_compiled_code_that_differs_fails():
    with pytest.raises(AssertionError, match="compiled outputs"):
        testing.check_compile(DiffersWhenCompiled(), inputs(), compiler="aot_eager")


@pytest.mark.parametrize(("broken", "what"), [(Explodes, "outputs"), (HasNoGradientAtZero, "gradients")])
def test_what_is_not_finite_is_unstable(broken, what):
    x = inputs(2000)
    x[:, 0] = 0
    with pytest.raises(AssertionError, match=f"elements of the {what} are not finite"):
        testing.check_stability(broken(), x)


def test_wrong_operators_fail_law_1():
    arguments = {"mode": "scan", "backend": "torch", "dtype": torch.float32}
    given = scan_inputs(2, 9, 3)

    def off(**kwargs):
        y, state = scan(**kwargs)
        return (y if kwargs["backend"] == "reference" else y + 1e-2), state

    def cut_gradient(*, state, **kwargs):
        return scan(state=state if kwargs["backend"] == "reference" else state.detach(), **kwargs)

    def wrong_state(**kwargs):
        y, state = scan(**kwargs)
        return y, state if kwargs["backend"] == "reference" else y[:, 0]

    testing.check_operator(scan, given, **arguments)
    for wrong, what in ((off, "y"), (cut_gradient, "gradient of state"), (wrong_state, "state")):
        with pytest.raises(AssertionError, match=rf"\('scan', 'torch'\): {what}"):
            testing.check_operator(wrong, given, **arguments)


def test_an_operator_that_returns_other_strides_than_it_says_fails_law_1():
    library = torch.library.Library("linrec", "FRAGMENT")
    library.define("padded_for_this_test(Tensor x) -> Tensor")
    library.impl(
        "padded_for_this_test",
        lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
        "CompositeExplicitAutograd",
    )
    padded = torch.ops.linrec.padded_for_this_test.default

    @torch.library.register_fake(padded)
    def _(x):
        return torch.empty_like(x)

    def through(*, x, **arguments):
        y, state = scan(x=x, **arguments)
        return y, padded(state[:, None]).detach()

    def layouts(name):
        return rf"{name}.*says .*\(2, 4, 3\), \[12, 3, 1\].*returned .*\(2, 4, 3\), \[24, 3, 1\]"

    with testing.CheckFakeKernels(), pytest.raises(AssertionError, match=layouts("padded_for_this_test")):
        padded(torch.ones(2, 4, 3))
    with pytest.raises(AssertionError, match="padded_for_this_test"):
        testing.check_operator(
            through, scan_inputs(2, 9, 3), mode="recurrent", backend="numba", dtype=torch.float32
        )


def test_tolerances_are_of_assert_close_and_grow_with_the_rounding():
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    for dtype, coarser in pairwise(dtypes):
        assert tolerance(dtype)["rtol"] < tolerance(coarser)["rtol"]
        # several roundings fit, a lost digit does not
        assert 4 * torch.finfo(dtype).eps <= tolerance(dtype)["rtol"]
    assert tolerance(torch.complex128) == tolerance(torch.float64)
    torch.testing.assert_close(torch.tensor(1.0), torch.tensor(1.00005), **tolerance(torch.float32))


def test_agreement_is_scaled_by_the_largest_value_and_never_by_inf_or_nan():
    big = torch.tensor([1e6, 0.0])
    assert_agree(big + torch.tensor([0.0, 1.0]), big)
    for wrong in (
        torch.tensor([1e6, 100.0]),
        torch.tensor([1e6, torch.nan]),
        torch.tensor([[1e6, 0.0]]),
        torch.tensor([1e6, 0.0], dtype=torch.complex64),
    ):
        with pytest.raises(AssertionError):
            assert_agree(wrong, big)
    with pytest.raises(AssertionError):
        assert_agree(torch.tensor([5.0, 1.0]), torch.tensor([torch.inf, 1.0]))
    with pytest.raises(AssertionError):
        assert_agree(torch.tensor([torch.inf, 2.0]), torch.tensor([torch.inf, 1.0]))
    with pytest.raises(AssertionError, match="the thing: 1 tensors, expected 2"):
        assert_agree(big, (big, big), "the thing")


def test_inputs_do_not_depend_on_the_global_random_state():
    for make in (
        lambda: scan_inputs(2, 3, 4, dtype=torch.complex64),
        lambda: testing.gate_loop_inputs(2, 3, 2, 2, 2, complex_qk=True),
        lambda: {"reset": testing.reset_mask(2, 30)},
    ):
        torch.manual_seed(1)
        first, before = make(), torch.get_rng_state()
        assert torch.equal(before, torch.random.manual_seed(1).get_state())
        torch.manual_seed(2)
        second = make()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_of_two_dtypes_are_roundings_of_the_same_numbers():
    single, half = scan_inputs(2, 3, 4), scan_inputs(2, 3, 4, dtype=torch.bfloat16)
    assert torch.equal(single["x"].bfloat16(), half["x"])


def test_decays_of_the_inputs_are_magnitudes_from_short_to_long_memory():
    log_decay = testing.gate_loop_inputs(4, 100, 4, 4, 2)["log_decay"]
    time_scale = -1 / torch.expm1(log_decay)
    assert 1.04 < time_scale.min() < 1.2 and 800 < time_scale.max() < 1001
    a = scan_inputs(4, 100, 4, dtype=torch.complex64)["a"]
    assert a.abs().max() < 1 and a.angle().min() < -3 and a.angle().max() > 3
