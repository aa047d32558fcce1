"""Recipes of language models."""

from typing import Any

from linrec.lab.tasks import LanguageModeling
from linrec.lab.tasks.translation import Translation
from linrec.lab.train.config import LoopConfig, OptimConfig, TrainConfig
from linrec.lab.train.recipes.registry import language_model, like, long_loop, recipe
from linrec.models import EncoderConfig, EncoderDecoderConfig, preset

# the articles are a single stream, because the rows of this data set are lines, not articles
_WIKITEXT103: dict[str, Any] = {
    "dataset": "Salesforce/wikitext",
    "dataset_config": "wikitext-103-raw-v1",
    "tokenizer": "gpt2",
}
_GATED = {"output_gate": True, "output_projection": True}


@recipe
def lm() -> TrainConfig:
    """A language model of any mixer on any text: name it with --data.path or --data.dataset.

    Source: the sizes of `shakespeare-char`, with settings that suit most texts: bytes as tokens, no
    dropout, bfloat16, 5,000 steps with 64 sequences of 512 tokens. All settings are only a starting point.
    """
    return TrainConfig(
        name="lm",
        task=LanguageModeling(length=512),
        model=language_model(
            d_model=384, n_layers=6, mixer_args=_GATED, d_channel_mixing=1024, tie_embeddings=True
        ),
        optim=OptimConfig(
            lr=0.001, betas=(0.9, 0.98), weight_decay=0.1, warmup_steps=200, min_lr=0.0001, clip_norm=1.0
        ),
        loop=long_loop(steps=5000, batch_size=64, precision="bf16-mixed", eval_batches=20, keep="last"),
    )


@recipe
def translation() -> TrainConfig:
    """Translation by an encoder-decoder of any mixers: give pairs with --data.path or --data.dataset.

    A folder has the files train.de, train.en and so on; --data.source and --data.target name the languages.
    The defaults are bytes as tokens, a bidirectional encoder and a decoder of GateLoop with cross-attention.

    Source: the smallest Transformer for IWSLT'14 in fairseq (Ott and others, 2019) has 6 layers of width 512
    on each side, label smoothing 0.1, dropout 0.3, Adam with betas (0.9, 0.98), learning rate 0.0005 with an
    inverse square root decay after 4,000 steps, and weight decay 0.0001. Here there are 4 layers of width
    256, decoupled weight decay 0.05, clipping at 1, and 64 sentences in a batch. All settings are only a
    starting point.
    """
    sizes: dict[str, Any] = {"d_model": 256, "n_layers": 4, "d_channel_mixing": 1024, "dropout": 0.1}
    return TrainConfig(
        name="translation",
        task=Translation(),
        model=EncoderDecoderConfig(
            vocab_size=1,  # set by the data
            encoder=EncoderConfig(vocab_size=1, **sizes),
            share_embeddings=True,
            tie_embeddings=True,
            **sizes,
        ),
        optim=OptimConfig(
            lr=0.0005,
            betas=(0.9, 0.98),
            weight_decay=0.05,
            schedule="inverse-sqrt",
            warmup_steps=4000,
            clip_norm=1.0,
            label_smoothing=0.1,
        ),
        loop=long_loop(steps=50_000, batch_size=64, precision="bf16-mixed", eval_every=1000),
    )


@recipe
def shakespeare_char() -> TrainConfig:
    """Shakespeare by character on one GPU: give its text with --data.path.

    Source: nanoGPT (Karpathy, 2022), config/train_shakespeare_char.py: 6 layers, width 384, context 256,
    batch 64, 5,000 steps, learning rate 0.001 falling to 0.0001, 100 steps of warm-up, betas (0.9, 0.99),
    weight decay 0.1, clipping at 1, dropout 0.2; the first 90% of the 1,115,394 characters are for training
    and the last 10% for validation. nanoGPT's Transformer reaches a validation loss of 1.4697, the lowest of
    evaluations every 250 steps. For this Transformer, with rotary instead of learned positions, pass
    `--model.mixer attention --model.mixer-args.n-heads 6 --model.mixer-args.dropout 0.2
    --model.d-channel-mixing 1536`. The GateLoop model of this recipe has the same number of parameters,
    10.7M.
    """
    return TrainConfig(
        name="shakespeare-char",
        task=LanguageModeling(tokenizer="characters", length=256),
        model=language_model(
            d_model=384,
            n_layers=6,
            mixer_args=_GATED,
            d_channel_mixing=960,
            dropout=0.2,
            tie_embeddings=True,
        ),
        optim=OptimConfig(
            lr=0.001, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=100, min_lr=0.0001, clip_norm=1.0
        ),
        loop=long_loop(steps=5000, batch_size=64, precision="bf16-mixed", eval_every=250),
    )


