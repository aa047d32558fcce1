"""Tasks of lm-eval (EleutherAI's language model evaluation harness) on a run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from linrec.errors import ConfigError
from linrec.extras import import_extra
from linrec.field_types import read_content
from linrec.hf.exchange import to_hugging_face
from linrec.hf.tokenizer import fast_tokenizer, make_room
from linrec.lab.train import Run
from linrec.lab.train.run import language_task, tokenizer_of, write_json
from linrec.literals import Precision

__all__ = ["FILE", "evaluate_tasks", "read_tasks"]

FILE = "tasks.json"
PURPOSE = "`linrec eval --tasks`"


class Tasks(TypedDict):
    """The fields of tasks.json that model cards rely on."""

    scores: dict[str, dict[str, float]]
    shots: dict[str, int | None]
    command: str | None
    lm_eval: str


def evaluate_tasks(
    run: Run,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    batch_tokens: int = 2**14,
    device: torch.device | str = "cpu",
    precision: Precision = "32-true",
    command: str | None = None,
) -> dict[str, dict[str, float]]:
    """Return the scores of tasks of lm-eval, and write them to tasks.json in the run folder.

    Texts longer than the training sequences lose their beginning, as lm-eval does for every model.

    Args:
        run: the run of a language model whose tokenizer has an end-of-document token.
        tasks: names of tasks or groups of lm-eval.
        include: a folder with YAML files of further tasks.
        shots: examples before each question; None is the number of each task.
        limit: number of questions of each task; None is all.
        batch_tokens: tokens that go through the model at once.
        device: where to compute.
        precision: "32-true", or "bf16-mixed" for autocast.
        command: command line to record.

    Returns:
        Scores by task and measure, with lm-eval's names, such as "acc,none".
    """
    evaluator = import_extra("lm_eval.evaluator", PURPOSE)
    manager = import_extra("lm_eval.tasks", PURPOSE).TaskManager(
        include_path=None if include is None else str(include)
    )
    length, tokenizer = language_task(run).length, tokenizer_of(run)
    if tokenizer.end_of_document is None:
        raise ConfigError(
            f"tasks need a tokenizer with an end-of-document token; {tokenizer.name!r} of {run.path} has "
            "no such token. Train with the tokenizer 'bytes' or a Hugging Face tokenizer."
        )
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ConfigError(
            f"lm-eval knows no task {unknown[0]!r}; `lm-eval ls tasks` lists its tasks. Tasks of your own "
            "need --tasks-path."
        )
    model, fast = to_hugging_face(run.model()), fast_tokenizer(tokenizer)
    make_room(model, fast)
    language_model = import_extra("lm_eval.models.huggingface", PURPOSE).HFLM(
        pretrained=model.to(device),
        tokenizer=fast,
        max_length=length,
        batch_size=max(1, batch_tokens // length),
        mixed_precision_dtype="bfloat16" if precision == "bf16-mixed" else None,
    )
    found = evaluator.simple_evaluate(
        language_model,
        tasks=list(tasks),
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    scores = {task: _plain(measures) for task, measures in found["results"].items()}
    about: dict[str, Any] = {
        "command": command,
        "shots": found["n-shot"],
        "questions": {task: counted["effective"] for task, counted in found["n-samples"].items()},
        "length": length,
        "precision": precision,
        "lm_eval": import_extra("lm_eval", PURPOSE).__version__,
    }
    write_json(run.path / FILE, {"scores": scores, **about})
    return scores


def read_tasks(folder: Path) -> dict[str, Any] | None:
    """Return the content of tasks.json in a run folder; None without that file."""
    return read_content(folder / FILE, Tasks, f"Delete it, or run `linrec eval {folder} --tasks` again.")


def _plain(measures: dict[str, Any]) -> dict[str, float]:
    """Return the measures; lm-eval writes names and sizes beside them, and "N/A" for unknown errors."""
    return {
        name: float(value)
        for name, value in measures.items()
        if "," in name and isinstance(value, (int, float)) and math.isfinite(value)
    }
