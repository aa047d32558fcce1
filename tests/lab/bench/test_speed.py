import dataclasses

import pytest
import torch

from linrec.lab.bench import Entry, make_jobs
from linrec.lab.bench.worker import _step_bytes, speed_by_length, state_elements
from tests.lab.bench.test_running import TINY

OWN = f"{__package__}.own_mixers"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("linrec.lab.bench.worker.STEP_SECONDS", 0.01)


def test_the_bytes_of_a_step_are_those_at_its_peak():
    x = torch.zeros(10)

    def step():
        # two of these live at a time, and one of them goes with the step
        a = torch.zeros(1000)
        b = a + 1
        del a
        x.add_(b.sum() + (b * 2).sum())

    # scalars take the least that torch allocates
    assert 8000 <= _step_bytes(step, torch.device("cpu")) < 8500


def test_steps_are_measured_at_several_lengths(monkeypatch):
    seen = []

    def counted(inputs, *others, objective, **rest):
        seen.append(inputs.shape)
        objective(inputs, *others)

    monkeypatch.setattr("linrec.lab.bench.worker.train_step", counted)
    (job,) = make_jobs([TINY], ["gla"], [0])
    found = speed_by_length(job.config, sequences_per_second=1e9)
    # 9 steps in batches of 8
    assert [(speed["length"], speed["batch_size"]) for speed in found] == [(2, 36), (9, 8), (36, 2)]
    assert list(dict.fromkeys(seen)) == [(8, 9), (36, 2), (2, 36)]
    assert all(speed["tokens_per_second"] > 0 and speed["step_bytes"] > 0 for speed in found)
    # of a device on which a sequence takes a tenth of a second, smaller batches, and no sequences of seconds
    slow = speed_by_length(job.config, sequences_per_second=1.0)
    assert [(speed["length"], speed["batch_size"]) for speed in slow] == [(2, 4), (9, 1)]


def test_the_state_is_counted_at_the_end_of_a_sequence():
    jobs = make_jobs([TINY], ["attention", "attention(window=4)", "gla"], [0])
    grows, window, stays = (state_elements(job.config) for job in jobs)
    # 9 steps of 16 elements of keys and values, and their number; the cache of a window has one step less
    assert (grows, window) == (9 * 16 + 1, 3 * 16 + 1)
    assert stays == jobs[2].sizes.state
    # of both directions
    task = {"length": 8, "n_train": 16, "n_validation": 8, "n_test": 8}
    adding = Entry("adding", "adding", task=task, model={**TINY.model, "bidirectional": True})
    (job,) = make_jobs([adding], ["gla"], [0])
    assert state_elements(job.config) == job.sizes.state == 2 * stays


def test_a_length_without_memory_says_so_and_a_regression_is_measured_too():
    (job,) = make_jobs([TINY], [f"{OWN}:Hungry"], [0])
    for found in speed_by_length(job.config, sequences_per_second=1e9):
        assert found["tokens_per_second"] is None and found["step_bytes"] is None
    task = {"length": 8, "n_train": 16, "n_validation": 8, "n_test": 8}
    (job,) = make_jobs([dataclasses.replace(TINY, name="adding", recipe="adding", task=task)], ["gla"], [0])
    found = speed_by_length(job.config, sequences_per_second=1e9)
    assert [speed["length"] for speed in found] == [2, 8, 32]


def test_a_memory_across_the_stack_counts_once():
    # three segments of 3 steps: the memory of 2 tokens, the positions of the layers and of the stack, no more
    variant = "attention@recurrent_memory(segment_length=3, n_tokens=2)"
    (job,) = make_jobs([TINY], [variant], [0])
    model = job.config.model
    assert state_elements(job.config) == 2 * model.d_model + model.n_layers + 1
