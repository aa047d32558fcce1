import pytest
import torch

from linrec.lab.tasks import NO_TARGET
from linrec.lab.tasks.copying import Compression
from tests.lab.tasks.recall import FEW, check_against


@pytest.mark.parametrize("noise", [0.0, 0.5, 0.95])
def test_every_position_is_asked_for_once_unless_there_is_noise(noise):
    task = Compression(length=7, n_symbols=5, n_noise=3, noise=noise, **FEW)

    def oracle(inputs):
        string, end, positions = inputs[:7], inputs[7], [token - 9 for token in inputs[8:]]
        assert end == 8 and sorted(positions) == list(range(7))
        symbols = {8 + step: string[place] for step, place in enumerate(positions)}
        assert all(token < 8 for token in string)
        return {step: symbol for step, symbol in symbols.items() if symbol < 5}

    for name in ("train", "test"):
        check_against(oracle, task.split(name))


def test_noise_and_order_are_as_likely_everywhere():
    task = Compression(length=4, noise=0.5, n_noise=2, n_train=8000, n_validation=1, n_test=1)
    inputs = task.split("train").inputs
    noise = (inputs[:, :4] >= 15).double().mean(0)
    # one place of four is chosen to have none
    assert (noise - 0.5 * 3 / 4).abs().max() < 4 * (0.25 / 8000) ** 0.5
    for step in range(5, 9):
        assert (inputs[:, step].bincount(minlength=22)[18:] - 2000).abs().max() < 4 * 2000**0.5


def test_shorter_strings_are_probes_and_longer_ones_have_no_positions():
    task = Compression(length=9, test_lengths=(6,), **FEW)
    probe = task.probes["6"]
    assert probe.inputs.shape == (60, 13) and task.vocab_size == 25
    # positions have the tokens that they have in training
    assert torch.equal(probe.inputs[:, 7:].sort(1).values, torch.arange(16, 22).expand(60, 6))
    with pytest.raises(ValueError, match=r"`test_lengths` must be at most `length` = 31, .*; got 32"):
        Compression(test_lengths=(32,))


def test_fields_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`n_noise` must be at least 1 with `noise` = 0\.2; got 0"):
        Compression(noise=0.2)
    with pytest.raises(ValueError, match=r"`noise` must be at least 0 and below 1; got -0\.1"):
        Compression(noise=-0.1)
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        Compression(n_symbols=1)
    assert (Compression(**FEW).split("test").targets[:, :32] == NO_TARGET).all()
