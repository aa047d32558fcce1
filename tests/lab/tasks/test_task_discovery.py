import pytest

from linrec.lab import tasks


def test_every_task_is_found_by_its_file_name_and_states_what_needs_no_model():
    assert "memory_horizon" in tasks.names()
    for name in tasks.names():
        task = tasks.get(name)()
        assert task.section in ("task", "data")
        # what only the data can tell is not known yet
        if task.vocab_size is not None:
            assert task.vocab_size > 1 and task.n_outputs > 1
            assert 0 < task.chance < 1


def test_hyphens_and_underscores_are_equal():
    assert tasks.get("memory-horizon") is tasks.get("memory_horizon") is tasks.MemoryHorizon


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("memory-horizn", "memory_horizon"),
        ("language-model", "language_modeling"),
    ],
)
def test_an_unknown_name_gives_the_nearest_match(name, nearest):
    with pytest.raises(ValueError, match=f"no task '{name}'; did you mean '{nearest}'"):
        tasks.get(name)


@pytest.mark.parametrize("name", ["base", "synthetic", "linrec", ""])
def test_what_is_no_task_is_refused(name):
    with pytest.raises(ValueError, match=f"no task '{name}'.*'memory_horizon'"):
        tasks.get(name)
