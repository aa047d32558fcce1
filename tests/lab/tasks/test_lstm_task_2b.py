import pytest
import torch

from linrec.lab.tasks.copying import LstmTask2b


@pytest.mark.parametrize("recurs", [True, False])
def test_the_first_symbol_is_asked_for_at_the_end(recurs):
    task = LstmTask2b(length=6, n_symbols=12, recurs=recurs, n_train=10, n_validation=10, n_test=600)
    test = task.split("test")
    for tokens, targets in zip(test.inputs.tolist(), test.targets.tolist(), strict=True):
        assert targets == [-100] * 5 + tokens[:1] and tokens[0] in (0, 1)
    # the docstring says how much memory a step of a sample takes
    assert test.inputs.element_size() + test.targets.element_size() == 16
    assert test.inputs.shape == test.targets.shape == (600, 6)
    counts = torch.bincount(test.inputs[:, 1:].flatten(), minlength=13)
    first, share = (1, 1 / 12) if recurs else (2, 1 / 11)
    assert counts[:first].sum() == 0
    assert (counts[first:] - 3000 * share).abs().max() < 4 * (3000 * share * (1 - share)) ** 0.5
    assert abs(int(test.inputs[:, 0].sum()) - 300) < 4 * 600**0.5 / 2


def test_a_sequence_that_ends_where_it_begins_is_refused():
    with pytest.raises(ValueError, match="`length` must be at least 2; got 1"):
        LstmTask2b(length=1)
    with pytest.raises(ValueError, match="`n_symbols` must be at least 2; got 1"):
        LstmTask2b(n_symbols=1)
