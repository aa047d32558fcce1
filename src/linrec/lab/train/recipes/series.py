"""Recipes of speech, time series and videos."""

from linrec.lab.tasks.archives import Uea
from linrec.lab.tasks.bouncing_digits import BouncingDigits
from linrec.lab.tasks.ett import Ett
from linrec.lab.tasks.signals import SpeechCommands
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.recipes.registry import recipe
from linrec.models import SequenceClassifierConfig


@recipe
def speech_commands() -> TrainConfig:
    """Speech Commands, sample by sample: give the folder of its words with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for the 35 words: 6 bidirectional layers of
    width 128, N = 64, pre-norm, no dropout, mean pooling over time; AdamW with learning rate 0.01 and weight
    decay 0.05, and learning rate 0.001 without decay for transition parameters; 1,000 steps of warm-up, a
    cosine schedule over 40 epochs with batches of 16. S4 reached about 96.5%. The differences from S4 are
    listed in `lra-listops`.
    """
    return TrainConfig(
        name="speech-commands",
        task=SpeechCommands(),
        model=SequenceClassifierConfig(
            n_outputs=35,
            n_features=1,
            d_model=128,
            n_layers=6,
            mixer="s4d",
            mixer_args={"d_state": 64, "init": "legs"},
            channel_mixing="none",
        ),
        optim=OptimConfig(
            lr=0.01, transition_lr=0.001, betas=(0.9, 0.999), weight_decay=0.05, warmup_steps=1000
        ),
        loop=LoopConfig(
            epochs=40,
            batch_size=16,
            matmul_precision="high",
            eval_every=5000,
            checkpoint_every=5000,
            keep="best",
            deterministic=False,
        ),
    )


@recipe
def ett() -> TrainConfig:
    """Forecast the oil temperature of an electricity transformer, ETT: give its CSV file with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for ETTh1: 2 layers of width 128, N = 64,
    dropout 0.25, AdamW with learning rate 0.01, and 0.001 without decay for transition parameters, 10 epochs
    with batches of 50, evaluated five times per epoch.

    Differences from S4: the mixer is a causal S4D-LegS; layer norm is used; a cosine schedule replaces a
    schedule that depends on the validation loss; the model of the lowest validation loss is kept.
    """
    return TrainConfig(
        name="ett",
        task=Ett(),
        model=SequenceClassifierConfig(
            n_outputs=1,
            n_features=2,
            d_model=128,
            n_layers=2,
            mixer="s4d",
            mixer_args={"init": "legs"},
            channel_mixing="none",
            dropout=0.25,
            bidirectional=False,
            pooling="none",
        ),
        optim=OptimConfig(lr=0.01, transition_lr=0.001, betas=(0.9, 0.999), weight_decay=0.01),
        loop=LoopConfig(
            epochs=10, batch_size=50, matmul_precision="high", eval_every=32, keep="best", deterministic=False
        ),
    )


@recipe
def uea() -> TrainConfig:
    """A data set of the UEA archive, such as EigenWorms: give the folder of its .ts files with --data.path.

    Source: the settings of S5 on EigenWorms by Walker and others (2024, Log-NCDE): 2 layers of width 128, a
    state of 256 elements in 8 blocks, mean pooling over time; Adam with learning rate 0.001, up to 100,000
    steps with batches of 32, an evaluation every 1,000 steps, and early stopping after 10 evaluations without
    improvement; pooled splits. S5 reached 81.1 +- 3.7%, and the LRU 87.8 +- 2.8%.

    Differences from the source: the model of the lowest validation loss is kept instead of the best
    validation accuracy, and time is not an input.
    """
    return TrainConfig(
        name="uea",
        task=Uea(splits="pooled"),
        model=SequenceClassifierConfig(
            n_outputs=1,  # set by the data
            n_features=1,
            d_model=128,
            n_layers=2,
            mixer="s5",
            mixer_args={"d_state": 256, "n_blocks": 8},
            channel_mixing="none",
            bidirectional=False,
        ),
        optim=OptimConfig(lr=0.001, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant"),
        loop=LoopConfig(
            steps=100_000,
            batch_size=32,
            matmul_precision="high",
            eval_every=1000,
            keep="best",
            patience=10,
            deterministic=False,
        ),
    )


@recipe
def bouncing_digits() -> TrainConfig:
    """Videos of digits that bounce off the edges: give the folder of MNIST's files with --data.path.

    Source: chosen for this recipe, not tuned: a linear layer encodes the frames, and two causal GateLoop
    layers of width 256 predict the ten hidden frames.
    """
    return TrainConfig(
        name="bouncing-digits",
        task=BouncingDigits(),
        model=SequenceClassifierConfig(
            n_outputs=1,  # set by the task
            n_features=1,
            d_model=256,
            n_layers=2,
            mixer="gate_loop",
            d_channel_mixing=512,
            channel_mixing="swiglu",
            bidirectional=False,
            pooling="none",
        ),
        optim=OptimConfig(lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
        loop=LoopConfig(steps=5000, batch_size=32, matmul_precision="high", keep="best"),
    )
