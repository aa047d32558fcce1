"""Streams against their definitions, and what holds for each of them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from linrec.errors import DataError
from linrec.lab import streams
from linrec.lab.streams.given import GivenStream
from linrec.lab.streams.glyphs import glyphs
from linrec.lab.streams.prequential import POINTS, Prequential

NAMES = streams.names()


def same(a, b):
    return all(torch.equal(x.nan_to_num(-9.0), y.nan_to_num(-9.0)) for x, y in zip(a[:2], b[:2], strict=True))


def joined(pieces):
    return [torch.cat(parts, 1) for parts in zip(*(piece[:2] for piece in pieces), strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_steps_do_not_depend_on_how_many_are_read_at_a_time(name):
    whole, parts = (streams.get(name)(rows=2, seed=3) for _ in range(2))
    assert same(whole.read(2300), joined([parts.read(n) for n in (1, 999, 1, 1200, 99)]))
    assert whole.step == 2300


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [0, 1, 999, 1000, 1700, 2000])
def test_a_stream_goes_on_where_it_was(name, step):
    whole = streams.get(name)(rows=2, seed=3)
    if step:
        whole.read(step)
    rest = whole.read(500)
    stopped, resumed = (streams.get(name)(rows=2, seed=3) for _ in range(2))
    if step:
        stopped.read(step)
    resumed.load_state_dict(stopped.state_dict())
    assert same(resumed.read(500), rest)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_rows_differ(name):
    one, other = (streams.get(name)(rows=2, seed=seed).read(300) for seed in (0, 1))
    assert name == "text" or not torch.equal(one.inputs, other.inputs)
    assert not torch.equal(one.inputs[0], one.inputs[1])


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_what_a_model_is_built_for(name):
    stream = streams.get(name)(rows=2)
    piece = stream.read(7)
    if stream.vocab_size is None:
        assert piece.inputs.shape == (2, 7, stream.n_features) and piece.inputs.dtype == torch.float32
        assert piece.targets.shape == (2, 7, stream.n_outputs)
    else:
        assert piece.inputs.shape == (2, 7) and int(piece.inputs.min()) >= 0
        assert int(piece.inputs.max()) < stream.vocab_size and int(piece.targets.max()) < stream.n_outputs
    assert all(loss >= 0 for loss in stream.bounds.values())


def test_bounds_of_add_memory_are_those_of_the_literature():
    assert [round(loss, 3) for loss in streams.AddMemory().bounds.values()] == [0.662, 0.519, 0.454]


def test_coins_depend_on_coins_at_the_delays():
    stream = streams.AddMemory(rows=40, every=4000)
    piece = stream.read(8000)
    regimes = stream.regimes(8000)
    assert [regime.start for regime in regimes] == [0, 4000]
    for regime in regimes:
        n1, n2 = (int(word) for word in regime.name.strip("()").split(","))
        t = torch.arange(regime.start + 20, regime.start + 4000)
        first, second, y = piece.inputs[:, t - n1], piece.inputs[:, t - n2], piece.targets[:, t].double()
        for a in (0, 1):
            for b in (0, 1):
                mean = y[(first == a) & (second == b)].mean()
                assert abs(mean - (0.5 + 0.5 * a - 0.25 * b)) < 0.02


def test_symbols_come_back_after_the_delay():
    stream = streams.DelayCopy(delays=(3, 7), every=500)
    x, y, *_ = stream.read(1600)
    assert (y[0, :3] == -100).all()
    assert torch.equal(y[0, 3:500], x[0, :497])
    assert torch.equal(y[0, 500:1000], x[0, 493:993])
    # across blocks, and back to the first delay
    assert torch.equal(y[0, 1000:1500], x[0, 997:1497])


def test_texts_alternate_and_predict_the_next_byte(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(100)) * 30)
    x, y, *_ = streams.Texts(path=path, every=400).read(1200)
    assert torch.equal(y[:, :399], x[:, 1:400]) and torch.equal(y[:, 800:1199], x[:, 801:])
    assert x[0, :3].tolist() == [0, 1, 2] and x[0, 800:803].tolist() == [0, 1, 2]
    assert bytes(x[0, 400:800].tolist()).decode().startswith('"""')


def test_sines_move_by_frequencies_between_a_hundredth_and_a_tenth():
    stream = streams.Sines(sines=1, every=2000)
    x, y, *_ = stream.read(5000)
    assert torch.equal(y[:, :-1], x[:, 1:])
    phase = np.unwrap(np.angle(_analytic(x[0, :, 0].double().numpy())))
    moves = np.diff(phase)[100:-100] / (2 * math.pi)
    assert np.quantile(moves, 0.02) > 0.008 and np.quantile(moves, 0.98) < 0.11


