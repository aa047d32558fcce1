"""The options of every command except `train`, whose options depend on the recipe.

This module does not import PyTorch, so that `linrec COMMAND --help` answers at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from linrec.literals import DeviceName, Precision, SplitName

# options that several commands have
LanguageModelRun: TypeAlias = Annotated[
    Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="run folder of a language model.")
]
Device: TypeAlias = Annotated[
    DeviceName, tyro.conf.arg(help='where to compute; "auto" takes CUDA, then MPS, then the CPU.')
]
TrustCode: TypeAlias = Annotated[
    bool,
    tyro.conf.arg(help="allow running the code of a task or mixer that the run names by an import path."),
]
Autocast: TypeAlias = Annotated[Precision, tyro.conf.arg(help="float32 throughout, or bfloat16 autocast.")]


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text; the generated text goes to standard output, messages go to standard error.

    Args:
        prompt: the text to continue; "-" reads it from standard input.
        prompt_file: a file with the text to continue.
        tokens: number of tokens to generate; generation stops early when the model ends the document.
        temperature: divides the logits; 1 samples from the model's distribution, 0 takes the likeliest token.
        top_k: sample from the k likeliest tokens only.
        top_p: sample from the smallest set of likeliest tokens whose probabilities sum to at least p.
        seed: seed of the random numbers; the same seed gives the same text.
        samples: number of texts to generate, from consecutive seeds starting with --seed; with several texts,
            a line above each text names its seed.
        save_state: file for the model's state after the last token.
        load_state: file written by --save-state; generation continues from this state, after the prompt if
            there is a prompt.
        compile: compile the step, which takes some seconds.
    """

    run: LanguageModelRun
    prompt: str = ""
    prompt_file: Path | None = None
    tokens: int = 200
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    samples: int = 1
    save_state: Path | None = None
    load_state: Path | None = None
    device: Device = "auto"
    trust_code: TrustCode = False
    precision: Autocast = "32-true"
    compile: bool = False


