import json
import subprocess
import sys
from pathlib import Path

import pytest

from perf import operations
from perf.__main__ import main
from tests.tiers import thorough

ROOT = Path(__file__).parents[2]
QUICK = ["scan-f32-2x64x16", "scan-c64-2x64x16", "gate_loop-f32-2x64x16", "selective-f32-2x64x16"]
QUICK += ["conv-f32-2x64x16"]


def read(folder, pattern="*.json"):
    (path,) = folder.glob(pattern)
    return json.loads(path.read_text())


@thorough
def test_everything_runs_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, "-m", "perf", "ops", "--device", "cpu"]
    finished = subprocess.run(
        [*command, "--quick", "--peers", "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert max(map(len, (line for line in lines if not line.startswith("wrote ")))) <= 80
    for name in QUICK:
        assert any(line.startswith(name) for line in lines)

    results = read(tmp_path)
    assert results["device"]["type"] == "cpu" and results["device"]["name"]
    assert results["commit"] is None or len(results["commit"]) == 40
    assert {"torch", "numba", "python"} <= set(results["versions"])
    assert results["command"].startswith("python -m perf ops --device cpu --quick --peers")
    assert results["yardstick"] == "torch.add(x, y, out=z)"
    assert isinstance(results["keeps_freed_memory"], bool)
    assert [row["name"] for row in results["rows"]] == QUICK
    for row in results["rows"]:
        assert row["checked"] and "error" not in row
        assert set(row["passes"]) == {"forward", "forward+backward"}
        for entry in row["passes"].values():
            ms = entry["ms"]
            assert 0 < ms["p20"] <= ms["median"] <= ms["p80"]
            percent = 100 * entry["bytes"] / (ms["median"] * 1e-3) / entry["rate"]
            assert entry["percent"] == pytest.approx(percent)
            assert entry["met"] == (percent >= entry["target"])
            assert set(entry["peers"]) == {
                "torch",
                "loop",
                "fla",
                "warp",
                "hop",
                "mamba",
                "fft",
                "flash",
                "jax",
            }
            torch_backend = entry["peers"]["torch"]
            assert torch_backend["ratio"] == pytest.approx(ms["median"] / torch_backend["ms"]["median"])
            assert all("ratio" in peer or peer["missing"] for peer in entry["peers"].values())
    (line,) = results["lines"]
    assert line["name"] == "accuracy" and line["met"] == (line["value"] <= line["target"])


def test_a_wrong_operator_is_not_timed_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    right = operations.scan
    monkeypatch.setattr(operations, "scan", lambda a, x, **options: right(a * 1.01, x, **options))
    arguments = ["ops", "--device", "cpu", "--quick", "--out", str(tmp_path), "--rows", *QUICK]
    assert main(arguments) == 1
    wrong, *_, fine = read(tmp_path)["rows"]
    assert "passes" not in wrong and wrong["error"].startswith("wrong, so not timed: y: ")
    assert "error" not in fine and fine["passes"]
    shown = capsys.readouterr().out
    assert "scan-f32-2x64x16: wrong, so not timed" in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 80


def test_growth_is_drawn(tmp_path):
    arguments = ["ops", "--device", "cpu", "--quick", "--grow", "--longest", "2100", "--out", str(tmp_path)]
    assert main(arguments) == 0
    points = read(tmp_path)["growth"]["points"]
    assert [point["length"] for point in points] == [512, 512, 2048, 2048]
    assert all(point["implementation"] == "linrec" and point["ms"]["median"] > 0 for point in points)
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_growth_stops_at_what_is_wrong(tmp_path, monkeypatch, capsys):
    right = operations.scan
    monkeypatch.setattr(operations, "scan", lambda a, x, **options: right(a * 1.01, x, **options))
    assert main(["ops", "--device", "cpu", "--quick", "--grow", "--out", str(tmp_path)]) == 1
    assert read(tmp_path)["growth"]["points"] == []
    assert "scan-f32-1x512x64: AssertionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--rows", "scan-f32-8x4096x51"],
            "did you mean 'scan-f32-8x4096x512'?",
        ),
        (["--rows", "acuracy"], "did you mean 'accuracy'?"),
        (["--grow", "--rows", "accuracy"], "leave --rows out"),
        (["--grow", "--longest", "100"], "at least 512 steps; got 100"),
        (["--longest", "1000"], "--longest is the greatest length of --grow"),
    ],
)
def test_what_the_user_got_wrong_is_told_in_one_line(arguments, told, capsys, tmp_path):
    assert main(["ops", "--device", "cpu", "--out", str(tmp_path), *arguments]) == 2
    message = capsys.readouterr().err
    assert told in message and message.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["opps"], [], ["--quick", "ops"]])
def test_what_is_no_command_gets_the_list_of_them(words, capsys):
    assert main(words) == 2
    assert (
        "usage: python -m perf "
        "{ops,matrix,steps,loops,nonlinear,cells,iterations,loss,models,training,decoding,segments,tasks} ..."
        in capsys.readouterr().err
    )


def test_help_is_no_error(capsys):
    assert main(["--help"]) == 0
    assert main(["training", "--help"]) == 0
    assert "--presets" in capsys.readouterr().out
