import dataclasses
import hashlib
import json
import random

import numpy as np
import pytest
import torch

from linrec.lab.tasks.memory_horizon import MemoryHorizon, compress, compress_suffixes

SMALL = MemoryHorizon(length=40, n_resets=2, n_samples=60, n_validation=10, n_test=20)


@pytest.fixture(scope="module")
def full() -> MemoryHorizon:
    return MemoryHorizon()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], 0),
        ([3], 3),
        ([2, 3], 6),
        ([1, 2, 3], 1),  # 1*3 - 2
        ([1, 2, 3, 4], 48),  # 1*4 - 2*3 = -2
        ([4, 0, 2, 1, 3], 14),  # 4*3 - 0*1 + 2
        ([4, 4, 1, 0, 4, 4], 0),  # 16 - 16 + 0
        ([1, 2, 3, 4, 3, 2, 1], 2),  # 1 - 4 + 9 - 4
        ([0, 4, 0, 0, 4, 1], 34),  # 0 - 16 + 0
        ([4] * 8, 0),  # 16 - 16 + 16 - 16
        ([4] * 9, 4),  # the same and + 4
        ([4] * 11, 12),  # 16 - 16 + 16 - 16 + 16 - 4
        ([9, 9], 31),  # 81 - 50
    ],
)
def test_hand_worked_lists(numbers, expected):
    assert compress(numbers, 50) == expected


def test_results_are_never_negative_and_modulus_is_checked():
    assert compress([0, 3, 1, 0], 2) == 1  # -3
    assert compress([1, 2, 3, 4], 1) == 0
    with pytest.raises(ValueError, match="`modulus` must be at least 1; got 0"):
        compress([1], 0)


@pytest.mark.parametrize("largest", [4, 3_000_000])
def test_the_vectorised_computation_agrees_with_the_definition(largest):
    rng = random.Random(0)
    numbers = np.array([[rng.randint(0, largest) for _ in range(33)] for _ in range(5)])
    span = np.array([[rng.randint(0, n + 1) for n in range(33)] for _ in range(5)])
    result = compress_suffixes(numbers, span, 50)
    for b in range(5):
        for n in range(33):
            assert result[b, n] == compress(numbers[b, n + 1 - span[b, n] : n + 1].tolist(), 50)


def test_the_vectorised_computation_takes_empty_batches_and_sequences():
    for shape in ((0, 4), (3, 0)):
        empty = np.zeros(shape, dtype=np.int64)
        assert compress_suffixes(empty, empty, 50).shape == shape


def test_targets_and_spans_follow_the_definition(full):
    test = full.split("test")
    for inputs, targets, spans in zip(test.inputs[:4], test.targets[:4], test.group[:4], strict=True):
        memory: list[int] = []
        for token, target, span in zip(inputs.tolist(), targets.tolist(), spans.tolist(), strict=True):
            memory = [] if token == full.reset_token else [*memory, token]
            assert span == len(memory)
            assert target == compress(memory, full.modulus)


def test_the_defaults_are_the_papers(full):
    assert (full.vocab_size, full.n_outputs, full.reset_token) == (6, 50, 5)
    assert [len(full.split(name)) for name in ("train", "validation", "test")] == [1700, 100, 200]
    for name in ("train", "validation", "test"):
        split = full.split(name)
        assert split.inputs.shape == split.targets.shape == split.group.shape == (len(split), 1024)
        assert split.inputs.dtype == split.targets.dtype == split.group.dtype == torch.int64
        assert ((split.inputs == full.reset_token).sum(1) == 3).all()
        assert split.targets.min() >= 0 and split.targets.max() < 50


def test_inputs_and_reset_positions_are_uniform(full):
    inputs = full.split("train").inputs
    counts = torch.bincount(inputs.flatten())
    share = counts[:5].double() / counts[:5].sum()
    # five standard deviations of a binomial share
    assert (share - 0.2).abs().max() < 5 * (0.16 / counts[:5].sum()).sqrt()
    position = (inputs == full.reset_token).nonzero()[:, 1]
    per_eighth = torch.bincount(position // 128).double()
    expected = 1700 * 3 / 8
    assert per_eighth.shape == (8,)
    assert (per_eighth - expected).abs().max() < 5 * (expected * 7 / 8) ** 0.5


def test_no_sample_occurs_twice(full):
    for task in (full, SMALL):
        samples = torch.cat([task.split(name).inputs for name in ("train", "validation", "test")])
        assert len(samples.unique(dim=0)) == len(samples) == task.n_samples


def test_splits_stay_disjoint_where_few_sequences_exist():
    # 3 positions of the reset and 2^2 pairs of numbers: 12 sequences, all of them used
    task = MemoryHorizon(
        max_number=1, length=3, n_resets=1, modulus=5, n_samples=12, n_validation=3, n_test=4
    )
    samples = torch.cat([task.split(name).inputs for name in ("train", "validation", "test")])
    assert len(samples.unique(dim=0)) == 12


def test_data_depends_on_config_seed_and_split_alone():
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()
    again = dataclasses.replace(SMALL)
    for name in ("test", "train"):
        for field in ("inputs", "targets", "group"):
            assert torch.equal(getattr(SMALL.split(name), field), getattr(again.split(name), field))
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state[1])
    other = dataclasses.replace(SMALL, seed=1)
    assert not torch.equal(SMALL.split("test").inputs, other.split("test").inputs)


