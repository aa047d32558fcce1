"""What benchmarks are by default, as their publications have it: another number would be another task."""

import pytest

from linrec.lab import tasks
from linrec.lab.train import get_recipe

PUBLISHED = {
    # the Long Range Arena: its paper's section 2.2, and the generators of its code
    "listops": {
        **{"min_length": 501, "length": 1999, "depth": 10, "n_arguments": 10},
        **{"n_train": 96_000, "n_validation": 2_000, "n_test": 2_000},
    },
    "pathfinder": {
        **{"size": 32, "contour_length": 14},
        **{"n_train": 160_000, "n_validation": 20_000, "n_test": 20_000},
    },
    # S4's 4,096; a tenth of 25,000 reviews
    "imdb": {"length": 4096, "n_validation": 2500},
    "aan": {"length": 4000},
    # 45,000 and 5,000 images
    "sequential_cifar": {"n_validation": 5000, "permuted": False},
    # coRNN's steps
    "noise_padded_cifar": {"length": 1000},
    # S4's code
    "speech_commands": {"n_words": 35, "every": 1, "test_every": (2,)},
    "mackey_glass": {
        **{"length": 5000, "horizon": 15, "tau": 17, "washout": 100},
        **{"n_train": 1024, "n_validation": 64, "n_test": 64},
    },
    "ett": {"shown": 384, "horizon": 96, "target": "OT", "multivariate": False, "calendar": False},
    # the CRU's generator, of which S5 takes half of the frames
    "pendulum": {
        **{"length": 50, "n_frames": 100, "size": 24, "dt": 0.01, "push": 0.1},
        **{"n_train": 2000, "n_test": 1000},
    },
    # LEM's code: 1,001 points over a time of 400
    "fitzhugh_nagumo": {
        **{"length": 1000, "dt": 0.4},
        **{"n_train": 128, "n_validation": 128, "n_test": 1024},
    },
    # the code of latent ODEs, of which 50 of 100 points are given
    "irregular_sines": {
        **{"length": 100, "shown": 0.5, "duration": 5.0, "noise": 0.01},
        **{"n_train": 800, "n_test": 200},
    },
    # CfC's code, which pads 31 bits to 32
    "event_xor": {"length": 31, "dense": False, "n_train": 100_000, "n_test": 10_000},
    # Srivastava and others, section 3
    "bouncing_digits": {"length": 20, "shown": 10, "n_digits": 2, "size": 64, "shrink": 1, "fresh": True},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_task_is_the_published_one_by_default(name):
    task, fields = tasks.get(name)(), PUBLISHED[name]
    assert {field: getattr(task, field) for field in fields} == fields


def test_recipes_of_the_long_range_arena_have_its_tasks():
    found = {
        name: get_recipe(f"lra-{name}").task for name in ("image", "image-colour", "pathfinder", "path-x")
    }
    assert found["image"].grey and found["image"].n_features == 1
    assert not found["image-colour"].grey
    assert (found["pathfinder"].size, found["path-x"].size) == (32, 128)
    for name in ("listops", "text", "retrieval"):
        recipe = get_recipe(f"lra-{name}")
        assert recipe.task == type(recipe.task)()


def test_recipes_of_nonlinear_networks_have_the_batches_and_rates_of_their_code():
    # batch, learning rate, and epochs or steps; the rate of event-xor is linrec's
    expected = {
        "fitzhugh-nagumo": (32, 0.00904, 400),
        "irregular-sines": (50, 0.01, 500),
        "event-xor": (128, 0.001, 200),
        "har2": (64, 0.017, 250),
        "bidmc": (32, 0.00211, 500),
        "penn-treebank-char": (128, 0.00066, 200_000),
    }
    for name, numbers in expected.items():
        recipe = get_recipe(name)
        loop = recipe.loop
        assert (loop.batch_size, recipe.optim.lr, loop.steps or loop.epochs) == numbers, name
