"""Sound: a trained model of raw audio continues a token that stands before the first sample.

Train on spoken digits or on a folder of wav files of your own, then write sounds to files:

    linrec train recordings --data.path FOLDER --out runs/recordings
    python examples/audio.py runs/recordings 16000
"""

import sys
from pathlib import Path

import torch

from linrec.generation import generate
from linrec.lab.tasks.audio import from_mu_law, write_wav
from linrec.lab.train import load_run

RATE, SOUNDS, START = 16_000, 4, 256

folder, n_samples = Path(sys.argv[1]), int(sys.argv[2])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = load_run(folder).model(device)
first = torch.full((SOUNDS, 1), START, device=device)
# the model has an output for the first token too, which is no sample
tokens, _ = generate(model, first, n_tokens=n_samples, vocab_size=START, seed=0)
for number, values in enumerate(tokens.cpu()):
    path = folder / f"sound-{number}.wav"
    write_wav(path, from_mu_law(values), rate=RATE)
    print(path)
