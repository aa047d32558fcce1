"""Streaming: a sequence in pieces of any size, or token by token, gives what one pass gives.

Every operator, mixer and model returns (output, state). The state that one call returns is where the next
call goes on; there is no separate step function.

    python examples/streaming.py
"""

import torch

from linrec.models import LanguageModel, ModelConfig

torch.manual_seed(0)
model = LanguageModel(ModelConfig(vocab_size=100, d_model=32, n_layers=2)).eval()
tokens = torch.randint(100, (2, 200))


def in_pieces(sizes: list[int]) -> torch.Tensor:
    logits, state = [], None
    for piece in tokens.split(sizes, dim=1):
        y, state = model(piece, state)
        logits.append(y)
    return torch.cat(logits, dim=1)


def compare(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (actual - expected).abs().max().item()
    print(f"{what:<44} largest difference {difference:.0e}")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


with torch.no_grad():
    whole, state = model(tokens)
    compare("pieces of 150, 49 and 1 tokens", in_pieces([150, 49, 1]), whole)
    compare("one token at a time", in_pieces([1] * 200), whole)

    # two documents in one row: at the reset nothing of the first is left
    reset = torch.zeros(2, 200, dtype=torch.bool)
    reset[:, 120] = True
    packed, _ = model(tokens, reset=reset)
    alone, _ = model(tokens[:, 120:])
    compare("the second of two packed documents", packed[:, 120:], alone)

shapes = [tuple(layer.shape) for layer in state]
print(f"the state after 200 tokens, (batch, heads, dk, dv) per layer: {shapes}")
print(f"that is {model.state_size} complex numbers per sequence, at any length")
