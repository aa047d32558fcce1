"""Recipes of images as sequences of pixels."""

from linrec.lab.tasks import SequentialImages
from linrec.lab.tasks.cifar import NoisePaddedCIFAR, SequentialCIFAR
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.recipes.registry import causal, like, recipe


@recipe
def sequential_fashion_mnist() -> TrainConfig:
    """Fashion-MNIST or MNIST pixel by pixel, with S4D: give the folder of the files with --data.path.

    Source: chosen for this recipe after S4D (Gu et al., 2022), not tuned: 4 causal layers of width 128 with
    pre-norm and dropout, mean pooling over time, AdamW with a smaller learning rate and no weight decay for
    transition parameters, a cosine schedule over 10 epochs. Unlike in S4D, blocks also have a GLU channel
    mixer, so that the recipe suits every `--model.mixer`. The model of the lowest validation loss is kept.
    """
    return TrainConfig(
        name="sequential-fashion-mnist",
        task=SequentialImages(),
        model=causal(
            d_model=128, n_layers=4, mixer="s4d", d_channel_mixing=256, channel_mixing="glu", dropout=0.1
        ),
        optim=OptimConfig(
            lr=0.004,
            transition_lr=0.001,
            betas=(0.9, 0.98),
            weight_decay=0.05,
            warmup_steps=500,
            clip_norm=1.0,
        ),
        loop=LoopConfig(epochs=10, batch_size=64, matmul_precision="high", eval_every=430, keep="best"),
    )


@recipe
def sequential_cifar() -> TrainConfig:
    """CIFAR-10 in colour, pixel by pixel: give its binary version with --data.path.

    Source: the example in S4's released code (Gu, Goel and Ré, 2022), with S4D: 4 causal layers of width 128,
    N = 64, post-norm, dropout 0.1, mean pooling over time; AdamW with learning rate 0.01 and weight decay
    0.01, and learning rate 0.001 without decay for transition parameters; a cosine schedule over 100 epochs
    with batches of 64. The authors report more than 89% accuracy. The model of the lowest validation loss is
    kept.
    """
    return TrainConfig(
        name="sequential-cifar",
        task=SequentialCIFAR(),
        model=causal(
            d_model=128,
            n_layers=4,
            mixer="s4d",
            mixer_args={"d_state": 64},
            channel_mixing="none",
            norm_position="post",
            dropout=0.1,
        ),
        optim=OptimConfig(lr=0.01, transition_lr=0.001, betas=(0.9, 0.999), weight_decay=0.01),
        loop=LoopConfig(
            epochs=100,
            batch_size=64,
            matmul_precision="high",
            eval_every=700,
            keep="best",
            deterministic=False,
        ),
    )


@recipe
def noise_padded_cifar() -> TrainConfig:
    """CIFAR-10 row by row, followed by noise: give its binary version with --data.path.

    Source: coRNN (Rusch and Mishra, 2021) for the data, 1,000 steps, and for training, 120 epochs with
    batches of 100; coRNN reached 59.0%. The model is the model of `sequential-fashion-mnist`, not tuned, with
    last-step pooling: with mean pooling, the model would not need any memory.
    """
    loop = {"epochs": 120, "batch_size": 100, "eval_every": 450}
    task = NoisePaddedCIFAR()
    return like(sequential_fashion_mnist(), "noise-padded-cifar", task, model={"pooling": "last"}, loop=loop)