@recipe
def shakespeare_char_cpu() -> TrainConfig:
    """Shakespeare by character in a few minutes on a CPU: give its text with --data.path.

    Source: nanoGPT (Karpathy, 2022), the CPU settings of its README: 4 layers, width 128, context 64,
    batch 12, 2,000 steps, no dropout, everything else as in `shakespeare-char`. nanoGPT's Transformer reaches
    a validation loss of 1.88; for this Transformer, pass `--model.mixer attention
    --model.mixer-args.n-heads 4 --model.d-channel-mixing 512`.
    """
    model = {"d_model": 128, "n_layers": 4, "d_channel_mixing": 320, "dropout": 0.0}
    task = LanguageModeling(tokenizer="characters", length=64)
    loop = LoopConfig(steps=2000, batch_size=12, eval_every=250, keep="best", device="cpu")
    return like(shakespeare_char(), "shakespeare-char-cpu", task, model=model, loop=vars(loop))


@recipe
def penn_treebank_char() -> TrainConfig:
    """Penn Treebank by character: give Mikolov's files with --data.path 'data/ptb.char.*.txt'.

    The files are in the folder data of simple-examples.tgz, Mikolov's examples of rnnlm: ptb.char.train.txt,
    ptb.char.valid.txt and ptb.char.test.txt, with a space after each character, and an underscore for a
    space. The spaces are dropped, and the end of a line is a token. `linrec eval` reports bits per character,
    which are the loss / ln 2.

    Source: LEM's released configuration (Rusch and others, 2022): one layer of width 1,024, Adam with
    learning rate 0.00066, clipping at 1, 200,000 steps with batches of 128 sequences of 150 characters. LEM
    reached 1.25 bits per character; expRNN and nnRNN, with the same length, about 1.5.

    Differences from LEM: the mixer is GateLoop, with pre-norm; there is neither dropout nor an L2 penalty nor
    an average of models; windows begin with an empty state; the model of the lowest validation loss is kept.
    """
    return TrainConfig(
        name="penn-treebank-char",
        task=LanguageModeling(tokenizer="characters", drop_spaces=True, length=150),
        model=language_model(d_model=1024, n_layers=1, channel_mixing="none"),
        optim=OptimConfig(
            lr=0.00066, betas=(0.9, 0.999), weight_decay=0.0, schedule="constant", clip_norm=1.0
        ),
        loop=long_loop(steps=200_000, batch_size=128, eval_every=1000),
    )


@recipe
def penn_treebank() -> TrainConfig:
    """Penn Treebank by word: give Mikolov's files with --data.path 'data/ptb.[tv]*.txt'.

    The files are ptb.train.txt, ptb.valid.txt and ptb.test.txt in the folder data of simple-examples.tgz.
    They have 929,589, 73,760 and 82,430 tokens of a vocabulary of 10,000, with `<unk>` for rare words and
    `<eos>` for the end of a line. The perplexity by word is exp(loss).

    Source: the medium LSTM of Zaremba and others (2014), "Recurrent neural network regularization": two
    layers of width 650, dropout 0.5, 39 epochs with batches of 20 sequences of 35 words that continue each
    other, clipping at 5. It has a perplexity of 82.7 on the test split (table 1).

    Differences: the mixer is GateLoop, with pre-norm; AdamW with a cosine schedule replaces gradient descent
    at a learning rate of 1, which falls from the seventh epoch on; the model of the lowest validation loss is
    kept.
    """
    return TrainConfig(
        name="penn-treebank",
        task=LanguageModeling(tokenizer="words", length=35),
        model=language_model(d_model=650, n_layers=2, channel_mixing="none", dropout=0.5),
        optim=OptimConfig(lr=0.001, betas=(0.9, 0.999), weight_decay=0.01, clip_norm=5.0),
        loop=long_loop(epochs=39, batch_size=20, carry_state=True, eval_every=1300),
    )


