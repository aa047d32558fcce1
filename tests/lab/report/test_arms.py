import dataclasses

from linrec.lab.report import group_runs, read_runs
from linrec.lab.train import load_run
from tests.lab.report.conftest import TASK


def _arms(*folders):
    return group_runs([load_run(folder) for folder in folders])


def test_runs_that_differ_in_their_seed_are_one_arm(make_run):
    arms = _arms(
        make_run("a", transition="data"),
        make_run("b", transition="fixed"),
        make_run("c", transition="data", seed=1),
    )
    assert [(arm.label, arm.slug, arm.seeds) for arm in arms] == [
        ("transition: data", "data", [0, 1]),
        ("transition: fixed", "fixed", [0]),
    ]
    assert arms[1].settings == {"model.mixer_args.transition": "fixed"}


def test_hybrids_are_named_as_they_are_typed_and_their_arguments_by_mixer(make_run):
    arms = _arms(
        make_run("a", mixer=("lru", "gla")),
        make_run("b", mixer=("gla", "lru")),
        make_run("c", mixer="lru"),
    )
    labels = ["mixer: lru gla", "mixer: gla lru", "mixer: lru"]
    assert [arm.label for arm in arms] == labels
    arms = _arms(
        make_run("d", mixer=("lru", "gla"), gla={"n_heads": 2}),
        make_run("e", mixer=("lru", "gla"), gla={"n_heads": 1}),
    )
    assert [(arm.label, arm.slug) for arm in arms] == [
        ("gla.n_heads: 2", "gla-n-heads-2"),
        ("gla.n_heads: 1", "gla-n-heads-1"),
    ]


def test_seeds_of_the_data_and_how_closely_a_run_was_watched_make_no_arm(make_run):
    watched = {"log_every": 7, "eval_every": 9, "checkpoint_every": 11, "device": "cpu", "compile": "off"}
    other = dataclasses.replace(TASK, seed=5)
    (arm,) = _arms(make_run("a"), make_run("b", loop=watched), make_run("c", task=other, seed=1))
    # a single arm has the name of its recipe
    assert (arm.label, arm.slug, arm.settings, arm.seeds) == ("small", "small", {}, [0, 0, 1])


def test_labels_name_the_fewest_fields_that_tell_arms_apart(make_run):
    arms = _arms(
        make_run("a", recipe="plain", transition="data"),
        make_run("b", recipe="plain", transition="fixed"),
        make_run("c", recipe="tuned", transition="data", output_gate=True),
        make_run("d", recipe="tuned", transition="fixed", output_gate=True),
    )
    assert [arm.label for arm in arms] == [
        "plain, transition: data",
        "plain, transition: fixed",
        "tuned, transition: data",
        "tuned, transition: fixed",
    ]
    assert set(arms[0].settings) == {
        "name",
        "model.mixer_args.transition",
        "model.mixer_args.output_gate",
    }
    assert [arm.slug for arm in arms][::3] == ["plain-transition-data", "tuned-transition-fixed"]


def test_labels_of_ablations_name_what_is_unusual(make_run):
    arms = _arms(
        make_run("a"),
        make_run("b", bias=False),
        make_run("c", transition="fixed"),
        make_run("d", output_gate=True, d_qk=4),
        make_run("e", output_projection=True),
    )
    assert [arm.label for arm in arms] == [
        "baseline",
        "bias: False",
        "transition: fixed",
        "d_qk: 4, output_gate: True",
        "output_projection: True",
    ]
    assert set(arms[0].settings) == {
        f"model.mixer_args.{name}"
        for name in ("bias", "transition", "d_qk", "output_gate", "output_projection")
    }


def test_slugs_are_file_names_and_never_the_same(make_run):
    arms = _arms(
        make_run("a", recipe="../Up & <away>"), make_run("b", recipe="up away"), make_run("c", recipe="über")
    )
    assert [arm.slug for arm in arms] == ["up-away", "up-away-2", "ber"]


def test_runs_of_a_folder_are_in_the_order_of_the_numbers_in_their_names(make_run):
    numbers = ("0.001", "0.01", "0.02", "0.1", "9", "10", "128")
    for number in reversed(numbers):
        make_run(f"lr-{number}-1")
    found = [run.path.name for run in read_runs([make_run("lr-128-0").parent])]
    assert found == [*(f"lr-{number}-1" for number in numbers[:-1]), "lr-128-0", "lr-128-1"]
