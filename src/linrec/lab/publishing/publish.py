"""Publish a run: a folder that transformers loads, with tokenizer, model card and code."""

from pathlib import Path

from huggingface_hub import HfApi
from transformers import GenerationConfig

from linrec import __version__
from linrec.errors import RunFolderError, TrainError
from linrec.extras import one_line
from linrec.files import creating
from linrec.hf.config import LinrecConfig
from linrec.hf.exchange import to_hugging_face
from linrec.hf.tokenizer import add_end, fast_tokenizer, make_room
from linrec.lab.publishing.card import model_card
from linrec.lab.publishing.harness import read_tasks
from linrec.lab.report.records import read_perplexity
from linrec.lab.train import Run
from linrec.lab.train.run import language_task, tokenizer_of, writing
from linrec.tensor_files import seal

__all__ = ["publish", "push"]

CODE = "modeling_linrec.py"
CLASSES = {
    "AutoConfig": "LinrecConfig",
    "AutoModel": "LinrecModel",
    "AutoModelForCausalLM": "LinrecForCausalLM",
    "AutoModelForSequenceClassification": "LinrecForSequenceClassification",
}
SOURCE = '''"""The model's classes, for `trust_remote_code=True`.

They need: pip install 'linrec[hf]>={version}'.
"""

from linrec.hf import {classes}

__all__ = [{names}]
'''


def publish(run: Run, folder: Path) -> None:
    """Write the folder of a language model that `AutoModelForCausalLM.from_pretrained` loads.

    The folder holds the weights, config.json, generation_config.json, the tokenizer, a model card with the
    run's scores, and a file of code that imports linrec. Who has imported `linrec.hf` needs no
    `trust_remote_code=True`.

    Args:
        run: the run of a language model.
        folder: the folder to create. It appears once it is complete.
    """
    task, tokenizer = language_task(run), tokenizer_of(run)
    if folder.exists():
        raise RunFolderError(f"{folder} already exists; choose another folder, or remove it.")
    model, fast = to_hugging_face(run.model()), fast_tokenizer(tokenizer)
    add_end(fast)
    make_room(model, fast)
    ids = {name: getattr(fast, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config: LinrecConfig = model.config
    config.max_position_embeddings = task.length
    config.auto_map = {auto: f"{Path(CODE).stem}.{name}" for auto, name in CLASSES.items()}
    for name, token in ids.items():
        setattr(config, name, token)
    model.generation_config = GenerationConfig(**ids)
    names = sorted(CLASSES.values())
    source = SOURCE.format(
        version=__version__, classes=", ".join(names), names=", ".join(f'"{name}"' for name in names)
    )
    card = model_card(run, model, folder.name, read_perplexity(run.path), read_tasks(run.path))
    with writing(f"write {folder}"), creating(folder) as partial:
        model.save_pretrained(partial)
        for weights in partial.glob("*.safetensors"):
            seal(weights)
        fast.save_pretrained(partial)
        (partial / CODE).write_text(source)
        (partial / "README.md").write_text(card, encoding="utf-8")


def push(folder: Path, repository: str) -> str:
    """Upload a folder to the Hugging Face hub, and return its address.

    Args:
        folder: the folder that `publish` wrote.
        repository: name of the repository, such as "me/my-model"; it is created if it does not exist.
    """
    hub = HfApi()
    try:
        address = hub.create_repo(repository, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    # the hub's client raises errors of several packages
    except Exception as error:
        raise TrainError(f"could not upload {folder} to {repository}: {one_line(error)}.") from error
    return str(address)
