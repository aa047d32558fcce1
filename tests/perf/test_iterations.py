import dataclasses
import json

import torch

from linrec.lab.train import fit, get_recipe
from linrec.ops import nonlinear_scan
from linrec.ops.nonlinear_scan import Convergence
from perf.__main__ import main
from perf.iterations import counting


def shortest(task, **model):
    recipe = get_recipe(task)
    small = {"length": 40, "n_train": 20, "n_validation": 8, "n_test": 8}
    return dataclasses.replace(
        recipe,
        task=dataclasses.replace(recipe.task, **small),
        model=dataclasses.replace(recipe.model, d_model=6, n_layers=2, mixer_args={}, **model),
        optim=dataclasses.replace(recipe.optim, warmup_steps=0),
        loop=dataclasses.replace(recipe.loop, steps=2, batch_size=4, compile="off"),
    )


def test_iterations_are_those_of_each_mode():
    torch.manual_seed(0)
    x, W = torch.randn(2, 30, 5, dtype=torch.float64), 0.3 * torch.randn(5, 5, dtype=torch.float64)

    def cell(h, x, W):
        return torch.tanh(h @ W.mT + x)

    counts = []
    with counting(counts):
        h, _ = nonlinear_scan(cell, x, (W,))
        nonlinear_scan(cell, h, (W,))
    for count in counts:
        report = Convergence()
        inputs = (x, h)[count["layer"]]
        nonlinear_scan(cell, inputs, (W,), mode=count["mode"], convergence=report)
        assert count == {
            "layer": count["layer"],
            "mode": count["mode"],
            "steps": 30,
            "state": 5,
            "iterations": int(report.iterations),
        }
    assert [(count["layer"], count["mode"]) for count in counts] == [
        (0, "newton"),
        (0, "quasi_newton"),
        (1, "newton"),
        (1, "quasi_newton"),
    ]


def test_large_states_and_missing_convergence_are_told():
    x, W = torch.ones(1, 200, 65), 10 * torch.eye(65)
    counts = []
    with counting(counts):
        nonlinear_scan(lambda h, x, W: torch.sin(h @ W.mT + x), x, (W,))
        x, W = torch.ones(1, 200, 1), 10 * torch.ones(1, 1)
        nonlinear_scan(lambda h, x, W: torch.sin(h @ W.mT + x), x, (W,))
    missing = [count["missing"] for count in counts]
    assert missing == ["state over 64", "state over 64", "no convergence in 50", "no convergence in 50"]


def test_a_run_is_counted_before_and_after_training(tmp_path, capsys):
    fit(shortest("adding", mixer="lem"), tmp_path / "run")
    out = tmp_path / "out"
    assert (
        main(["iterations", str(tmp_path / "run"), "--device", "cpu", "--samples", "3", "--out", str(out)])
        == 0
    )
    (path,) = out.glob("*.json")
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["task"], run["mixer"]) == ("adding", "lem")
    assert [(count["weights"], count["layer"]) for count in run["counts"][::2]] == [
        ("start", 0),
        ("start", 1),
        ("end", 0),
        ("end", 1),
    ]
    assert all(count["iterations"] >= 2 and count["steps"] == 40 for count in run["counts"])
    assert "quasi_newton" in capsys.readouterr().out


def test_other_folders_are_refused(tmp_path, capsys):
    assert main(["iterations", str(tmp_path / "none"), "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "there is no run folder" in capsys.readouterr().err
