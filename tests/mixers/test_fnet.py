import itertools

import torch

from linrec.mixers import build
from linrec.models import SequenceClassifier, SequenceClassifierConfig
from linrec.testing import assert_agree, generator
from tests import released


def test_the_transform_is_that_of_the_port_of_the_authors_code():
    numbers = released.read("fnet")
    found, _ = build("fnet", 6)(numbers["x"])
    assert released.error(found, numbers["y"]) < released.cases()["fnet"]["error"]
    assert released.error(build("fnet", 6)(1.01 * numbers["x"])[0], numbers["y"]) > 1e-3


def test_a_document_is_transformed_alone():
    x = torch.randn(2, 11, 4, generator=generator(), dtype=torch.float64)
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[0, [3, 4]] = reset[1, 7] = True
    y, state = build("fnet", 4)(x, reset=reset)
    for row, cuts in enumerate(([0, 3, 4, 11], [0, 7, 11])):
        for begin, end in itertools.pairwise(cuts):
            expected = torch.fft.fft(torch.fft.fft(x[row, begin:end], dim=1), dim=0).real
            assert_agree(y[row, begin:end], expected)
    assert state is None


def test_an_encoder_of_the_papers_blocks_learns():
    torch.manual_seed(0)
    config = SequenceClassifierConfig(
        n_outputs=2,
        n_features=3,
        d_model=8,
        n_layers=1,
        mixer="fnet",
        norm_position="post",
        bidirectional=False,
    )
    model = SequenceClassifier(config)
    model(torch.randn(2, 9, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