def test_held_out_samples_do_not_depend_on_how_many_there_are_in_all():
    larger = dataclasses.replace(SMALL, n_samples=200)
    for name in ("validation", "test"):
        assert torch.equal(SMALL.split(name).inputs, larger.split(name).inputs)


def test_the_test_set_is_the_one_that_committed_results_used(full):
    digest = hashlib.sha256(full.split("test").inputs.to(torch.uint8).numpy().tobytes()).hexdigest()
    assert digest[:16] == "7d9e4698ff02ce7e"


def test_a_split_is_made_once():
    assert SMALL.split("train") is SMALL.split("train")


def test_chance_level(full):
    test = full.split("test")
    guesses = torch.randint(0, 50, test.targets.shape, generator=torch.Generator().manual_seed(0))
    assert full.chance == 0.02
    # five standard deviations of a binomial share
    assert abs(full.score(guesses, test)["accuracy"] - 0.02) < 5 * (0.02 * 0.98 / guesses.numel()) ** 0.5


def test_trivial_score_is_that_of_the_most_frequent_training_target(full):
    test = full.split("test")
    assert full.split("train").targets.flatten().mode().values == 0
    assert full.trivial_score == full.score(torch.zeros_like(test.targets), test)["accuracy"]
    assert full.trivial_score == pytest.approx(0.028, abs=0.002)


def test_score_counts_by_span(full):
    test = full.split("test")
    perfect_to_70 = torch.where(test.group <= 70, test.targets, (test.targets + 1) % 50)
    score = full.score(perfect_to_70, test)
    assert score["accuracy"] == pytest.approx((test.group <= 70).double().mean().item())
    by_span = {tuple(entry["span"]): entry for entry in score["accuracy_by_span"]}
    longest = int(test.group.max())
    assert list(by_span) == [(0, 0), (1, 10), (11, 25), (26, 50), (51, 100), (101, 200), (201, longest)]
    assert [by_span[s]["accuracy"] for s in ((0, 0), (1, 10), (26, 50), (101, 200))] == [1, 1, 1, 0]
    assert 0 < by_span[51, 100]["accuracy"] < 1
    assert by_span[0, 0]["count"] == 3 * 200
    assert sum(entry["count"] for entry in by_span.values()) == test.targets.numel()

    curve = score["span_curve"]
    assert curve["accuracy"][:8] == [1, 1, 1, 1, 1, 1, 1, 0]
    assert curve["count"][1] == int(((test.group >= 11) & (test.group <= 20)).sum())
    assert sum(curve["count"]) == int((test.group > 0).sum())
    assert len(curve["count"]) == -(-longest // curve["width"])
    assert len(json.dumps(score)) < 4000
    short = SMALL.split("test")
    assert SMALL.score(short.targets, short)["span_curve"]["width"] == 1


def test_score_leaves_out_bins_that_do_not_occur():
    test = SMALL.split("test")
    score = SMALL.score(test.targets, test)
    assert [entry["span"][0] for entry in score["accuracy_by_span"]] == [0, 1, 11, 26]
    assert score["accuracy_by_span"][-1]["span"][1] == test.group.max()
    only_resets = dataclasses.replace(test, group=torch.zeros_like(test.group))
    assert SMALL.score(test.targets, only_resets)["span_curve"]["accuracy"] == []


def test_score_ignores_positions_without_target():
    test = SMALL.split("test")
    masked = dataclasses.replace(test, targets=torch.where(test.group > 5, -100, test.targets))
    score = SMALL.score(masked.targets, masked)
    assert score["accuracy"] == 1.0
    assert sum(entry["count"] for entry in score["accuracy_by_span"]) == int((test.group <= 5).sum())


def test_score_refuses_logits_and_other_shapes():
    test = SMALL.split("test")
    with pytest.raises(TypeError, match=r"`predictions` must be integer classes; got torch.float32"):
        SMALL.score(torch.zeros(20, 40, 50), test)
    with pytest.raises(ValueError, match=r"`predictions` must have the shape of the targets, \(20, 40\)"):
        SMALL.score(torch.zeros(20, 39, dtype=torch.int64), test)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 0}, "`length` must be at least 1; got 0"),
        ({"modulus": 0}, "`modulus` must be at least 1; got 0"),
        ({"max_number": -1}, "`max_number` must be at least 0; got -1"),
        ({"n_resets": 1025}, "`n_resets` must be at most `length` = 1024; got 1025"),
        ({"n_samples": 300}, "`n_samples` must exceed `n_validation` [+] `n_test` = 300; got 300"),
        ({"length": 3, "n_resets": 3}, "`n_samples` must be at most 1, the number of different sequences"),
        ({"n_test": 0}, "`n_test` must be at least 1; got 0"),
        ({"n_validation": 0}, "`n_validation` must be at least 1; got 0"),
        ({"seed": -1}, "`seed` must be at least 0; got -1"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MemoryHorizon(**fields)


def test_an_unknown_split_gives_the_nearest_match():
    with pytest.raises(ValueError, match="no split 'valid'; did you mean 'validation'"):
        SMALL.split("valid")
