"""Recipes of speech, time series and films."""

from linrec.models import SequenceClassifierConfig
from linrec.tasks.bouncing_digits import BouncingDigits
from linrec.tasks.ett import Ett
from linrec.tasks.speech_commands import SpeechCommands
from linrec.tasks.uea import Uea
from linrec.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.train.recipes.registry import recipe


@recipe
def speech_commands() -> TrainConfig:
    """Speech Commands, sample by sample: give the folder of its words with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for the 35 words: 6 layers of width 128 in
    both directions, N = 64, pre-norm, no dropout, the mean over the steps; AdamW with a learning rate of
    0.01, 0.001 and no decay for what makes the transition, weight decay 0.05, 1,000 steps of warm-up, a
    cosine over 40 epochs in batches of 16. It reached around 96.5%. What differs here is what differs in
    `lra-listops`.
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
    """Forecasts of the oil temperature of a transformer, ETT: give its CSV file with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for ETTh1: 2 layers of width 128, N = 64,
    dropout of 0.25, AdamW with a learning rate of 0.01, 0.001 and no decay for what makes the transition, 10
    epochs in batches of 50, judged five times an epoch. Here the mixer is S4D-LegS, causal, layers are
    normalised, a cosine takes the place of a schedule that looks at the validation loss, and the model of the
    lowest one is kept.
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

    Source: the settings of S5 for EigenWorms of Walker and others (2024, Log-NCDE): 2 layers of width 128,
    256 numbers of state in 8 blocks, the mean over the steps; Adam with a learning rate of 0.001, up to
    100,000 steps in batches of 32, of which every 1,000 are judged, until 10 times in a row were not better;
    pooled splits. It reached 81.1 +- 3.7%, and their LRU 87.8 +- 2.8%. Here the model of the lowest
    validation loss is kept, not that of the best accuracy, and time is no input.
    """
    return TrainConfig(
        name="uea",
        task=Uea(splits="pooled"),
        model=SequenceClassifierConfig(
            n_outputs=1,  # the data say
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
    """Films of digits that bounce off the edges: give the folder of MNIST's files with --data.path.

    Source: chosen here, and not tuned: frames are read by a linear layer, and two causal layers of GateLoop
    of width 256 foretell the ten that are hidden.
    """
    return TrainConfig(
        name="bouncing-digits",
        task=BouncingDigits(),
        model=SequenceClassifierConfig(
            n_outputs=1,  # the task says
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