@dataclass(frozen=True)
class ServeOptions:
    """Answer requests of OpenAI's clients over HTTP, many at once.

    After Ctrl-C or SIGTERM, the server refuses new requests, finishes open requests, and ends.

    Args:
        model: run folder of a language model, or a folder that `linrec publish` wrote.
        host: address to listen at; 0.0.0.0 takes requests from other machines.
        port: port to listen at.
        name: name of the model, by default the name of the folder.
        slots: the most requests that are answered at the same time.
        snapshots: memory for states of prompts and answers, from which further requests start.
        state_dir: a folder where snapshots are kept while the server does not run.
        draft_tokens: number of tokens to guess from the text so far and check in one step; 0 is none.
        max_waiting: the most requests that wait for a slot; more are refused.
        max_length: the most tokens of a prompt and its answer.
        state_bytes: memory for the states and growing caches of the requests that are answered; others wait.
        api_key_file: a file with the keys that clients may use, one a line; without it, no key is needed.
        chat_template: a Jinja template of chats, by default the template of the folder.
        grace: seconds that open requests have to end.
        patience: seconds that a client may take to send a request, or to read what it was sent.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_FOLDER")]
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    slots: int = 256
    snapshots: str = "1GiB"
    state_dir: Path | None = None
    draft_tokens: int = 0
    max_waiting: int = 1024
    max_length: int = 32_768
    state_bytes: str | None = None
    api_key_file: Path | None = None
    chat_template: Path | None = None
    grace: float = 30.0
    patience: float = 30.0
    device: Device = "auto"
    trust_code: TrustCode = False
    precision: Autocast = "32-true"


@dataclass(frozen=True)
class TextOptions:
    """A text to use instead of the run's own, tokenised with the run's tokenizer.

    A text without splits is used as a whole.

    Args:
        path: a text file, a folder of text files, or a glob.
        dataset: name or path of a Hugging Face data set.
        dataset_config: configuration of the data set, if it has several.
        text_column: column of the data set that holds the text.
    """

    path: Annotated[Path | None, tyro.conf.arg(aliases=["--data"])] = None
    dataset: str | None = None
    dataset_config: str | None = None
    text_column: str = "text"


@dataclass(frozen=True)
class EvalOptions:
    """Measure perplexity from windows of several lengths: train short, test long.

    Windows do not overlap, and each window starts from an empty state.

    The model predicts every token but the first token once, for every length.

    Writes perplexity.json and perplexity.png. With --tasks, runs tasks of lm-eval instead, and writes
    tasks.json.

    Args:
        data: a text to use instead of the run's own.
        split: split to evaluate; by default the test split, or the validation split without a test split.
        lengths: tokens per window, separated by commas; three dots continue in equal steps. By default the
            training length and 512,768,...,2048,3072,...,14336, up to the length of the text.
        carry: also evaluate with the state carried through the whole text.
        out: folder for the results; by default the run folder.
        batch_tokens: tokens that go through the model at once; fewer tokens need less memory.
        tasks: names of tasks of lm-eval to run instead, such as lambada_openai hellaswag.
        tasks_path: a folder with YAML files of your own tasks.
        shots: examples before each question of a task; by default the number of each task.
        limit: number of questions of each task; by default all.
    """

    run: LanguageModelRun
    data: TextOptions = field(default_factory=TextOptions)
    split: SplitName | None = None
    lengths: str | None = None
    carry: bool = False
    out: Path | None = None
    device: Device = "auto"
    trust_code: TrustCode = False
    precision: Autocast = "32-true"
    batch_tokens: int = 2**14
    tasks: tuple[str, ...] = ()
    tasks_path: Path | None = None
    shots: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class InspectOptions:
    """Show forget values, token-mixing matrices, and transitions over a text.

    Writes inspection.html, its pictures as PNG files, and inspection.json.

    Args:
        run: run folder.
        prompt: the text to run the model on.
        data: a text file, a folder of text files, or a glob. Without --prompt and --data, the model runs on
            the text or the task of its training.
        split: split of the text or the task; by default a held-out split.
        tokens: number of tokens to use, from the beginning of the text.
        matrices: show token-mixing matrices, which are available for up to 1,024 tokens.
        out: folder for the results; by default RUN/inspection.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    prompt: str | None = None
    data: Annotated[Path | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    split: SplitName | None = None
    tokens: int = 256
    matrices: bool = True
    out: Path | None = None
    device: Device = "auto"
    trust_code: TrustCode = False


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html with its pictures, from runs or tables of runs.

    Args:
        runs: run folders, folders of runs or of a suite, or tables of --collect.
        out: folder for the report; by default the run folder of a single run, or the folder that holds all
            runs.
        baseline: rows.jsonl of a suite, result.json of earlier runs, or a table, as a baseline for runs of
            the same settings. The exit status is 1 if a run is worse than its baseline.
        collect: write a table of the runs instead of a report: rows.jsonl and curves.jsonl in the folder
            --out, which reports read in place of the run folders. Runs are added to a table that exists.
        trust_code: allow running the code of tasks and mixers that the runs name by an import path.
    """

    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...", help_behavior_hint="")
    ]
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    baseline: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RESULTS ...", help_behavior_hint="")] = ()
    collect: bool = False
    trust_code: bool = False


@dataclass(frozen=True)
class BenchOptions:
    """Compare mixers on the tasks of a suite, with equal parameters, equal steps and several seeds.

    The suite `streams` compares learners on streams instead.

    Args:
        suite: name of the suite, which lists the tasks.
        mixers: names of mixers, or import paths of your own such as my_package.my_module:MyMixer. Arguments
            follow in brackets, as in 'gate_loop(n_heads=2)'; plus signs alternate mixers over the layers, as
            in gla+attention.
        tasks: tasks of the suite to run; by default all.
        data: where the files of a task are, as in shakespeare-char=input.txt; see the task's own `path`.
        seeds: seeds of initialisation and batch order; the data are the same for all seeds.
        parameters: number of parameters of every model; by default the number of the first mixer's model at
            the recipe's width.
        sweep: train the first seed at 1/3, 1 and 3 times the recipe's learning rate, and the other seeds at
            the rate with the lowest validation loss.
        lrs: learning rates to try instead of the sweep's.
        budget: minutes after which no more jobs are started.
        workers: number of jobs to run at the same time, which share the GPUs.
        learners: learners of the suite `streams`, such as rtrl; by default all.
        steps: steps of each stream; by default those of the suite.
        out: folder of the suite; by default bench/SUITE. Jobs that are done there are not run again.
    """

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    mixers: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    parameters: int | None = None
    sweep: bool = False
    lrs: tuple[float, ...] = ()
    budget: float | None = None
    workers: int = 1
    learners: tuple[str, ...] = ()
    steps: int | None = None
    out: Path | None = None


@dataclass(frozen=True)
class QueueOptions:
    """Run as many jobs of a queue file as fit into the time, and resume what was stopped the next time.

    Args:
        jobs: queue file: a section per job, with its command, its estimated minutes and its priority.
        minutes: time of this allocation; 0 starts no job, and shows what is left.
        folder: folder of the runs and of all that the next allocation needs.
        per_gpu: jobs that share a GPU; the `per-gpu` of a job goes before. Without a GPU, jobs share the
            processor.
        grace: seconds at the end of the time in which jobs write checkpoints.
        carry: MiB of checkpoints that the next allocation can read. A run whose checkpoint is larger is never
            split: it starts only if all of it fits into the time.
        slim: at the end, delete the weights of runs that have ended, and all else that neither resuming nor
            tables need.
    """

    jobs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="JOBS")]
    minutes: float
    folder: Path = Path("queue")
    per_gpu: int = 1
    grace: float = 30.0
    carry: float = 48.0
    slim: bool = False


@dataclass(frozen=True)
class LearnerOptions:
    """The learner, in `linrec learn` and in `linrec train`.

    Args:
        learner: name of the learner.
        learner_args: its arguments, such as credit=spatial.
        chunk: steps that are learnt at a time.
    """

    learner: str | None = None
    learner_args: tuple[str, ...] = ()
    chunk: int | None = None


@dataclass(frozen=True)
class TrainLearnerOptions(LearnerOptions):
    """The learner of `linrec train`.

    Args:
        learner: name of the learner that takes the training steps; None is backpropagation through whole
            sequences.
        learner_args: its arguments, such as credit=spatial.
        chunk: steps that are learnt at a time; None takes whole sequences.
        update: when a learner changes the parameters: after each chunk that has targets, or after the
            sequence.
    """

    update: Literal["chunk", "sequence"] = "chunk"


@dataclass(frozen=True)
class LearnOptions(LearnerOptions):
    """Learn online from a stream, step after step, until it ends or the run is stopped.

    Each step is predicted, scored, and then learnt from. A run that is stopped or killed goes on with
    --resume, and reaches the same numbers.

    Args:
        stream: name of a stream, a file, or "-" for standard input. A .csv file is a table of numbers, of
            which the next row is predicted; of other files, it is the next byte.
        steps: steps in all; by default until the stream ends or the run is stopped.
        out: run folder; by default runs/learn-STREAM.
        resume: run folder to go on in; then the other options are those of the run, but for --steps.
        init_from: run folder whose model goes on learning: of `linrec learn`, or a language model of bytes.
        stream_args: arguments of the stream, such as every=5000.
        mixer: name of the mixer of every block.
        mixer_args: its arguments, such as r_min=0.9 r_max=0.999.
        d_model: width of the model.
        n_layers: number of blocks.
        model_args: further fields of the model, such as channel_mixing=none norm=none.
        chunk: steps that are learnt at a time; the parameters change after each chunk.
        lr: learning rate.
        momentum: train by SGD with this Nesterov momentum in place of Adam.
        clip_norm: maximum norm of the gradients.
        rows: rows of the stream that are learnt from side by side.
        seed: seed of the stream, and of the model's initial values.
        window: steps between two records in metrics.jsonl.
        checkpoint_every: steps between checkpoints.
        follow: wait for more at the end of a file.
        trust_code: allow a mixer that the run of --resume or --init-from names by an import path.
    """

    stream: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STREAM")] = ""
    steps: int | None = None
    out: Path | None = None
    resume: Path | None = None
    init_from: Path | None = None
    learner: str = "rtrl"
    stream_args: tuple[str, ...] = ()
    mixer: str = "lru"
    mixer_args: tuple[str, ...] = ()
    d_model: int = 32
    n_layers: int = 1
    model_args: tuple[str, ...] = ()
    chunk: int = 8
    lr: float = 3e-3
    momentum: float | None = None
    clip_norm: float | None = 1.0
    rows: int = 1
    seed: int = 0
    window: int = 1000
    checkpoint_every: int = 10_000
    follow: bool = False
    device: Device = "cpu"
    trust_code: bool = False


@dataclass(frozen=True)
class ConvertOptions:
    """Convert another library's checkpoint to a run folder, to generate, evaluate, inspect and train from.

    `linrec train lm --init-from RUN` trains the converted model further. With --like, convert a run back to
    the checkpoint's layout.

    Args:
        checkpoint: a folder in the Hugging Face layout, or the weight file of an RWKV model; with --like, a
            run folder.
        out: run folder to create; with --like, the checkpoint folder to create.
        tokenizer: name or path of a tokenizer; by default the tokenizer.json of the checkpoint's folder.
        length: tokens of context that the model was trained for.
        like: the checkpoint folder that the run was converted from; its config.json and its tokenizer are
            copied.
        trust_code: allow running the code of a task or mixer that a run names by an import path.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    out: Path
    tokenizer: str | None = None
    length: int = 2048
    like: Path | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class PublishOptions:
    """Write the folder of a language model that Hugging Face transformers loads.

    The folder holds the weights, the tokenizer, and a model card with the run's scores, those of `linrec
    eval` included.

    Args:
        folder: folder to create.
        push: name of a repository on the Hugging Face hub, such as me/my-model, to upload the folder to.
    """

    run: LanguageModelRun
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    push: Annotated[str | None, tyro.conf.arg(metavar="REPOSITORY")] = None
    trust_code: TrustCode = False


@dataclass(frozen=True)
class DemoOptions:
    """Train two small GateLoops side by side and write a report.

    Args:
        out: folder for both runs and the report; runs of an earlier demo in this folder are replaced.
    """

    out: Path = Path("runs/demo")


OPTIONS_OF: dict[str, type[Any]] = {
    "generate": GenerateOptions,
    "serve": ServeOptions,
    "eval": EvalOptions,
    "inspect": InspectOptions,
    "report": ReportOptions,
    "bench": BenchOptions,
    "bench queue": QueueOptions,
    "learn": LearnOptions,
    "convert": ConvertOptions,
    "publish": PublishOptions,
    "demo": DemoOptions,
}
"""The options of every command, by its name."""
