"""One long sequence over several processes: each runs a part of the steps, and the result is that of one.

    torchrun --nproc-per-node 2 examples/time_parallel.py [LENGTH [WIDTH]]
    python examples/time_parallel.py

The second line is a group of one. On GPUs every process has its own; elsewhere they share the CPU.
"""

import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from linrec.models import LanguageModel, ModelConfig
from linrec.parallel import part, time_parallel

length, width = [int(word) for word in sys.argv[1:]] + [4096, 64][len(sys.argv) - 1 :]
backend, device, on_gpu = "gloo", torch.device("cpu"), torch.cuda.is_available()
if on_gpu:
    # both: processes compare what they do by gloo, and exchange states by nccl
    backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group(backend, **alone)

# the same in every process, with memories as long as a part
torch.manual_seed(0)
memory = {"magnitude_init": (0.99, 0.9999)}
model = LanguageModel(ModelConfig(256, d_model=width, n_layers=2, mixer_args=memory)).to(device)
tokens = torch.randint(256, (1, length + 1)).to(device)


def step(in_parts):
    """One training step but for the optimiser; returns all that it computes, and the bytes it sends."""
    model.zero_grad()
    inputs, targets = (part(x) if in_parts else x for x in (tokens[:, :-1], tokens[:, 1:]))
    with time_parallel() if in_parts else nullcontext() as ranks:
        logits, state = model(inputs)
    # over the tokens of all, so that the losses of the parts add up to that of the sequence
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / length
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    if in_parts:
        # so do the gradients
        for tensor in (loss.detach(), *gradients):
            dist.all_reduce(tensor)
    if on_gpu:
        torch.cuda.synchronize()
    results = {"loss": [loss], "logits": [logits], "states": state, "gradients": gradients}
    return {name: [x.detach() for x in results[name]] for name in results}, ranks and ranks.sent


def measured(in_parts, steps=3):
    """As `step`, and tokens per second, after a step that compiles kernels."""
    step(in_parts)
    begin = time.perf_counter()
    for _ in range(steps):
        results, sent = step(in_parts)
    return results, sent, steps * length / (time.perf_counter() - begin)


whole, _, rate = measured(in_parts=False)
parts, sent, rate_in_parts = measured(in_parts=True)
compared = whole | {"logits": [part(x) for x in whole["logits"]]}
pairs = {name: zip(parts[name], compared[name], strict=True) for name in compared}
off = torch.tensor([max((x - y).norm() / y.norm() for x, y in pairs[name]) for name in pairs]).to(device)
dist.all_reduce(off, dist.ReduceOp.MAX)
if dist.get_rank() == 0:
    print(f"{length} tokens of one sequence, {dist.get_world_size()} x {device.type}")
    print(f"in one process: loss {float(whole['loss'][0]):.6f}, {rate:.3g} tokens/s")
    print(f"in parts:       loss {float(parts['loss'][0]):.6f}, {rate_in_parts:.3g} tokens/s")
    print(f"sent by each process: {sent} bytes per step, at any length, besides gradients of parameters")
    print("greatest relative differences:", *(f"{name} {x:.0e}" for name, x in zip(pairs, off, strict=True)))
assert off.max() < 1e-3
dist.destroy_process_group()
