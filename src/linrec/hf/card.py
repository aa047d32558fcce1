"""The model card of a published run."""

from collections.abc import Iterator
from typing import Any

from linrec import __version__
from linrec.hf.model import LinrecForCausalLM
from linrec.models.pattern import spelled
from linrec.train import Run
from linrec.train.language import language_task

__all__ = ["model_card"]

HEADER = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [linrec, {tags}]
---

# {title}

A language model of {parameters:,} parameters with the mixer {mixer}, trained and published with
linrec {version}.

## Use

```bash
pip install 'linrec[hf]'
```

```python
import linrec.hf  # or pass trust_remote_code=True below
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{title}"  # the path of this folder, or the model's name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=50)
print(tokenizer.decode(tokens[0]))
```
"""


def model_card(
    run: Run, model: LinrecForCausalLM, title: str, perplexity: Any = None, tasks: Any = None
) -> str:
    """Return the text of README.md: how to use the model, its scores, and how it was trained.

    Args:
        run: the run.
        model: the model of the run.
        title: title of the card.
        perplexity: the content of perplexity.json of `linrec eval`; None leaves its table out.
        tasks: the content of tasks.json of `linrec eval --tasks`; None leaves its table out.
    """
    pattern = model.config.model_config().mixer_pattern
    text = HEADER.format(
        tags=", ".join(dict.fromkeys(pattern)),
        title=title,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mixer=f"`{spelled(pattern)}`",
        version=__version__,
    )
    return text + "".join([*_scores(run, perplexity), *_tasks(tasks), *_training(run)])


def _scores(run: Run, perplexity: Any) -> Iterator[str]:
    result = run.result or {}
    scores = [(split, *score) for split in ("validation", "test") for score in result.get(split, {}).items()]
    if scores:
        yield "\n## Scores\n\n| split | measure | value |\n| --- | --- | --- |\n"
    for split, measure, value in scores:
        yield f"| {split} | {measure} | {value:.4f} |\n"
    if perplexity is None:
        return
    yield f"\nPerplexity on {perplexity['data']}, by `{perplexity['command']}`:\n\n"
    yield "| tokens in a window | per token | bits per byte |\n| --- | --- | --- |\n"
    for score in perplexity["scores"]:
        window = "state carried" if score["length"] is None else f"{score['length']:,}"
        yield f"| {window} | {score['perplexity']:.3f} | {score['bits_per_byte']:.4f} |\n"


def _tasks(tasks: Any) -> Iterator[str]:
    if tasks is None:
        return
    yield f"\nTasks of lm-eval {tasks['lm_eval']}, by `{tasks['command']}`:\n\n"
    yield "| task | examples shown | measure | value |\n| --- | --- | --- | --- |\n"
    for task, measures in tasks["scores"].items():
        for measure, value in measures.items():
            yield f"| {task} | {tasks['shots'].get(task, 0)} | {measure} | {value:.4f} |\n"


def _training(run: Run) -> Iterator[str]:
    loop = run.config.loop
    yield "\n## Training\n\n"
    if run.about["command"] is not None:
        yield f"```bash\n{run.about['command']}\n```\n\n"
    yield f"- tokens in a training sequence: {language_task(run).length:,}\n"
    if run.result is not None:
        yield f"- steps: {run.result['steps']:,} of {loop.batch_size * loop.accumulate} sequences\n"
        yield f"- seed: {loop.seed}\n"
    yield f"- device: {run.about['device'].get('name', run.about['device']['type'])}\n"
    versions = ", ".join(f"{name} {version}" for name, version in run.about["versions"].items())
    yield f"- versions: {versions}\n"
