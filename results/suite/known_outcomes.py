"""What is known of small tasks, once more: `python results/suite/known_outcomes.py OUT [TASK ...]`.

Which models solve a task and which cannot, with three seeds each, equal parameters, steps and learning rates,
at sizes for one CPU core: about 90 minutes for all of it. OUT gets what `linrec bench` writes; what has ended
there is not run again.
"""

import argparse
from pathlib import Path

from linrec.bench import Entry, make_jobs, make_rows, run_jobs, write_page, write_rows
from linrec.bench.jobs import write_job
from linrec.bench.schedule import outcome_of

SEEDS = (0, 1, 2)


def entry(name, recipe, steps, *, batch_size=64, **task):
    """Return an entry at the small size that all have in common."""
    often = steps // 10
    loop = {
        "steps": steps,
        "batch_size": batch_size,
        "eval_every": often,
        "log_every": often,
        "compile": "off",
    }
    return Entry(
        name,
        recipe,
        task={"n_validation": 500, "n_test": 1000, **task},
        model={"d_model": 64, "d_channel_mixing": 128},
        optim={"lr": 0.003, "warmup_steps": steps // 20},
        loop=loop,
    )


# transitions that the data control, and those that are the same at every step
CONTROLLED, INVARIANT = ("mamba", "delta_net"), ("s4d", "lru")
# eigenvalues: complex, negative too, and positive alone
COMPLEX, POSITIVE = "gate_loop", ("gate_loop(phase_activation='none')", "delta_net(n_heads=4)")
NEGATIVE = "delta_net(n_heads=4, beta='double_sigmoid')"

OUTCOMES = (
    (
        entry("selective-copying", "selective-copying", 1000, length=64, n_copied=8, n_symbols=8),
        (*CONTROLLED, *INVARIANT),
    ),
    (
        entry("induction-heads", "induction-heads", 600, length=64, test_lengths=(64, 256, 1024)),
        (*CONTROLLED, *INVARIANT),
    ),
    (entry("parity", "parity", 600, test_lengths=(80, 160)), (COMPLEX, NEGATIVE, *POSITIVE)),
    (entry("modulo-3", "parity", 800, modulus=3, test_lengths=(80, 160)), (COMPLEX, NEGATIVE, POSITIVE[0])),
    (
        entry("mqar", "mqar", 800, length=64, n_pairs=16, n_tokens=256, n_train=50_000),
        ("attention", *(f"delta_net(n_heads={n})" for n in (16, 4, 1))),
    ),
    (
        entry("adding", "adding", 500, batch_size=16, length=1000, n_train=8000),
        ("ls_lstm(uniform_init=True)",),
    ),
    (
        entry("lstm-task-2b", "lstm-task-2b", 600, batch_size=8, length=1024),
        ("ls_lstm(forget_bias_init=5.0)",),
    ),
)


def main():
    """Run what is left of it, and write rows and page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("tasks", nargs="*", help="by default all")
    options = parser.parse_args()
    chosen = [(of, mixers) for of, mixers in OUTCOMES if of.name in options.tasks or not options.tasks]
    jobs = [job for of, mixers in chosen for job in make_jobs([of], mixers, SEEDS)]
    about = {"command": "python results/suite/known_outcomes.py OUT"}
    folders = [write_job(job, options.out, about) for job in jobs]
    left = [folder for folder in folders if (outcome_of(folder) or {}).get("status") != "done"]
    run_jobs(left, ended=print)
    rows = make_rows(sorted(file.parent for file in options.out.glob("*/*/*/job.json")))
    write_rows(rows, options.out)
    write_page(rows, options.out, title="Known outcomes")


if __name__ == "__main__":
    main()
