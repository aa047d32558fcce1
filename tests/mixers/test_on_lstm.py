import torch

from linrec.mixers import build
from linrec.testing import assert_agree

D = 4


def test_master_gates_cut_the_memory_at_a_chunk():
    """A forget gate that opens at chunk 1, and an input gate that closes there."""
    mixer = build("on_lstm", D, chunk_size=2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.zero_()
        # logits of i~, then of f~: the softmax is all in the second chunk
        mixer.W.bias[:4] = torch.tensor([-100.0, 100.0, -100.0, 100.0])
    c = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    _, state = mixer(torch.zeros(1, 1, D), torch.cat([torch.zeros(1, D), c], -1))
    # f~ = (0, 1), i~ = (1, 0), and the new content is zero
    assert_agree(state[:, D:], torch.tensor([[0.0, 0.0, 3.0, 4.0]]))
