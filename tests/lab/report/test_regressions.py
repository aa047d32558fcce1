"""Reports of regressions: squared errors for accuracies."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

from linrec.lab.report import group_runs, write_report
from linrec.lab.report.pictures import draw_learning_curves
from linrec.lab.tasks.dynamics import Adding
from linrec.lab.train import LoopConfig, TrainConfig, fit, load_run
from linrec.models import SequenceClassifierConfig
from tests.lab.report.test_write import Page

TASK = Adding(length=4, n_train=8, n_validation=4, n_test=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs "0" and "1" of two seeds."""
    folder = tmp_path_factory.mktemp("regressions")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = SequenceClassifierConfig(n_outputs=1, n_features=1, d_model=8, n_layers=1, pooling="last")
    for seed in (0, 1):
        loop = LoopConfig(steps=4, batch_size=4, log_every=1, eval_every=2, device="cpu", seed=seed)
        fit(TrainConfig("sum", TASK, model, loop=loop), folder / str(seed))
    torch.set_num_threads(threads)
    return folder


def test_errors_take_the_place_of_accuracies(made: Path, tmp_path: Path) -> None:
    path = write_report([made / "0", made / "1"], tmp_path)
    page = Page(path)
    rows = {row[0]: row for row in reversed(page.rows)}
    assert rows["configuration"][1:3] == ["test mean squared error", "validation mean squared error"]
    results = [load_run(made / name).result or {} for name in ("0", "1")]
    first, second = (result["test"]["loss"] for result in results)
    assert rows["sum"][1] == f"{(first + second) / 2:.6f} ± {abs(first - second) / 2**0.5:.6f}"
    assert rows["always the mean"][1] == f"{TASK.trivial_score:.6f}"
    assert rows["0"][2:4] == [f"{results[0][name]['loss']:.4g}" for name in ("test", "validation")]
    text = path.read_text()
    assert "accuracy" not in text and "perplexity" not in text and "chance" not in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learning_curves.png", "report.html"]


def test_learning_curves_are_of_the_error_alone(made: Path) -> None:
    figure = draw_learning_curves(group_runs([load_run(made / "0")]))
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_ylabel() == "mean squared error" and axes.get_yscale() == "log"
    records = [r for r in load_run(made / "0").metrics if r["split"] == "train"]
    drawn = next(line for line in axes.lines if len(line.get_xdata()) == 4)
    assert list(drawn.get_ydata()) == pytest.approx([r["loss"] for r in records])
    assert any(list(line.get_ydata()) == [1 / 6, 1 / 6] for line in axes.lines)
    assert [text.get_text() for text in axes.texts] == ["a constant"]
    plt.close(figure)
