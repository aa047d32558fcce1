"""Recipes of the Long Range Arena."""

from linrec.lab.tasks.arena import ListOps, Pathfinder
from linrec.lab.tasks.cifar import SequentialCIFAR
from linrec.lab.tasks.texts import AAN, IMDb
from linrec.lab.train.config import OptimConfig, TrainConfig
from linrec.lab.train.recipes.registry import classifier, like, long_loop, recipe


@recipe
def lra_listops() -> TrainConfig:
    """ListOps of the Long Range Arena: the value of an expression of 500 to 2,000 tokens.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for ListOps: 6 bidirectional layers of width
    256, N = 4, post-norm, no dropout, mean pooling over time; AdamW with learning rate 0.01 and weight decay
    0.05, and learning rate 0.001 without decay for transition parameters; 12,000 steps of warm-up, a cosine
    schedule over 40 epochs with batches of 32. S4 reached 59.5%.

    Differences from S4: the mixer is S4D-LegS; each direction has its own mixer; layer norm replaces batch
    norm; step sizes have the smaller learning rate, too, which S4 does not do in ListOps, Text and Retrieval;
    the model of the lowest validation loss is kept.
    """
    return TrainConfig(
        name="lra-listops",
        task=ListOps(),
        model=classifier(
            d_model=256,
            n_layers=6,
            mixer="s4d",
            mixer_args={"d_state": 4, "init": "legs"},
            channel_mixing="none",
            norm_position="post",
        ),
        optim=OptimConfig(
            lr=0.01, transition_lr=0.001, betas=(0.9, 0.999), weight_decay=0.05, warmup_steps=12_000
        ),
        loop=long_loop(epochs=40, batch_size=32, eval_every=3000, checkpoint_every=3000),
    )


@recipe
def lra_text() -> TrainConfig:
    """Text of the Long Range Arena, IMDb reviews by bytes: give them with --data.path or --data.dataset.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for IMDb: as for ListOps, with pre-norm, 5,000
    steps of warm-up and 32 epochs with batches of 16. S4 reached 86.5%, with the model selected on the test
    split. The differences from S4 are listed in `lra-listops`; in addition, 2,500 reviews are held out for
    validation.
    """
    return like(
        lra_listops(),
        "lra-text",
        IMDb(),
        model={"norm_position": "pre"},
        optim={"warmup_steps": 5000},
        loop={"epochs": 32, "batch_size": 16, "eval_every": 1400, "checkpoint_every": 1400},
    )


@recipe
def lra_retrieval() -> TrainConfig:
    """Retrieval of the Long Range Arena, pairs of papers by bytes: give the folder with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for the ACL Anthology Network: as for
    `lra-text`, with 20 epochs, batches of 64, and a head that compares the means of the two papers. S4
    reached 91.0%.
    """
    loop = {"epochs": 20, "batch_size": 64, "eval_every": 2300, "checkpoint_every": 2300}
    return like(lra_text(), "lra-retrieval", AAN(), loop=loop)


@recipe
def lra_image() -> TrainConfig:
    """Image of the Long Range Arena, CIFAR-10 in grey: give its binary version with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for CIFAR-10 in grey: as for ListOps, with
    width 512, N = 64, dropout 0.1, 18,000 steps of warm-up and 200 epochs with batches of 50. S4 reached
    88.5%. The differences from S4 are listed in `lra-listops`. See `lra-image-colour` for images in colour.
    """
    return like(
        lra_listops(),
        "lra-image",
        SequentialCIFAR(grey=True),
        model={"d_model": 512, "mixer_args": {"d_state": 64, "init": "legs"}, "dropout": 0.1},
        optim={"warmup_steps": 18_000},
        loop={"epochs": 200, "batch_size": 50, "eval_every": 1800, "checkpoint_every": 1800},
    )


@recipe
def lra_image_colour() -> TrainConfig:
    """`lra-image` in colour, which is not a task of the Arena: give the binary version with --data.path.

    Source: HGRN (Qin, Yang and Zhong, 2023), whose released scripts for the Image task read colour images.
    Everything else is as in `lra-image`. Accuracies are not comparable with the Arena's Image task.
    """
    return like(lra_image(), "lra-image-colour", SequentialCIFAR())


@recipe
def lra_pathfinder() -> TrainConfig:
    """Pathfinder of the Long Range Arena, 32 x 32: tell whether a dashed path connects two disks.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for Pathfinder: as for ListOps, with N = 64,
    pre-norm, learning rates of 0.004 and 0.001, 50,000 steps of warm-up and 200 epochs with batches of 64. S4
    reached 94.0%. The differences from S4 are listed in `lra-listops`.
    """
    return like(
        lra_listops(),
        "lra-pathfinder",
        Pathfinder(),
        model={"mixer_args": {"d_state": 64, "init": "legs"}, "norm_position": "pre"},
        optim={"lr": 0.004, "warmup_steps": 50_000},
        loop={"epochs": 200, "batch_size": 64, "eval_every": 2500, "checkpoint_every": 2500},
    )


@recipe
def lra_path_x() -> TrainConfig:
    """Path-X of the Long Range Arena: Pathfinder in images of 128 x 128, 16,384 steps.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for Path-X: as for Pathfinder, with initial
    step sizes from 0.0001, a learning rate of 0.001 for all parameters, and 50 epochs with batches of 16. S4
    reached 96.0%.
    """
    pathfinder = lra_pathfinder()
    return like(
        pathfinder,
        "lra-path-x",
        Pathfinder(size=128),
        model={"mixer_args": {**pathfinder.model.mixer_args, "dt_min": 1e-4}},
        optim={"lr": 0.001},
        loop={"epochs": 50, "batch_size": 16, "eval_every": 10_000},
    )
