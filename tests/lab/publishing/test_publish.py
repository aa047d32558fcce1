"""`linrec publish` and `linrec eval --tasks`, on a small run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from linrec.cli import main
from linrec.hf import from_hugging_face
from linrec.hf.tokenizer import fast_tokenizer
from linrec.lab.publishing.publish import push
from linrec.lab.train import TrainError, load_run
from linrec.text import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.text.conftest import byte_pairs
from tests.tiers import thorough

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXT = "a rose is a rose\n" * 60
TRAIN = [
    *("train", "lm", "--data.path", "text.txt", "--data.length", "16", "--data.tokenizer", "bytes"),
    *("--data.cache", "cache", "--model.mixer", "gla", "--model.d-model", "16", "--model.n-layers", "1"),
    *("--loop.steps", "40", "--loop.batch-size", "8", "--loop.device", "cpu", "--optim.warmup-steps", "2"),
    *("--optim.lr", "2e-2", "--out", "run"),
]
CHOICE = """\
task: toy_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATE = """\
task: toy_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: " rose"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(TRAIN) == 0
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the run folder, from a working directory of the test's own."""
    monkeypatch.chdir(tmp_path)
    return folder / "run"


@thorough
def test_a_published_run_is_loaded_and_generates_a_padded_batch(run: Path) -> None:
    assert main(["publish", str(run), "rose"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("rose").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("rose")
    ours = load_run(run).model()
    theirs = from_hugging_face("rose").state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())
    batch = tokenizer(["a rose is", "a"], return_tensors="pt", padding=True)
    assert batch.attention_mask[1].tolist() == [0] * 8 + [1]
    found = model.generate(**batch, max_new_tokens=8, do_sample=False)
    for text, row in zip(["a rose is", "a"], found, strict=True):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        assert torch.equal(row[-8:], alone[0, -8:])
    assert tokenizer.decode(found[0]) == "a rose is a rose\n"
    generate = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 8, "do_sample": False}
    together = generate(["a rose is", "a"], batch_size=2, **options)
    assert together == [generate(text, **options) for text in ("a rose is", "a")]
    assert model.config.max_position_embeddings == 16 and model.generation_config.eos_token_id == 256


@thorough
def test_damaged_weights_are_refused(run: Path) -> None:
    assert main(["publish", str(run), "damaged"]) == 0
    path = Path("damaged/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"damaged/model.safetensors cannot be loaded: its checksum is wrong"
    ):
        transformers.AutoModelForCausalLM.from_pretrained("damaged")


def test_the_card_has_the_scores_and_the_command(run: Path) -> None:
    text = str(run.parent / "text.txt")
    assert main(["eval", str(run), "--data", text, "--lengths", "16", "--device", "cpu"]) == 0
    assert main(["publish", str(run), "rose"]) == 0
    card = Path("rose/README.md").read_text()
    loss = load_run(run).result["validation"]["loss"]
    assert f"| validation | loss | {loss:.4f} |" in card and " ".join(["linrec", *TRAIN]) in card
    assert card.startswith("---\nlibrary_name: transformers\n") and "| 16 | " in card


# a heading, an image, a link and code, as a file of others may have in any field
MARKED = (
    "x\n\n# Heading\n<img src=x> [click](https://evil.example) ![i](www.evil.example) ``` | _a_ /home/me/b"
)


def test_fields_of_others_are_plain_text_in_the_card(run: Path) -> None:
    shutil.copytree(run, "run")
    stored = json.loads(Path("run/config.json").read_text())
    stored |= {"command": MARKED, "versions": {MARKED: MARKED}}
    stored["device"]["name"] = MARKED
    Path("run/config.json").write_text(json.dumps(stored))
    result = json.loads(Path("run/result.json").read_text())
    result["validation"] |= {MARKED: 1.0, "by class": [0.5], "none": None}
    Path("run/result.json").write_text(json.dumps(result))
    score = dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"), 2.0)
    perplexity = {"data": f"/home/me/{MARKED}", "command": MARKED, "trained_length": 16}
    perplexity |= {"scores": [{**score, "length": 16}, {**dict.fromkeys(score), "length": None}]}
    Path("run/perplexity.json").write_text(json.dumps(perplexity))
    tasks = {"scores": {MARKED: {MARKED: 0.5}}, "shots": {}, "command": MARKED, "lm_eval": MARKED}
    Path("run/tasks.json").write_text(json.dumps(tasks))
    assert main(["publish", "run", "rose"]) == 0
    card = Path("rose/README.md").read_text()
    _, _, told = card.partition("## Scores")
    assert told.count("Heading") == 10 and not [line for line in told.splitlines() if line.startswith("# ")]
    for mark in ("<img", "](", "https://", "www.", "`", "/home/me", "_a_"):
        assert mark not in told
    assert "| state carried | – | – |" in told and "by class" not in told
    # the weights have the mode of the other files
    assert len({path.stat().st_mode for path in Path("rose").iterdir()}) == 1


