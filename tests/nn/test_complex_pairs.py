"""Complex numbers as pairs."""

import torch

from linrec.nn.complex_pairs import to_complex, to_pairs
from linrec.testing import generator


def test_real_and_imaginary_parts_alternate():
    z = torch.randn(2, 3, generator=generator(), dtype=torch.complex64)
    pairs = to_pairs(z)
    assert torch.equal(pairs[:, ::2], z.real) and torch.equal(pairs[:, 1::2], z.imag)
    assert torch.equal(to_complex(pairs), z)
