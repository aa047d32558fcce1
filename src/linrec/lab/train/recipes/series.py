"""Recipes of speech, time series, videos, dynamical systems and irregular times."""

from linrec.lab.tasks.archives import Tser, Uea
from linrec.lab.tasks.automata import EventXor
from linrec.lab.tasks.babyai import BabyAI
from linrec.lab.tasks.bouncing_digits import BouncingDigits
from linrec.lab.tasks.dynamics import FitzHughNagumo, IrregularSines
from linrec.lab.tasks.ett import Ett, Forecast
from linrec.lab.tasks.har2 import Har2
from linrec.lab.tasks.recordings import Recordings
from linrec.lab.tasks.sepsis import Sepsis
from linrec.lab.tasks.signals import Sc09, SpeechCommands
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.recipes.long_range_arena import lra_listops
from linrec.lab.train.recipes.registry import causal, gate_loops, like, long_loop, recipe
from linrec.models import preset


@recipe
def speech_commands() -> TrainConfig:
    """Speech Commands, sample by sample: give the folder of its words with --data.path.

    Source: S4's released configuration (Gu, Goel and Ré, 2022) for the 35 words: 6 bidirectional layers of
    width 128, N = 64, pre-norm, no dropout, mean pooling over time; AdamW with learning rate 0.01 and weight
    decay 0.05, and learning rate 0.001 without decay for transition parameters; 1,000 steps of warm-up, a
    cosine schedule over 40 epochs with batches of 16. S4 reached about 96.5%. The differences from S4 are
    listed in `lra-listops`.
    """
    return like(
        lra_listops(),
        "speech-commands",
        SpeechCommands(),
        model={"d_model": 128, "mixer_args": {"d_state": 64, "init": "legs"}, "norm_position": "pre"},
        optim={"warmup_steps": 1000},
        loop={"batch_size": 16, "eval_every": 5000, "checkpoint_every": 5000},
    )


@recipe
def sc09() -> TrainConfig:
    """Predict every sample of spoken digits from the samples before: give the folder with --data.path.

    Bits per sample are the loss / ln 2.

    Source: SaShiMi (Goel and others, 2022) for the data. SaShiMi with 5.8M parameters has 1.873 bits per
    sample, WaveNet 1.925, Mamba with 6.1M 1.852 (Gu and Dao, 2023, table 4). The released configuration has
    the preset "sashimi" of 4.1M parameters, batches of 32, AdamW and up to 1,000 epochs.

    Differences from SaShiMi: a cosine schedule over 100 epochs; the model of the lowest validation loss is
    kept; the first sample is predicted from a token of its own.
    """
    return TrainConfig(
        name="sc09",
        task=Sc09(),
        model=preset("sashimi"),
        optim=OptimConfig(lr=0.004, transition_lr=0.001, betas=(0.9, 0.999), warmup_steps=1000),
        loop=LoopConfig(
            epochs=100,
            batch_size=32,
            precision="bf16-mixed",
            matmul_precision="high",
            eval_every=970,
            keep="best",
            deterministic=False,
        ),
    )


@recipe
def recordings() -> TrainConfig:
    """Predict every sample of recordings from those before: give a folder of wav files with --data.path.

    Bits per sample are the loss / ln 2. `examples/audio.py` writes samples of the trained model to wav files.

    Source: SaShiMi (Goel and others, 2022), with the model and the settings of `sc09`.
    """
    loop = {"steps": 20_000, "eval_every": 500}
    return like(sc09(), "recordings", Recordings(), loop=loop)


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
        model=causal(
            d_model=128,
            n_layers=2,
            mixer="s4d",
            mixer_args={"init": "legs"},
            channel_mixing="none",
            dropout=0.25,
            pooling="none",
        ),
        optim=OptimConfig(lr=0.01, transition_lr=0.001, betas=(0.9, 0.999), weight_decay=0.01),
        loop=long_loop(epochs=10, batch_size=50, eval_every=32),
    )


@recipe
def forecast() -> TrainConfig:
    """Forecast series of a CSV file, such as ECL.csv or WTH.csv: give the file with --data.path.

    Source: the recipe `ett`; not tuned.
    """
    return like(ett(), "forecast", Forecast(), loop={"eval_every": 70})


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
        model=causal(
            d_model=128,
            n_layers=2,
            mixer="s5",
            mixer_args={"d_state": 256, "n_blocks": 8},
            channel_mixing="none",
        ),
        optim=OptimConfig(lr=0.001, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant"),
        loop=long_loop(steps=100_000, batch_size=32, eval_every=1000, patience=10),
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
        model=causal(**gate_loops(256), pooling="none"),
        optim=OptimConfig(lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
        loop=LoopConfig(steps=5000, batch_size=32, matmul_precision="high", keep="best"),
    )


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
        model=causal(d_model=16, n_layers=1, mixer="gate_loop", channel_mixing="none", pooling="none"),
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
        model=causal(**gate_loops(64), pooling="last"),
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
        model=causal(**gate_loops(64), pooling="none"),
        optim=OptimConfig(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, clip_norm=1.0),
        loop=LoopConfig(epochs=500, batch_size=50, matmul_precision="high", eval_every=160, keep="best"),
    )


@recipe
def sepsis() -> TrainConfig:
    """Tell whether a patient in intensive care gets a sepsis: give PhysioNet's folder with --data.path.

    Source: the released code of Neural CDE (Kidger and others, 2020): learning rate 0.0032, up to 200 epochs
    with batches of 1,024. Neural CDE has an area under the curve of 0.880.

    Differences from Neural CDE: two layers of GateLoop, AdamW with a cosine schedule; the model of the lowest
    validation loss is kept, not that of the highest validation accuracy.
    """
    return TrainConfig(
        name="sepsis",
        task=Sepsis(),
        model=causal(**gate_loops(64), pooling="last"),
        optim=OptimConfig(lr=0.0032, betas=(0.9, 0.999), weight_decay=0.01, warmup_steps=100, clip_norm=1.0),
        loop=LoopConfig(epochs=50, batch_size=1024, matmul_precision="high", eval_every=28, keep="best"),
    )


@recipe
def babyai() -> TrainConfig:
    """Imitate the bot of BabyAI, which follows instructions in a grid world; needs the extra "babyai".

    Source: BabyAI (Chevalier-Boisvert and others, 2019) for the worlds, the instructions and the bot. The
    model and its settings are chosen for this recipe, not tuned.
    """
    return like(bouncing_digits(), "babyai", BabyAI(), model=gate_loops(128), loop={"batch_size": 64})


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
        model=causal(d_model=64, n_layers=1, mixer="gate_loop", channel_mixing="none", pooling="last"),
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
        model=causal(d_model=128, n_layers=1, mixer="gate_loop", channel_mixing="none", pooling="last"),
        optim=OptimConfig(lr=0.00211, betas=(0.9, 0.999), weight_decay=0.0),
        loop=LoopConfig(epochs=500, batch_size=32, matmul_precision="high", eval_every=870, keep="best"),
    )
