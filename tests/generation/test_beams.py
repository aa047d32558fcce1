"""Beam search."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from linrec.generation import GenerationState, beam_search, generate
from linrec.models import EncoderConfig, EncoderDecoder, EncoderDecoderConfig, LanguageModel, ModelConfig
from linrec.testing import assert_agree

END, VOCAB, TIME = 2, 4, 4


def make(mixer: str | tuple[str, ...] = ("lstm", "attention"), seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    config = ModelConfig(vocab_size=VOCAB, d_model=8, n_layers=2, d_channel_mixing=12, mixer=mixer)
    model = LanguageModel(config).double().eval()
    # far from uniform, so that orders are clear
    torch.nn.init.normal_(model.head.weight, std=1.5)
    return model


def prompts(rows: int = 3) -> Tensor:
    return torch.tensor([[0, 1, 3], [3, 3, 1], [1, 0, 0]])[:rows]


def score(model: LanguageModel, prompt: Tensor, text: tuple[int, ...], alpha: float) -> float:
    whole = torch.cat([prompt, torch.tensor(text)])[None]
    logits, _ = model(whole)
    steps = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    total = steps[torch.arange(len(text)), torch.tensor(text)].sum().item()
    return total / ((5 + len(text)) / 6) ** alpha


@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_enough_beams_find_the_best_of_all_texts(alpha: float) -> None:
    model = make()
    every = [
        text
        for n in range(1, TIME + 1)
        for text in itertools.product(range(VOCAB), repeat=n)
        if END not in text[:-1] and (text[-1] == END or n == TIME)
    ]
    found = beam_search(model, prompts(), n_tokens=TIME, end=END, n_beams=200, length_penalty=alpha)
    for row, prompt in enumerate(prompts()):
        scores = sorted(((score(model, prompt, text, alpha), text) for text in every), reverse=True)
        assert found.scores[row, :5].tolist() == pytest.approx([s for s, _ in scores[:5]])
        for k, (_, text) in enumerate(scores[:5]):
            assert found.tokens[row, k].tolist() == [*text, *[END] * (TIME - len(text))][:TIME]
        # there are no others
        assert found.scores[row].isfinite().sum() == min(200, len(every))


@pytest.mark.parametrize("seed", range(4))
def test_the_search_may_end_early_without_losing_a_better_text(seed: int) -> None:
    """The scores of a search that runs to the end are the same."""
    model = make(seed=seed)
    short = beam_search(model, prompts(), n_tokens=12, end=END, n_beams=3)
    assert_agree(short.scores[:, 0], torch.stack([best_of(model, row) for row in prompts()]))


def best_of(model: LanguageModel, prompt: Tensor) -> Tensor:
    """Return the best score of a search with 3 beams written out with lists."""
    alive, ended = [(0.0, ())], []
    for n in range(1, 13):
        spread = []
        for total, text in alive:
            logits, _ = model(torch.cat([prompt, torch.tensor(text, dtype=torch.int64)])[None])
            log_p = logits[0, -1].log_softmax(-1).tolist()
            spread += [(total + log_p[token], (*text, token)) for token in range(VOCAB)]
        spread.sort(reverse=True)
        ended += [(p / ((5 + n) / 6) ** 0.6, text) for p, text in spread[:6] if text[-1] == END]
        alive = [(p, text) for p, text in spread if text[-1] != END][:3]
    ended += [(p / (17 / 6) ** 0.6, text) for p, text in alive]
    return torch.tensor(max(ended)[0], dtype=torch.float64)


@pytest.mark.parametrize("mixer", ["lstm", ("attention", "mamba2"), "transformer_xl"])
def test_one_beam_is_no_worse_than_greedy_and_rows_are_apart(mixer: str) -> None:
    model = make(mixer)
    found = beam_search(model, prompts(), n_tokens=8, end=END, n_beams=1, length_penalty=0.0)
    greedy, _ = generate(model, prompts(), n_tokens=8, temperature=0)
    for row in range(3):
        text = greedy[row].tolist()
        n = text.index(END) + 1 if END in text else 8
        # a text that ended before, at a token that was not the likeliest, may have a better score
        assert found.scores[row, 0] > score(model, prompts()[row], tuple(text[:n]), 0.0) - 1e-9
        alone = beam_search(model, prompts()[row : row + 1], n_tokens=8, end=END, n_beams=3)
        together = beam_search(model, prompts(), n_tokens=8, end=END, n_beams=3)
        assert_agree(together.scores[row : row + 1], alone.scores)


def test_a_state_goes_on_where_the_prompt_ended() -> None:
    model = make()
    _, state = generate(model, prompts()[:, :2], n_tokens=0, temperature=0)
    found = beam_search(model, prompts()[:, 2:], state=state, n_tokens=5, end=END)
    whole = beam_search(model, prompts(), n_tokens=5, end=END)
    assert_agree(found.scores, whole.scores)
    assert torch.equal(found.tokens, whole.tokens)


def test_beams_of_a_translation_read_their_own_source() -> None:
    torch.manual_seed(0)
    encoder = EncoderConfig(vocab_size=5, d_model=8, n_layers=1, mixer="lru")
    sizes = {"vocab_size": VOCAB, "d_model": 8, "n_layers": 1, "mixer": "attention"}
    model = EncoderDecoder(EncoderDecoderConfig(encoder=encoder, **sizes)).double().eval()
    source, lengths = torch.tensor([[1, 2, 3], [4, 4, 0]]), torch.tensor([3, 2])
    state = GenerationState(model.encode(source, lengths), torch.tensor([0, 0]))
    found = beam_search(model, state=state, n_tokens=3, end=END, n_beams=3)
    for row in range(2):
        for k in range(3):
            text = found.tokens[row, k].tolist()
            text = text[: text.index(END) + 1] if END in text else text
            tokens = torch.tensor([[0, *text]])
            encoded = source[row : row + 1, : lengths[row]]
            log_p = model(tokens[:, :-1], source=encoded)[0][0].log_softmax(-1)
            total = log_p[torch.arange(len(text)), tokens[0, 1:]].sum().item()
            assert found.scores[row, k].item() == pytest.approx(total / ((5 + len(text)) / 6) ** 0.6)


def test_what_is_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match="`end` must be at least 0 and at most 3; got 4"):
        beam_search(model, prompts(), n_tokens=2, end=4)
    with pytest.raises(ValueError, match="`n_beams` must be at least 1; got 0"):
        beam_search(model, prompts(), n_tokens=2, end=1, n_beams=0)
    with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
        beam_search(model.train(), prompts(), n_tokens=2, end=1)
    assert not math.isnan(beam_search(model.eval(), prompts(), n_tokens=1, end=1).scores.sum())
