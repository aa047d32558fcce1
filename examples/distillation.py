"""A trained model, its long convolutions distilled into recurrences and decoded token by token: what is lost?

    y_t = sum_l K_l u_{t-l}    becomes    x_t = a * x_{t-1} + u_t, y_t = Re(R x_t) + D u_t

    linrec train shakespeare-char-cpu --data.path TEXT --model.mixer hyena --out RUN
    python examples/distillation.py RUN [MODES ...]

The validation text is cut into windows of the length of training. Of each, a quarter is read at once, and
the rest one token after another. A copy of one tap, whose filters see the current step alone, says what
their memory is worth. RUN/extra-distillation.json has the numbers, which tables of runs keep.
"""

import shlex
import sys
import time

import torch
from torch.nn.functional import cross_entropy

from linrec.lab.distillation import distill
from linrec.lab.evaluation import choose_text, evaluate_windows
from linrec.lab.tasks import NO_TARGET
from linrec.lab.train import load_run
from linrec.lab.train.records import provenance
from linrec.lab.train.run import write_json
from linrec.nn.long_filters import Filter

ROWS = 128
run = load_run(sys.argv[1])
orders = [int(word) for word in sys.argv[2:]] or [1, 2, 4, 8, 16, 32, 64]
model = run.model()
length = run.config.task.length
text = choose_text(run, split="validation").tokens.with_length(length)


@torch.no_grad()
def decoded(model):
    """Loss of the text, of each window a quarter read at once and the rest token by token."""
    nats = 0.0
    for index in torch.arange(len(text)).split(ROWS):
        tokens, targets, *_ = text.rows(index)
        outputs, state = [], None
        for piece in tokens.split([length // 4] + [1] * (length - length // 4), dim=1):
            y, state = model(piece, state)
            outputs.append(y)
        logits = torch.cat(outputs, dim=1).flatten(0, 1)
        nats += cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET, reduction="sum").item()
    return nats / (len(text.ids) - 1)


@torch.no_grad()
def error(copy):
    """Largest |K' - K| / |K| of the filters over the taps of the past; that of the current step is exact."""
    filters = [[f.kernel(length)[:, 1:] for f in m.modules() if isinstance(f, Filter)] for m in (copy, model)]
    return max(float((near - true).norm() / true.norm()) for near, true in zip(*filters, strict=True))


convolution = evaluate_windows(model, text, length).loss
found = {"convolution": convolution, "copies": []}
print(f"{run.path}: loss of the convolution {convolution:.4f}, windows of {length}")
arguments = [{"modes": 1, "length": 1}, *({"modes": order} for order in orders), {"method": "exact"}]
for options in arguments:
    begin = time.perf_counter()
    copy = distill(model, **options)
    distilled = time.perf_counter()
    loss = decoded(copy)
    seconds = {"distil": distilled - begin, "decode": time.perf_counter() - distilled}
    at_once = evaluate_windows(copy, text, length).loss
    row = {"loss": loss, "ratio": loss / convolution, "loss_at_once": at_once, "filter_error": error(copy)}
    found["copies"].append({"options": options, **row, "seconds": seconds})
    words = ", ".join(f"{name} {value}" for name, value in options.items())
    print(f"{words:>18}: loss {loss:.4f}, {100 * (loss / convolution - 1):+.2f}%", end="")
    print(f", at once {at_once:.4f}, filter error {row['filter_error']:.1e}, {seconds['decode']:.0f} s")
command = shlex.join(["python", "examples/distillation.py", *sys.argv[1:]])
write_json(
    run.path / "extra-distillation.json", found | {"command": command, **provenance(torch.device("cpu"))}
)
