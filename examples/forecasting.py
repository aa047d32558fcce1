"""SpaceTime's forecaster: an encoder, and a decoder that reads its own predictions after the last step shown.

ETTh1.csv is in https://github.com/zhouhaoyi/ETDataset; any file of the task `ett` will do.

    python examples/forecasting.py ETTh1.csv 3000
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from linrec.lab.tasks.ett import Ett, Windows
from linrec.mixers.spacetime import SpaceTime

path, n_steps = sys.argv[1], int(sys.argv[2])
task = Ett(path=path, shown=336, horizon=96).prepared()
torch.manual_seed(0)


class Forecaster(nn.Module):
    def __init__(self, width: int = 64, d_state: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(task.n_outputs, width), nn.Linear(width, task.n_outputs)
        self.encoder = SpaceTime(width, d_state=d_state)
        self.decoder = SpaceTime(width, d_state=d_state, closed_loop=True)

    def forward(self, shown: Tensor) -> tuple[Tensor, ...]:
        """Return the forecast, predictions of the next step after each one shown, and predicted inputs."""
        z = self.embed(shown)
        z = z + self.encoder(z)[0]
        y, state = self.decoder(z)
        following, inputs = self.decoder.forecast(state, task.horizon)
        return self.head(following), self.head(y), inputs


def windows(split: Windows, index: Tensor) -> tuple[Tensor, Tensor]:
    batch = split.rows(index)
    return batch.inputs[:, : task.shown, : task.n_outputs], batch.targets[:, task.shown :]


def loss_of(shown: Tensor, hidden: Tensor) -> Tensor:
    forecast, each_next, inputs = model(shown)
    # the decoder should predict the encoder's outputs at the hidden steps
    whole = model.embed(torch.cat([shown, hidden], 1))
    whole = whole + model.encoder(whole)[0]
    of_inputs = mse_loss(inputs, whole[:, task.shown :].detach())
    return mse_loss(forecast, hidden) + mse_loss(each_next[:, :-1], shown[:, 1:]) + of_inputs


model = Forecaster()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, n_steps)
train = task.split("train")
for step in range(1, n_steps + 1):
    loss = loss_of(*windows(train, torch.randint(len(train), (32,))))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % max(1, n_steps // 5) == 0:
        print(f"step {step}, loss {loss.item():.4f}")

test, errors = task.split("test"), []
with torch.no_grad():
    for index in torch.arange(len(test)).split(64):
        shown, hidden = windows(test, index)
        pair = model(shown)[0], shown[:, -1:].expand_as(hidden)
        errors.append(torch.stack([(guess - hidden).square().mean((1, 2)) for guess in pair], 1))
forecast, last = torch.cat(errors).mean(0).tolist()
print(f"test mse {forecast:.4f}; of the last number shown, repeated: {last:.4f}")
