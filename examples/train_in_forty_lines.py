"""Training without `linrec.lab.train`: a plain PyTorch loop over a short Memory Horizon.

A model is an `nn.Module`, a task is three pairs of tensors; any loop will do.

    python examples/train_in_forty_lines.py
"""

import torch
from torch.nn.functional import cross_entropy

from linrec.lab.tasks import MemoryHorizon
from linrec.models import LanguageModel, ModelConfig

task = MemoryHorizon(length=32, n_resets=3, modulus=10, n_samples=1000)
train, test = task.split("train"), task.split("test")

torch.manual_seed(0)
model = LanguageModel(ModelConfig(task.vocab_size, task.n_outputs, d_model=32, n_layers=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
n_parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{n_parameters} parameters, {len(train)} sequences of {task.length} tokens")

for step in range(151):
    rows = torch.randint(len(train), (32,))
    logits, _ = model(train.inputs[rows])
    loss = cross_entropy(logits.flatten(0, 1), train.targets[rows].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}")

with torch.no_grad():
    logits, _ = model(test.inputs)
score = task.score(logits.argmax(-1), test)
print(f"test accuracy {score['accuracy']:.3f}; always the likeliest answer: {task.trivial_score:.3f}")
for part in score["accuracy_by_span"]:
    low, high = part["span"]
    print(f"  {low:2} to {high:2} numbers since the reset: {part['accuracy']:.3f}")
