"""Ray Serve in front of several engines: each replica answers at the addresses of `linrec serve`.

    pip install 'linrec[hf,serve]' 'ray[serve]'
    python examples/ray_serve.py FOLDER --replicas 4

FOLDER is a folder of `linrec publish`. Ray starts the replicas, on several machines if it runs on a cluster,
replaces the ones that end, and spreads the requests. Each replica has snapshots of its own: another replica
reads a chat from its beginning.
"""

import argparse
from pathlib import Path

from fastapi import FastAPI

from linrec.hf import from_hugging_face
from linrec.serve import Engine
from linrec.serve.http import make_app
from linrec.text import load_tokenizer


def replica(folder: Path, *, device: str = "cpu", slots: int = 256) -> FastAPI:
    """Return the application of a replica, which runs an engine from its start to its end."""
    tokenizer = load_tokenizer(folder)
    model = from_hugging_face(folder).to(device).eval()
    return make_app(Engine(model, slots=slots, vocab_size=tokenizer.vocab_size), tokenizer, name=folder.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a folder by several replicas.")
    parser.add_argument("folder", type=lambda given: Path(given).resolve())
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--device", default="cpu", help="cuda gives each replica a GPU")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    from ray import serve

    def build() -> FastAPI:
        return replica(options.folder, device=options.device, slots=options.slots)

    # more requests than slots, so that an engine has the next ones at hand; more wait at Ray's proxy
    made = serve.deployment(serve.ingress(build)()).options(
        num_replicas=options.replicas,
        max_ongoing_requests=2 * options.slots,
        ray_actor_options={"num_gpus": 1 if options.device == "cuda" else 0},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(made.bind(), blocking=True)


if __name__ == "__main__":
    main()