def test_a_published_folder_has_no_path_of_the_machine(run: Path) -> None:
    text = str(run.parent / "text.txt")
    assert main(["eval", str(run), "--data", text, "--lengths", "16", "--device", "cpu"]) == 0
    assert main(["publish", str(run), "rose"]) == 0
    for path in Path("rose").iterdir():
        assert str(run.parent).encode() not in path.read_bytes(), path.name


@pytest.mark.thorough
@pytest.mark.parametrize("imported", ["import linrec.hf", "pass"])
def test_others_load_it_with_or_without_remote_code(imported: str, run: Path) -> None:
    assert main(["publish", str(run), "rose"]) == 0
    trust = "" if "linrec" in imported else ", trust_remote_code=True"
    program = f"""
{imported}
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("rose"{trust})
print(type(model).__module__, sum(parameter.numel() for parameter in model.parameters()))
tokens = [model.generate(torch.tensor([[97]]), max_new_tokens=8, use_cache=use) for use in (True, False)]
print(torch.equal(*tokens))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    parameters = sum(parameter.numel() for parameter in load_run(run).model().parameters())
    assert done.stdout.split() == ["linrec.hf.model", str(parameters), "True"]


def test_folders_are_not_overwritten_and_half_folders_not_left(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("taken").mkdir()
    assert main(["publish", str(run), "taken"]) == 2
    assert "taken already exists" in capsys.readouterr().err

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", full)
    assert main(["publish", str(run), "rose"]) == 1
    assert "could not write rose: No space left on device" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["taken"]


def test_an_upload_creates_the_repository_and_sends_the_folder(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    class Hub:
        def create_repo(self, name: str, exist_ok: bool) -> str:
            assert exist_ok
            return f"https://hub/{name}"

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            sent.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr("linrec.lab.publishing.publish.HfApi", Hub)
    assert main(["publish", str(run), "rose", "--push", "me/rose"]) == 0
    assert "uploaded to https://hub/me/rose" in capsys.readouterr().out
    assert sent[0][0] == "me/rose" and {"README.md", "model.safetensors"} <= {*sent[0][1]}

    def refused(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no connection")

    monkeypatch.setattr(Hub, "upload_folder", refused)
    with pytest.raises(TrainError, match=r"could not upload rose to me/rose: no connection\."):
        push(Path("rose"), "me/rose")


@thorough
def test_tasks_of_lm_eval(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lm_eval")
    Path("tasks").mkdir()
    documents = [{"question": "a rose is a", "choices": ["rose", "qqqq"], "gold": 0}] * 6
    Path("tasks/documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    for name, task in (("choice", CHOICE), ("generate", GENERATE)):
        path = Path("tasks/documents.jsonl").absolute()
        Path(f"tasks/{name}.yaml").write_text(task.replace("FILE", f'"{path}"'))
    words = ["eval", str(run), "--tasks", "toy_choice", "toy_generate", "--device", "cpu"]
    assert main([*words, "--tasks-path", "tasks", "--limit", "4"]) == 0
    found = json.loads((run / "tasks.json").read_text())
    assert found["scores"]["toy_choice"]["acc,none"] == 1
    assert found["scores"]["toy_generate"]["exact_match,none"] == 1
    assert found["questions"] == {"toy_choice": 4, "toy_generate": 4}
    assert "toy_generate" in capsys.readouterr().out
    assert main(["publish", str(run), "rose"]) == 0
    assert "| toy_choice | 0 | acc,none | 1.0000 |" in Path("rose/README.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # lm-eval reads all of its tasks
        pytest.param(
            ["--tasks", "no_such_task"],
            "lm-eval knows no task 'no_such_task'",
            marks=pytest.mark.thorough,
        ),
        (["--tasks", "toy", "--lengths", "4"], "--lengths and --tasks exclude each other"),
        (["--tasks", "toy", "--data", "text.txt"], "--data and --tasks exclude each other"),
        (["--limit", "4"], "--limit needs --tasks"),
    ],
)
def test_options_of_eval_that_do_not_fit(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    assert main(["eval", str(run), *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def with_a_start() -> HuggingFaceTokenizer:
    backend = byte_pairs(TEXT)
    # linrec adds no special tokens
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    return HuggingFaceTokenizer(backend, name="pairs")


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharacterTokenizer.of([TEXT, "né\r\t 日"]), with_a_start()],
    ids=lambda t: t.name,
)
def test_tokens_are_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    fast_tokenizer(tokenizer).save_pretrained(tmp_path)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "né", "\r\n a", "日  \t", ""):
        known = (
            "".join(c for c in text if c in tokenizer.characters)
            if hasattr(tokenizer, "characters")
            else text
        )
        tokens = tokenizer.encode(known).tolist()
        assert fast(known).input_ids == tokens and fast.decode(tokens) == known
    assert fast.eos_token_id == tokenizer.end_of_document
