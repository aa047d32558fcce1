"""The options of every command but `train`, whose options are those of a recipe.

This module does without PyTorch, so that `linrec COMMAND --help` answers at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from linrec.literals import DeviceName, Precision, SplitName


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a text; the generated text goes to standard output, messages go to standard error.

    Args:
        run: run folder of a language model.
        prompt: the text to continue; "-" reads it from standard input.
        prompt_file: a file with the text to continue.
        tokens: how many tokens to generate; fewer where the model ends the document before.
        temperature: 1 is the model's own distribution, 0 always takes the likeliest token.
        top_k: choose from so many of the likeliest tokens.
        top_p: choose from the likeliest tokens that have this probability together.
        seed: of the random numbers; the same one gives the same text.
        samples: texts to generate, with this seed and those that follow it; a line above each of several
            names its seed.
        save_state: file to keep the state in when all is generated.
        load_state: file that --save-state wrote, to go on from; the prompt, if there is one, follows.
        device: where to compute; "auto" takes CUDA, then MPS, then the CPU.
        trust_code: run the code of a mixer that the run names by an import path.
        precision: float32 throughout, or bfloat16 autocast.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
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
    device: DeviceName = "auto"
    trust_code: bool = False
    precision: Precision = "32-true"


@dataclass(frozen=True)
class TextOptions:
    """Another text than the run's own, in the tokens of the run's tokenizer.

    A text without splits is taken whole.

    Args:
        path: a text file, a folder of them, or a glob.
        dataset: name or path of a data set of Hugging Face.
        dataset_config: which configuration of the data set, where it has several.
        text_column: the column of the data set that holds the text.
    """

    path: Annotated[Path | None, tyro.conf.arg(aliases=["--data"])] = None
    dataset: str | None = None
    dataset_config: str | None = None
    text_column: str = "text"


@dataclass(frozen=True)
class EvalOptions:
    """Measure perplexity from windows of several lengths: train short, test long.

    Windows do not overlap, and each window starts from an empty state.

    The model predicts every token but the first token once, whatever the length.

    Writes perplexity.json and perplexity.png.

    Args:
        run: run folder of a language model.
        data: another text than the run's own.
        split: which split; by default the test split, or the validation split where there is none.
        lengths: tokens of a window, separated by commas; three dots go on in equal steps. By default that of
            training and 512,768,...,2048,3072,...,14336, as far as the text goes.
        carry: also evaluate with the state carried through the whole text.
        out: folder for the results; by default the run folder.
        device: where to compute; "auto" takes CUDA, then MPS, then the CPU.
        trust_code: run the code of a mixer that the run names by an import path.
        precision: float32 throughout, or bfloat16 autocast.
        batch_tokens: tokens that go through the model at once; fewer need less memory.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    data: TextOptions = field(default_factory=TextOptions)
    split: SplitName | None = None
    lengths: str | None = None
    carry: bool = False
    out: Path | None = None
    device: DeviceName = "auto"
    trust_code: bool = False
    precision: Precision = "32-true"
    batch_tokens: int = 2**14


@dataclass(frozen=True)
class InspectOptions:
    """Show forget values, token-mixing matrices, and transitions over a text.

    Writes inspection.html, its pictures as PNG files, and inspection.json.

    Args:
        run: run folder.
        prompt: the text to show the model.
        data: a text file, a folder of them, or a glob; without either, the run's own text or task.
        split: which split; by default one that was held out.
        tokens: how many tokens of it, from its beginning.
        matrices: token-mixing matrices, which are possible up to 1,024 tokens.
        out: folder to write to; by default RUN/inspection.
        device: where to compute; "auto" takes CUDA, then MPS, then the CPU.
        trust_code: run the code of a mixer that the run names by an import path.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    prompt: str | None = None
    data: Annotated[Path | None, tyro.conf.arg(name="data.path", aliases=["--data"])] = None
    split: SplitName | None = None
    tokens: int = 256
    matrices: bool = True
    out: Path | None = None
    device: DeviceName = "auto"
    trust_code: bool = False


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html with its pictures, from runs or tables of runs.

    Args:
        runs: run folders, folders of runs or of a suite, or tables of --collect.
        out: folder to write to; by default that of the one run, or the one that all runs lie in.
        baseline: rows.jsonl of a suite, result.json of earlier runs, or a table, to compare runs of the same
            settings with. The exit status is 1 where one has become worse.
        collect: write no report, but a table of the runs: rows.jsonl and curves.jsonl in the folder --out,
            which reports read in place of the run folders.
        trust_code: run the code of mixers that runs name by an import path.
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

    Args:
        suite: which tasks.
        mixers: names, or import paths of your own such as my_package.my_module:MyMixer; with arguments, as
            in 'gate_loop(n_heads=2)'; with plus signs, patterns over depth, as in gla+attention.
        tasks: those of the suite to run; by default all.
        data: where the files of a task are, as in shakespeare-char=input.txt; see the task's own `path`.
        seeds: of initialisation and order; the data are the same for all.
        parameters: of every model; by default those of the first mixer at the recipe's width.
        sweep: try a third, once and three times the recipe's learning rate with the first seed, and go on
            with the one of the lowest validation loss.
        lrs: learning rates to try instead of those.
        budget: minutes after which no more jobs are started.
        workers: jobs at a time; more than one need Ray.
        out: folder of the suite, by default bench/SUITE. What has ended there is not run again.
    """

    suite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SUITE")]
    mixers: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    parameters: int | None = None
    sweep: bool = False
    lrs: tuple[float, ...] = ()
    budget: float | None = None
    workers: int = 1
    out: Path | None = None


@dataclass(frozen=True)
class ConvertOptions:
    """Make a run folder of another library's checkpoint, to generate, evaluate, inspect and train from.

    `linrec train lm --init-from RUN` goes on from it.

    Args:
        checkpoint: a folder in the layout of Hugging Face, or the file of an RWKV.
        out: run folder to make.
        tokenizer: name or path; by default the tokenizer.json of the folder.
        length: tokens of context that the model is meant for.
    """

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    out: Path
    tokenizer: str | None = None
    length: int = 2048


@dataclass(frozen=True)
class DemoOptions:
    """Train two small GateLoops side by side and write a report.

    Args:
        out: folder for both runs and the report; runs of an earlier demo in it are replaced.
    """

    out: Path = Path("runs/demo")


OPTIONS: dict[str, type[Any]] = {
    "generate": GenerateOptions,
    "eval": EvalOptions,
    "inspect": InspectOptions,
    "report": ReportOptions,
    "bench": BenchOptions,
    "convert": ConvertOptions,
    "demo": DemoOptions,
}
"""The options of a command by its name."""
