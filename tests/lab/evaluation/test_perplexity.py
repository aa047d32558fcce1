"""Scores against a plain loop over windows and documents in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from linrec.lab.corpora import TextCounts
from linrec.lab.evaluation import Score, evaluate_carried, evaluate_windows
from linrec.lab.evaluation import perplexity as module
from linrec.lab.tasks import TokenSplit
from linrec.models import LanguageModel
from linrec.testing import assert_agree
from tests.generation.models import FIRST, MIXERS, VOCAB, build
from tests.tiers import nightly, thorough

N = 100
# for every mixer: its steps take their time. Windows longer than a chunk are the business of the laws
FEW = 40
# the second and third are of one token, and one begins where windows of 20 do
STARTS = (0, 10, 11, 12, 20, 33)
# a state of one size, one that grows and one of several parts; the others read documents alone, which cut
# windows into several lengths
STATES = ("hgru", "attention", "mamba")
every_mixer = pytest.mark.parametrize(
    ("name", "documents"),
    [
        # one worker compiles the kernels of a mixer, and not each
        pytest.param(
            name,
            documents,
            id=f"{name}-{'documents' if documents else 'stream'}",
            marks=[
                pytest.mark.xdist_group(f"perplexity of {name}"),
                *([] if name in STATES else [thorough] if name in FIRST else [nightly]),
            ],
        )
        for name in MIXERS
        for documents in ((False, True) if name in STATES else (True,))
    ],
)


def text(n: int = N, *, documents: bool = False) -> TokenSplit:
    tokens = np.random.default_rng(0).integers(VOCAB, size=n).astype(np.uint16)
    # its own windows do not matter
    return TokenSplit.of(tokens, length=7, starts=np.array(STARTS) if documents else None)


def reference(model: LanguageModel, split: TokenSplit, length: int) -> float:
    """-log p of all tokens but the first, windows cut where documents begin, each piece read alone."""
    tokens, total = split.ids.tolist(), 0.0
    begins = {*range(0, len(tokens), length)} | (set() if split.starts is None else {*split.starts.tolist()})
    cuts = [*sorted(begins & {*range(len(tokens) - 1)}), len(tokens) - 1]
    for start, stop in itertools.pairwise(cuts):
        with torch.no_grad():
            # a document of a mixer with segments runs from its position in the window
            state = model.init_state(1, position=start % length)
            logits = model(torch.tensor([tokens[start:stop]]), state)[0][0]
        for row, target in zip(logits.tolist(), tokens[start + 1 : stop + 1], strict=True):
            top = max(row)
            total += top + math.log(math.fsum(math.exp(x - top) for x in row)) - row[target]
    return total


@thorough
@every_mixer
def test_windows_of_every_length_predict_all_tokens(name: str, documents: bool) -> None:
    model, split = build(name), text(FEW, documents=documents)
    for length in (1, 8, 20, FEW - 1) if name in STATES else (8,):
        expected = reference(model, split, length)
        # windows in batches, one at a time, and in pieces that carry the state
        for batch_tokens in (1000, length, 6):
            score = evaluate_windows(model, split, length, batch_tokens=batch_tokens)
            assert score.nats == pytest.approx(expected, rel=1e-10), (length, batch_tokens)
            assert (score.length, score.tokens) == (length, FEW - 1)


@every_mixer
def test_a_carried_state_is_one_long_window(name: str, documents: bool) -> None:
    model, split = build(name), text(FEW, documents=documents)
    expected = reference(model, split, FEW)
    for batch_tokens in (1000, 13, 1):
        score = evaluate_carried(model, split, batch_tokens=batch_tokens)
        assert score.nats == pytest.approx(expected, rel=1e-10), batch_tokens
        assert (score.length, score.tokens) == (None, FEW - 1)


@pytest.mark.parametrize("name", ["hgru", "gate_loop", "attention"])
def test_precisions(name: str) -> None:
    wide, split = build(name), text()
    narrow = build(name, dtype=torch.float32)
    found = evaluate_windows(narrow, split, 16)
    assert_agree(torch.tensor(found.nats), torch.tensor(reference(wide, split, 16)), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = reference(narrow, split, 16)
    half = evaluate_windows(narrow, split, 16, precision="bf16-mixed")
    assert half.nats == pytest.approx(expected, rel=1e-3)
    assert half.nats != pytest.approx(found.nats, rel=1e-6)


def test_logits_are_formed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, split = build("hgru"), text()
    whole = evaluate_windows(model, split, 20)
    sizes = []
    original = module.linear_cross_entropy

    def counted(x: torch.Tensor, *rest: object, **named: object) -> object:
        sizes.append(len(x))
        return original(x, *rest, **named)

    monkeypatch.setattr(module, "linear_cross_entropy", counted)
    monkeypatch.setattr(module, "LOGITS", 7 * VOCAB + 1)
    assert evaluate_windows(model, split, 20).nats == pytest.approx(whole.nats, rel=1e-12)
    # five windows, the last one a token shorter, at once
    assert sizes == [7] * 14 + [2]


def test_a_head_that_was_replaced_is_called() -> None:
    model, split = build("gla"), text()
    before = evaluate_windows(model, split, length=9).nats
    model.head = torch.nn.Sequential(model.head, torch.nn.Linear(VOCAB, VOCAB)).double()
    found = evaluate_windows(model, split, length=9).nats
    assert found == pytest.approx(reference(model, split, 9)) and found != pytest.approx(before)


def test_positions_beyond_the_end_are_not_computed() -> None:
    model, split = build("hgru"), text(31)
    shapes = []
    model.embedding.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape)))
    evaluate_windows(model, split, 20, batch_tokens=8)
    assert shapes == [(1, 8), (1, 8), (1, 4), (1, 8), (1, 2)]


def test_progress_counts_every_prediction_once() -> None:
    model, split = build("hgru"), text()
    for evaluate in (
        lambda advance: evaluate_windows(model, split, 30, batch_tokens=13, advance=advance),
        lambda advance: evaluate_windows(model, split, 8, batch_tokens=40, advance=advance),
        lambda advance: evaluate_carried(model, split, batch_tokens=13, advance=advance),
    ):
        steps: list[int] = []
        evaluate(steps.append)
        assert sum(steps) == N - 1 and len(steps) > 2


def test_units_by_hand() -> None:
    # a model that knows nothing: every token costs log 5
    counts = TextCounts(tokens=12, documents=1, characters=15, bytes=17, words=5, lines=2)
    score = Score(512, nats=11 * math.log(5), tokens=11, counts=counts)
    assert score.loss == pytest.approx(math.log(5))
    assert score.perplexity == pytest.approx(5)
    assert score.word_perplexity == pytest.approx(5 ** (12 / 7))
    assert score.byte_perplexity == pytest.approx(5 ** (12 / 17))
    assert score.bits_per_byte == pytest.approx(12 / 17 * math.log2(5))
    assert score.bits_per_character == pytest.approx(12 / 15 * math.log2(5))
    assert score.to_dict() == {
        "length": 512,
        "tokens": 11,
        "nats": score.nats,
        "loss": score.loss,
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "byte_perplexity": score.byte_perplexity,
        "bits_per_byte": score.bits_per_byte,
        "bits_per_character": score.bits_per_character,
    }


def test_what_is_not_finite_is_no_number_in_json() -> None:
    # one word of a million characters, and counts that are not there
    counts = TextCounts(tokens=10**6, bytes=10**6, words=1)
    score = Score(512, nats=5e6, tokens=10**6, counts=counts)
    assert score.word_perplexity == math.inf and math.isnan(score.bits_per_character)
    told = score.to_dict()
    assert told["word_perplexity"] is None and told["bits_per_character"] is None
    assert told["perplexity"] == pytest.approx(math.exp(5))
    broken = Score(512, nats=math.nan, tokens=10, counts=counts).to_dict()
    assert broken["nats"] is None and broken["loss"] is None and broken["perplexity"] is None


@pytest.mark.parametrize("length", [0, -1, N])
def test_a_length_that_the_text_does_not_have(length: int) -> None:
    message = rf"`length` must be at least 1 and less than the {N} tokens of the text; got {length}\."
    with pytest.raises(ValueError, match=message):
        evaluate_windows(build("hgru"), text(), length)


def test_arguments_that_are_refused() -> None:
    model, split = build("hgru"), text()
    with pytest.raises(ValueError, match="at least 2 tokens, to predict the second; got 1"):
        evaluate_carried(model, text(1))
    for evaluate in (evaluate_carried, lambda *args, **named: evaluate_windows(*args, 5, **named)):
        with pytest.raises(ValueError, match="`batch_tokens` must be at least 1; got 0"):
            evaluate(model, split, batch_tokens=0)
        with pytest.raises(ValueError, match=r"bf16-mixd.*did you mean 'bf16-mixed'"):
            evaluate(model, split, precision="bf16-mixd")
        with pytest.raises(ValueError, match="`model` must be in evaluation mode"):
            evaluate(build("hgru").train(), split)


@pytest.mark.parametrize("place", [0, 42, N - 1])
def test_tokens_that_the_model_does_not_know(place: int) -> None:
    split = text()
    split.ids[place] = VOCAB
    message = rf"tokens must be in 0 \.\. {VOCAB - 1}, the model's vocabulary; got {VOCAB}"
    with pytest.raises(ValueError, match=message):
        evaluate_windows(build("hgru"), split, 10)
    with pytest.raises(ValueError, match=message):
        evaluate_carried(build("hgru"), split, batch_tokens=10)