def _analytic(x):
    spectrum = np.fft.fft(x)
    spectrum[len(x) // 2 :] = 0
    return np.fft.ifft(2 * spectrum)


def test_mackey_glass_follows_its_equation():
    stream = streams.MackeyGlassDrift(tau=(17.0, 17.0))
    x, y, *_ = stream.read(3000)
    assert torch.equal(y[:, :-1, 0], x[:, 1:, 0]) and torch.equal(y[:, :-10, 1], x[:, 10:, 0])
    series = np.arctanh(x[0, :, 0].double().numpy()) + 1
    # one step of ten Euler steps, with the delayed value between two known ones
    before, delayed = series[17:-1], series[:-18]
    rate = 0.2 * delayed / (1 + delayed**10) - 0.1 * before
    assert np.abs(np.diff(series)[17:] - rate).max() < 0.08
    assert np.corrcoef(np.diff(series)[17:], rate)[0, 1] > 0.98


def test_returns_of_trace_patterning_are_the_discounted_rewards():
    stream = streams.TracePatterning(rows=3)
    x, y, *_ = stream.read(4000)
    for row in range(3):
        rewards = x[row, :, 11].nonzero()[:, 0]
        shown = x[row, :, :6].sum(1)
        assert set(shown.unique().tolist()) == {0.0, 3.0}
        starts = shown.nonzero()[:, 0]
        for reward in rewards[1:].tolist():
            start = int(starts[starts < reward][-1])
            assert 4 <= reward - start <= 6
            expected = 0.9 ** (reward - torch.arange(start, reward) - 1.0)
            assert torch.allclose(y[row, start:reward, 0], expected)
        # half of the patterns are valid
        assert 0.3 < len(rewards) / len(starts) < 0.7
        assert (y[row, :, 0] > 0).float().mean() < 0.5


def test_films_move_on_by_less_than_a_pixel_and_end_after_twenty_frames():
    stream = streams.BouncingGlyphs(films=2)
    x, y, *_ = stream.read(120)
    frames = x[0].unflatten(1, (16, 16))
    assert set(frames.unique().tolist()) == {0.0, 1.0}
    ends = torch.arange(120) % 20 == 19
    assert y[0, ends].isnan().all() and torch.equal(y[0, :-1][~ends[:-1]], x[0, 1:][~ends[:-1]])
    assert [regime.name for regime in stream.regimes(120)] == ["digits", "letters", "shapes"]
    assert not np.array_equal(stream.held_out(0, 1).inputs, x[:, :19].numpy())


def test_glyphs_are_all_different():
    every = np.concatenate([glyphs(kind) for kind in range(3)])
    assert len({glyph.tobytes() for glyph in every}) == 30 and (every.sum((1, 2)) > 5).all()


def test_scores_are_means_and_windows():
    loss = torch.arange(12.0).reshape(1, 12)
    scores = Prequential(window=4)
    scores.add(loss[:, :5])
    scores.add(loss[:, 5:], torch.ones(1, 7, dtype=torch.bool))
    assert scores.mean == 5.5 and scores.curve == [1.5, 5.5, 9.5]
    weights = 0.75 ** torch.arange(11.0, -1, -1)
    assert scores.fading == pytest.approx(float((weights * loss[0]).sum() / weights.sum()))


def test_steps_without_a_target_do_not_count():
    scores = Prequential(window=2)
    counts = torch.tensor([[True, False, True, True], [True, False, False, True]])
    scores.add(torch.tensor([[1.0, math.nan, 2.0, 3.0], [3.0, 9.0, 9.0, 5.0]]), counts)
    assert scores.mean == pytest.approx((2 + 2 + 4) / 3) and scores.curve == [2.0, 3.0]


def test_a_curve_stays_short():
    scores = Prequential(window=1)
    scores.add(torch.ones(1, POINTS + 10))
    assert len(scores.curve) == POINTS // 2 + 5 and scores.width == 2


def test_a_file_is_read_byte_by_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abcdef")
    stream = GivenStream(path=path)
    first, second = stream.read(2), stream.read(10)
    assert first.inputs.tolist() == [[97, 98]] and first.targets.tolist() == [[98, 99]]
    assert second.inputs.tolist() == [[99, 100, 101]] and stream.read(1) is None
    again = GivenStream(path=path)
    again.load_state_dict({**stream.state_dict(), "step": 2, "offset": 3, "last": [99.0]})
    assert torch.equal(again.read(10).inputs, second.inputs)


def test_a_table_is_read_row_by_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1,2\n3,4\n5,6\n")
    stream = GivenStream(path=path)
    piece = stream.read(5)
    assert piece.inputs.tolist() == [[[1, 2], [3, 4]]] and piece.targets.tolist() == [[[3, 4], [5, 6]]]
    assert (stream.n_features, stream.n_outputs, stream.vocab_size) == (2, 2, None)


@pytest.mark.parametrize(
    "text, words",
    [
        ("1,2\n3,4\n5", "middle of a row, at byte 9"),
        ("1,2\n3\n", "2 numbers.*byte 4"),
        ("a,b\n", "numbers"),
        ("", "empty"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        stream = GivenStream(path=path)
        stream.read(5)


def test_a_file_that_grows_is_waited_for(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("1\n2\n3")
    stream = GivenStream(path=path, follow=True)
    with path.open("rb") as reader:
        reader.seek(2)
        parts = stream._parts(reader, 2)
        assert next(parts) == b"2\n"
        with path.open("a") as writer:
            writer.write("4\n")
        assert next(parts) == b"34\n"


def test_fields_of_a_stream_are_checked():
    with pytest.raises(ValueError, match="rows"):
        streams.Sines(rows=0)
    with pytest.raises(ValueError, match="delays"):
        streams.AddMemory(delays=(5, 5))
    with pytest.raises(ValueError, match="'sines'"):
        streams.get("sinus")
    assert dataclasses.replace(streams.Sines(), rows=2).rows == 2
