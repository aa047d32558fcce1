"""The model card of a published run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linrec import __version__
from linrec.hf.model import LinrecForCausalLM
from linrec.lab.pages import markdown
from linrec.lab.train import Run
from linrec.lab.train.run import language_task
from linrec.models.config import spelled

__all__ = ["model_card"]

# measures of perplexity in the card, and their digits
DIGITS = {"perplexity": 3, "bits_per_byte": 4}

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

folder = {folder}  # the path of this folder, or the model's name on the Hub
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
        title=markdown(title),
        folder=json.dumps(title),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        mixer=f"`{spelled(pattern)}`",
        version=__version__,
    )
    return text + "".join([*_scores(run, perplexity), *_tasks(tasks), *_training(run)])


def _scores(run: Run, perplexity: Any) -> Iterator[str]:
    result = run.result or {}
    scores = [
        (split, measure, value)
        for split in ("validation", "test")
        for measure, value in result.get(split, {}).items()
        # some tasks have scores by class or by length too
        if isinstance(value, (int, float))
    ]
    if scores:
        yield "\n## Scores\n\n| split | measure | value |\n| --- | --- | --- |\n"
    for split, measure, value in scores:
        yield f"| {split} | {markdown(measure)} | {value:.4f} |\n"
    if perplexity is None:
        return
    yield f"\nPerplexity on {markdown(Path(perplexity['data']).name)}{_by(perplexity)}:\n\n"
    yield "| tokens in a window | per token | bits per byte |\n| --- | --- | --- |\n"
    for score in perplexity["scores"]:
        window = "state carried" if score["length"] is None else f"{score['length']:,}"
        told = ("–" if score[name] is None else f"{score[name]:.{n}f}" for name, n in DIGITS.items())
        yield f"| {window} | {' | '.join(told)} |\n"


def _tasks(tasks: Any) -> Iterator[str]:
    if tasks is None:
        return
    yield f"\nTasks of lm-eval {markdown(tasks['lm_eval'])}{_by(tasks)}:\n\n"
    yield "| task | examples shown | measure | value |\n| --- | --- | --- | --- |\n"
    for task, measures in tasks["scores"].items():
        for measure, value in measures.items():
            shots = tasks["shots"].get(task) or 0
            yield f"| {markdown(task)} | {shots} | {markdown(measure)} | {value:.4f} |\n"


def _by(content: Any) -> str:
    """Return the command of an evaluation, or an empty text for an evaluation from Python."""
    command = content.get("command")
    return "" if command is None else f", by <code>{markdown(command)}</code>"


def _training(run: Run) -> Iterator[str]:
    loop, device = run.config.loop, run.about.get("device", {})
    yield "\n## Training\n\n"
    if run.about.get("command") is not None:
        yield f"<pre>{markdown(run.about['command'])}</pre>\n\n"
    yield f"- tokens in a training sequence: {language_task(run).length:,}\n"
    if run.result is not None and "steps" in run.result:
        yield f"- steps: {run.result['steps']:,} of {loop.batch_size} sequences\n"
        yield f"- seed: {loop.seed}\n"
    yield f"- device: {markdown(device.get('name', device.get('type', 'unknown')))}\n"
    versions = (f"{name} {version}" for name, version in run.about.get("versions", {}).items())
    yield f"- versions: {markdown(', '.join(versions))}\n"
