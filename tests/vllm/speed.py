"""Compare vLLM and the engine of linrec on one core of a CPU: tokens per second of processor time.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m tests.vllm.speed

Requests come at once, with prompts of 3 to 200 tokens and answers of 16 greedy tokens. The processor time
includes the reading of the prompts. Each mixer and server runs in a process of its own.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from linrec.models import LanguageModel, ModelConfig

MIXERS = ("gla", "hgru", "mamba2")
COUNTS = (1, 8, 32, 128)
NEW = 16
VOCAB = 1024


def make(mixer: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(vocab_size=VOCAB, d_model=256, n_layers=4, mixer=mixer)).eval()


def with_engine(model: LanguageModel) -> Callable[[list[list[int]]], None]:
    from linrec.serve import Engine

    def answer(texts: list[list[int]]) -> None:
        engine = Engine(model, slots=max(COUNTS), snapshots=0)
        requests = [engine.submit(text, n_tokens=NEW, temperature=0) for text in texts]
        assert all(len(request.result()) == NEW for request in requests)

    return answer


def with_vllm(model: LanguageModel) -> Callable[[list[list[int]]], None]:
    # in this process, whose time is measured
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams, TokensPrompt

    from linrec.hf import to_hugging_face

    folder = tempfile.mkdtemp()
    to_hugging_face(model, folder)
    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=max(COUNTS),
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=2**30,
    )
    options = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def answer(texts: list[list[int]]) -> None:
        asked = [TokensPrompt(prompt_token_ids=text) for text in texts]
        ended = engine.generate(asked, options, use_tqdm=False)
        assert all(len(request.outputs[0].token_ids) == NEW for request in ended)

    return answer


def measure(server: str, mixer: str) -> list[float]:
    """Return tokens per second of processor time for each number of requests, the best of three."""
    answer = {"engine": with_engine, "vllm": with_vllm}[server](make(mixer))
    drawn, rates = torch.Generator().manual_seed(1), []
    for count in COUNTS:
        lengths = torch.randint(3, 201, (count,), generator=drawn).tolist()
        texts = [torch.randint(VOCAB, (length,), generator=drawn).tolist() for length in lengths]
        answer(texts)
        times = []
        for _ in range(3):
            start = time.process_time()
            answer(texts)
            times.append(time.process_time() - start)
        rates.append(count * NEW / min(times))
    return rates


def main() -> None:
    if len(sys.argv) == 3:
        print("RATES", *(f"{rate:,.0f}" for rate in measure(*sys.argv[1:])))
        return
    print(f"| requests at once | {' | '.join(map(str, COUNTS))} |")
    print(f"| --- |{' --- |' * len(COUNTS)}")
    for mixer in MIXERS:
        for server in ("vllm", "engine"):
            command = [sys.executable, "-m", "tests.vllm.speed", server, mixer]
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rates = next(line.split()[1:] for line in ended.stdout.splitlines() if line.startswith("RATES"))
            print(f"| {mixer}, {server} | {' | '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main()
