"""Recipes of images as sequences of pixels."""

from linrec.lab.tasks import SequentialImages
from linrec.lab.tasks.cifar import NoisePaddedCIFAR, SequentialCIFAR
from linrec.lab.tasks.photos import ImageFolders
from linrec.lab.tasks.pixels import ImageGeneration
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.recipes.registry import causal, like, long_loop, recipe
from linrec.models import ModelConfig, image_preset


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
        loop=long_loop(epochs=100, batch_size=64, eval_every=700),
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


@recipe
def mnist_generation() -> TrainConfig:
    """Predict every pixel of MNIST from the pixels before: give the folder of the files with --data.path.

    Bits per dimension are the loss / ln 2.

    Source: Katharopoulos and others (2020), section 4.2.1, for MNIST: 8 layers of width 256 with a channel
    mixing of 1,024, learning rate 0.0001, 250 epochs with batches of 10. Linear transformers have 0.644 bits
    per dimension, softmax attention 0.621 (table 1).

    Differences: the mixer is GateLoop, so positions are not embedded; AdamW with a cosine schedule replaces
    RAdam; the model of the lowest validation loss is kept.
    """
    return TrainConfig(
        name="mnist-generation",
        task=ImageGeneration(),
        model=ModelConfig(vocab_size=257, d_model=256, n_layers=8, d_channel_mixing=1024),
        optim=OptimConfig(lr=0.0001, betas=(0.9, 0.999), weight_decay=0.0, warmup_steps=1000),
        loop=long_loop(epochs=250, batch_size=10, eval_every=5500),
    )


@recipe
def cifar_generation() -> TrainConfig:
    """Predict every value of CIFAR-10 from the values before: give its binary version with --data.path.

    Source: Katharopoulos and others (2020), section 4.2.2: the model of `mnist-generation` with 16 layers,
    and batches of 4. Linear transformers have 3.40 bits per dimension, softmax attention 3.47, after a
    week on one GPU (table 2).
    """
    task = ImageGeneration(images="cifar10")
    loop = {"epochs": 50, "batch_size": 4, "eval_every": 11250, "precision": "bf16-mixed"}
    return like(mnist_generation(), "cifar-generation", task, model={"n_layers": 16}, loop=loop)


@recipe
def imagenet() -> TrainConfig:
    """Classify photographs in folders, such as ImageNet-1k: give the folder with --data.path.

    Source: HGRN (Qin, Yang and Zhong, 2023), tables 7 and 16 and the authors' code, for HGRN in DeiT-Tiny:
    300 epochs with batches of 2,048, AdamW with learning rate 0.0005 and weight decay 0.05, 10 epochs of
    warm-up, clipping at 5. HGRN has an accuracy of 74.40%, DeiT-Tiny 72.20%.

    Differences: only random crops and flips change the images, see `ImageFolders`; ten photographs of each
    class are held out for validation; there is no average of the weights.
    """
    return TrainConfig(
        name="imagenet",
        task=ImageFolders(),
        model=image_preset("deit-tiny-hgrn"),
        optim=OptimConfig(
            lr=0.0005, betas=(0.9, 0.999), weight_decay=0.05, warmup_steps=6200, min_lr=0.00001, clip_norm=5.0
        ),
        loop=long_loop(epochs=300, batch_size=2048, precision="bf16-mixed", eval_every=620),
    )
