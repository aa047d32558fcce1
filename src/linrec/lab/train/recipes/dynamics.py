"""Recipes of dynamical systems and irregular times, with the settings of nonlinear recurrent networks."""

from linrec.lab.tasks.archives import Tser
from linrec.lab.tasks.automata import EventXor
from linrec.lab.tasks.dynamics import FitzHughNagumo, IrregularSines
from linrec.lab.tasks.signals import Har2
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.recipes.registry import recipe
from linrec.models import SequenceClassifierConfig


@recipe
def fitzhugh_nagumo() -> TrainConfig:
    """Predict the next value of a spiking neuron with a fast and a slow time scale.

    Source: LEM's released code (Rusch and others, 2022): one layer of width 16, Adam with learning rate
    0.00904, 400 epochs with batches of 32; the model of the lowest validation loss is kept. LEM reached a
    root mean squared error of 0.0024.

    Differences from LEM: the mixer is GateLoop, with pre-norm; there are five epochs between evaluations.
    """
    return TrainConfig(
        name="fitzhugh-nagumo",
        task=FitzHughNagumo(),
        model=SequenceClassifierConfig(
            n_outputs=1,
            n_features=1,
            d_model=16,
            n_layers=1,
            mixer="gate_loop",
            channel_mixing="none",
            bidirectional=False,
            pooling="none",
        ),
        optim=OptimConfig(lr=0.00904, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant"),
        loop=LoopConfig(epochs=400, batch_size=32, eval_every=20, keep="best"),
    )


@recipe
def event_xor() -> TrainConfig:
    """Tell whether the number of ones is odd in a bit string that is given as events.

    Source: the released code of CfC (Hasani and others, 2022), for CfC with mixed memory: one layer of width
    64, learning rate 0.005, clipping at 10, 200 epochs with batches of 128. This CfC reached 99.72 +- 0.08%.

    Differences from CfC: the model is the model of the generated tasks, with last-step pooling; AdamW with a
    cosine schedule from 0.001 replaces RMSprop, whose learning rate falls by 5% per epoch;
    the model of the lowest validation loss is kept. The time between events is a feature. With AdamW and
    0.005, CfC with mixed memory stays at chance.
    """
    return TrainConfig(
        name="event-xor",
        task=EventXor(),
        model=SequenceClassifierConfig(
            n_outputs=2,
            n_features=2,
            d_model=64,
            n_layers=2,
            mixer="gate_loop",
            d_channel_mixing=128,
            channel_mixing="swiglu",
            bidirectional=False,
            pooling="last",
        ),
        optim=OptimConfig(lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=10.0),
        loop=LoopConfig(epochs=200, batch_size=128, matmul_precision="high", eval_every=781, keep="best"),
    )


@recipe
def irregular_sines() -> TrainConfig:
    """Predict the hidden values of a sine of changing frequency, from the values before.

    Source: the released code of latent ODEs (Rubanova and others, 2019): learning rate 0.01, 500 epochs with
    batches of 50.

    Differences from latent ODEs: the model is the model of the generated tasks, with half the width; AdamW
    with a cosine schedule replaces Adamax, whose learning rate falls by 0.1% per step; the model of the
    lowest validation loss is kept. The time between steps is a feature.
    """
    return TrainConfig(
        name="irregular-sines",
        task=IrregularSines(),
        model=SequenceClassifierConfig(
            n_outputs=1,
            n_features=3,
            d_model=64,
            n_layers=2,
            mixer="gate_loop",
            d_channel_mixing=128,
            channel_mixing="swiglu",
            bidirectional=False,
            pooling="none",
        ),
        optim=OptimConfig(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
        loop=LoopConfig(epochs=500, batch_size=50, matmul_precision="high", eval_every=160, keep="best"),
    )


@recipe
def har2() -> TrainConfig:
    """Tell two groups of activities apart, HAR-2: give the folder UCI HAR Dataset with --data.path.

    Source: coRNN's released code (Rusch and Mishra, 2021): one layer of width 64, Adam with learning rate
    0.017, 250 epochs with batches of 64. coRNN reached 97.2%.

    Differences from coRNN: the mixer is GateLoop, with pre-norm; persons are held out for validation, and the
    model of the lowest validation loss is kept.
    """
    return TrainConfig(
        name="har2",
        task=Har2(),
        model=SequenceClassifierConfig(
            n_outputs=2,
            n_features=9,
            d_model=64,
            n_layers=1,
            mixer="gate_loop",
            channel_mixing="none",
            bidirectional=False,
            pooling="last",
        ),
        optim=OptimConfig(lr=0.017, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant"),
        loop=LoopConfig(epochs=250, batch_size=64, matmul_precision="high", eval_every=100, keep="best"),
    )


@recipe
def bidmc() -> TrainConfig:
    """Estimate a heart rate, BIDMC32HR, or BIDMC32RR, BIDMC32SpO2: give the folder with --data.path.

    Source: LEM's released code (Rusch and others, 2022) for the heart rate: one layer of width 128, Adam with
    learning rate 0.00211, 500 epochs with batches of 32; the model of the lowest validation loss is kept. LEM
    reached a root mean squared error of 0.85. The code of UnICORNN (Rusch and Mishra, 2021), with three
    layers of this width, has 1.31 for the heart rate and 1.00 for respiration.

    Differences from LEM: the mixer is GateLoop, with pre-norm; a cosine schedule replaces a learning rate
    that falls to a tenth after 250 epochs.
    """
    return TrainConfig(
        name="bidmc",
        task=Tser(splits="pooled", n_dimensions=2),
        model=SequenceClassifierConfig(
            n_outputs=1,
            n_features=2,
            d_model=128,
            n_layers=1,
            mixer="gate_loop",
            channel_mixing="none",
            bidirectional=False,
            pooling="last",
        ),
        optim=OptimConfig(lr=0.00211, betas=(0.9, 0.999), weight_decay=0.0),
        loop=LoopConfig(epochs=500, batch_size=32, matmul_precision="high", eval_every=870, keep="best"),
    )