@recipe
def enwik8() -> TrainConfig:
    """The bytes of Wikipedia, enwik8 or text8: give the unpacked file with --data.path enwik8.

    The file of 100,000,000 bytes is in http://mattmahoney.net/dc/enwik8.zip. The first 90,000,000 bytes
    train, the next 5,000,000 validate, and the last 5,000,000 test. Bits per byte are the loss / ln 2;
    `linrec eval` reports them.

    Source: Transformer-XL (Dai and others, 2019), its released `run_enwik8_base.sh`, for the splits and for
    its model of 12 layers of width 512, 41M parameters: 400,000 steps with batches of 22 sequences of 512
    bytes, Adam with learning rate 0.00025, a cosine schedule, dropout 0.1, clipping at 0.25. It has 1.06 bits
    per byte (table 2), with a memory of 512 bytes in training and of 2,100 in the test.

    Differences: the mixer is GateLoop, and so the number of parameters is another; states are not carried
    from window to window.
    """
    return TrainConfig(
        name="enwik8",
        task=LanguageModeling(held_out_bytes=5_000_000, length=512),
        model=language_model(d_model=512, n_layers=12, mixer_args=_GATED, d_channel_mixing=1536, dropout=0.1),
        optim=OptimConfig(lr=0.00025, betas=(0.9, 0.999), weight_decay=0.0, clip_norm=0.25),
        loop=long_loop(
            steps=400_000, batch_size=22, precision="bf16-mixed", eval_every=4000, eval_batches=200
        ),
    )


@recipe
def hg38() -> TrainConfig:
    """The human genome by base: give a FASTA file with --data.path, a BED file with --data.intervals.

    Source: HyenaDNA (Nguyen and others, 2023), its smallest model: 2 layers of width 128, 1,024 bases, AdamW
    with learning rate 0.0006, weight decay 0.1, batches of 256, 10,000 steps.

    Differences: documents follow each other in a window, cut by a reset, where HyenaDNA takes the end of an
    interval; there are no special tokens.
    """
    return TrainConfig(
        name="hg38",
        task=LanguageModeling(tokenizer="characters", documents=True, length=1024),
        model=language_model(d_model=128, n_layers=2, mixer="hyena", d_channel_mixing=512),
        optim=OptimConfig(lr=0.0006, betas=(0.9, 0.999), weight_decay=0.1, warmup_steps=100, clip_norm=1.0),
        loop=long_loop(
            steps=10_000,
            batch_size=256,
            precision="bf16-mixed",
            eval_every=1000,
            eval_batches=20,
            keep="last",
        ),
    )


@recipe
def wikitext103_hgrn() -> TrainConfig:
    """WikiText-103 with HGRN's model of 46M parameters, from tables 1 and 16 of its paper.

    Source: HGRN (Qin, Yang and Zhong, 2023), table 16: 50,265 tokens, batches of 128 sequences of 512 tokens,
    50,000 steps, Adam with betas (0.9, 0.98) and decoupled weight decay 0.2, learning rate 0.0005 after
    4,000 steps of warm-up, then inverse square root decay; no clipping. Table 1 reports perplexities of 24.14
    (validation) and 24.82 (test). As in the authors' scripts, the text is a single stream without article
    boundaries. The scripts have 100,000 steps and 8,000 steps of warm-up instead. The paper does not give
    the precision; this recipe uses bfloat16.
    """
    return TrainConfig(
        name="wikitext103-hgrn",
        task=LanguageModeling(**_WIKITEXT103, length=512, vocab_size=50265),
        model=preset("wikitext103-hgrn"),
        optim=OptimConfig(
            lr=0.0005, betas=(0.9, 0.98), weight_decay=0.2, schedule="inverse-sqrt", warmup_steps=4000
        ),
        loop=long_loop(steps=50_000, batch_size=128, precision="bf16-mixed", eval_every=1000, keep="last"),
    )


@recipe
def wikitext103_gateloop() -> TrainConfig:
    """WikiText-103 with GateLoop's model of 125M parameters, from table 4 of its paper.

    The mixers have an output gate and an output projection, which the paper's equations do not have; see
    `linrec.models.preset`.

    Source: GateLoop (Katsch, 2023), table 4: 100 epochs with batches of 16; learning rate 0.000125 and weight
    decay 0.25, and learning rate 0.0001 without weight decay for the transitions; betas (0.9, 0.98), 5,000
    steps of warm-up, a cosine schedule. Table 1 reports a test perplexity of 13.4. The paper gives neither
    the sequence length nor the precision; this recipe uses 512 tokens and bfloat16, and clips gradients at 1.
    """
    return TrainConfig(
        name="wikitext103-gateloop",
        task=LanguageModeling(**_WIKITEXT103, length=512),
        model=preset("wikitext103"),
        optim=OptimConfig(
            lr=0.000125,
            transition_lr=0.0001,
            betas=(0.9, 0.98),
            weight_decay=0.25,
            warmup_steps=5000,
            clip_norm=1.0,
        ),
        loop=long_loop(
            epochs=100,
            batch_size=16,
            precision="bf16-mixed",
            eval_every=5000,
            checkpoint_every=5000,
            keep="last",
        ),
    )
