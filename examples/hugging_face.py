"""Train a small language model, publish it, and use it with the libraries of Hugging Face.

pip install 'linrec[eval]' peft
python examples/hugging_face.py
"""

import sys
from pathlib import Path

from linrec.cli import main

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/hugging-face")
folder.mkdir(parents=True)
(folder / "text.txt").write_text("a rose is a rose is a rose\n" * 200)

# a task of lm-eval: which of two words follows
questions = folder / "questions.json"
questions.write_text('{"text": "a rose is a", "words": ["rose", "thorn"]}\n')
(folder / "roses.yaml").write_text(f"""
task: roses
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{questions.absolute()}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: words
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
""")

# train, evaluate, publish
run, published = str(folder / "run"), str(folder / "roses")
sizes = "--model.mixer gla --model.d-model 32 --model.n-layers 1 --data.length 32 --loop.steps 60"
rates = "--optim.lr 2e-2 --optim.warmup-steps 5 --loop.batch-size 8 --loop.device cpu"
data = ["--data.path", str(folder / "text.txt"), "--data.cache", str(folder / "cache")]
assert (
    main(["train", "lm", *data, "--data.tokenizer", "bytes", *sizes.split(), *rates.split(), "--out", run])
    == 0
)
assert main(["eval", run, "--tasks", "roses", "--tasks-path", str(folder), "--device", "cpu"]) == 0
assert main(["publish", run, published]) == 0

import peft  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

# generate for a batch, padded on the left
model = AutoModelForCausalLM.from_pretrained(published)
tokenizer = AutoTokenizer.from_pretrained(published)
batch = tokenizer(["a rose", "a rose is"], return_tensors="pt", padding=True)
for tokens in model.generate(**batch, max_new_tokens=12, do_sample=False):
    print(tokenizer.decode(tokens, skip_special_tokens=True))

# fine-tune adapters
adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
adapted.print_trainable_parameters()
adapted(**batch, labels=batch["input_ids"]).loss.backward()
