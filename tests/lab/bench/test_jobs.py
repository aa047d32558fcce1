import dataclasses
import json

import pytest

# now, for doctests leave their last result among the builtins, which tyro cannot be imported with
import tyro  # noqa: F401

from linrec import mixers
from linrec.lab.bench import Entry, get_suite, make_jobs, make_rows, write_page
from linrec.lab.bench.jobs import sizes, with_parameters, write_job
from linrec.lab.bench.suites import SUITES
from linrec.lab.tasks import LanguageModeling
from linrec.lab.tasks.archives import Uea
from linrec.lab.tasks.dynamics import MackeyGlass
from linrec.lab.train import ConfigError
from linrec.mixers import Mixer
from linrec.models import LanguageModel, ModelConfig
from tests.tiers import thorough

OWN = f"{__package__}.own_mixers"
CONFIG = ModelConfig(vocab_size=16, d_model=32, n_layers=2, d_channel_mixing=64)


@thorough
@pytest.mark.parametrize("mixer", ["gate_loop", "attention", "mamba", "s5", f"{OWN}:Wide"])
@pytest.mark.parametrize("n", [60_000, 150_000])
def test_models_have_the_parameters_that_were_asked_for(mixer, n):
    config = with_parameters(dataclasses.replace(CONFIG, mixer=mixer), n)
    # a hidden unit of two layers has few
    assert sizes(config).parameters == pytest.approx(n, rel=0.02)
    assert sizes(config).parameters == sum(p.numel() for p in LanguageModel(config).parameters())
    assert config.d_model % (48 if "Wide" in mixer else 8) == 0


def test_the_state_of_a_model_is_that_of_its_mixers():
    config = dataclasses.replace(CONFIG, mixer=("gla", "lru"))
    both = mixers.build("gla", 32).state_size + mixers.build("lru", 32).state_size
    assert sizes(config).state == both == LanguageModel(config).state_size


def test_a_mixer_inside_a_mixer_is_counted_once():
    config = ModelConfig(vocab_size=8, d_model=32, n_layers=2, mixer="falcon_h1")
    assert sizes(config).state == LanguageModel(config).state_size
    assert sizes(config).grows == 2 * mixers.build("attention", 32).state_size


def test_jobs_have_equal_parameters_and_the_first_seed_of_everything_comes_first():
    jobs = make_jobs(get_suite("smoke"), ["attention", f"{OWN}:Identity"], [3, 5])
    assert [(job.task, job.mixer.split(":")[-1], job.seed) for job in jobs] == [
        (entry.name, mixer, seed)
        for seed in (3, 5)
        for entry in get_suite("smoke")
        for mixer in ("attention", "Identity")
    ]
    of_first = sizes(
        dataclasses.replace(get_suite("smoke")[0].config().model, mixer="attention", mixer_args={})
    ).parameters
    for job in jobs:
        assert job.config.loop.seed == job.seed and job.config.model.mixer == job.mixer
        if job.task == get_suite("smoke")[0].name:
            assert job.sizes.parameters == pytest.approx(of_first, rel=0.02)
    # the data are the same for all
    assert len({job.config.task.seed for job in jobs}) == 1
    assert len({job.folder for job in jobs}) == len(jobs)
    assert ":" not in str(jobs[1].folder)
    (job,) = make_jobs(get_suite("smoke")[:1], ["gla"], [0], parameters=50_000)
    assert job.sizes.parameters == pytest.approx(50_000, rel=0.02)


def test_a_job_of_an_earlier_version_is_the_job_if_its_fields_are(tmp_path):
    (job,) = make_jobs(get_suite("smoke")[:1], ["gla"], [0])
    folder = write_job(job, tmp_path, {"command": ""})
    stored = json.loads((folder / "job.json").read_text())
    # a field that an earlier version did not have
    assert stored["config"]["loop"].pop("carry_state") is False
    (folder / "job.json").write_text(json.dumps(stored))
    assert write_job(job, tmp_path, {"command": ""}) == folder
    for change in ({"seed": 1}, {"no_such_field": 1}):
        stored["config"]["loop"] |= change
        (folder / "job.json").write_text(json.dumps(stored))
        with pytest.raises(ConfigError, match="has a job of another configuration"):
            write_job(job, tmp_path, {"command": ""})


def test_a_trial_scales_the_rates_of_all_parameters():
    entry = Entry("images", "sequential-fashion-mnist", optim={"lr": 0.004, "transition_lr": 0.001})
    (job,) = make_jobs([entry], ["s4d"], [0])
    trial = job.at(0.008)
    assert (trial.config.optim.lr, trial.config.optim.transition_lr) == (0.008, 0.002)
    assert trial.trial == "lr-0.008" and trial.folder.name == "seed-0-lr-0.008"
    assert dataclasses.replace(trial, config=job.config, trial="") == job


def test_a_folder_keeps_to_one_configuration(tmp_path):
    (job,) = make_jobs(get_suite("smoke")[:1], ["gla"], [0])
    folder = write_job(job, tmp_path, {"command": "linrec bench"})
    stored = json.loads((folder / "job.json").read_text())
    assert stored["command"] == "linrec bench" and stored["parameters"] == job.sizes.parameters
    assert write_job(job, tmp_path, {"command": "another"}) == folder
    assert json.loads((folder / "job.json").read_text()) == stored
    with pytest.raises(ConfigError, match="has a job of another configuration; give another --out"):
        write_job(dataclasses.replace(job.at(0.1), trial=""), tmp_path, {"command": ""})


def test_to_make_jobs_no_data_are_drawn(tmp_path, monkeypatch):
    def draw(*_):
        raise AssertionError("that takes seconds")

    # what chance gets there only the data say
    monkeypatch.setattr(MackeyGlass, "draw", draw)
    (job,) = make_jobs([Entry("mackey-glass", "mackey-glass")], ["lru"], [0])
    assert make_rows([write_job(job, tmp_path, {"command": ""})])[0]["chance"] is None


@thorough
def test_every_entry_of_every_suite_can_be_made(monkeypatch):
    # nothing is downloaded
    monkeypatch.setattr(LanguageModeling, "prepared", lambda task: dataclasses.replace(task, vocab_size=65))
    monkeypatch.setattr(Uea, "prepared", lambda task: dataclasses.replace(task, n_dimensions=6, n_classes=5))
    for suite, entries in SUITES.items():
        assert len({entry.name for entry in entries}) == len(entries), suite
        for entry in entries:
            assert entry.config().name == entry.recipe
        # every task is one that models can be built for
        jobs = make_jobs(entries, ["lru"], [0])
        assert [job.task for job in jobs if job.sizes] == [entry.name for entry in entries]
    assert {entry.name for entry in get_suite("all")} == {e.name for s in SUITES.values() for e in s}


def test_a_mixer_of_ones_own_is_found_by_its_import_path():
    found = mixers.get(f"{OWN}:Identity")
    assert issubclass(found, Mixer) and found.__name__ == "Identity"
    assert mixers.build(f"{OWN}:Identity", 8).d_model == 8


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no_such_package.mixer:Own", "'no_such_package.mixer:Own' cannot be imported: No module named"),
        (f"{OWN}:NotAMixer", "`NotAMixer` in module .* is not a .*Mixer; the module has Identity, "),
        (f"{OWN}:Identiy", "`Identiy` in module"),
    ],
)
def test_an_import_path_without_a_mixer_is_refused(path, complaint):
    with pytest.raises(ValueError, match=complaint):
        mixers.get(path)


def test_a_model_that_one_task_cannot_have_takes_no_other_job_with_it(tmp_path):
    entries = get_suite("smoke")[:2]
    narrow = dataclasses.replace(entries[1], model={"d_model": 24, "d_channel_mixing": 24})
    # at the width of the recipe, for it comes first
    copying, other, fits, after = make_jobs([entries[0], narrow], [f"{OWN}:Halved", "lru"], [0])
    assert (copying.ended, other.ended, after.ended) == (None, None, None)
    assert fits.sizes is None and fits.ended == ("failed", "its model cannot be built: AssertionError: heads")
    # the next says how many parameters all have
    assert (after.config.model.d_model, after.config.model.d_channel_mixing) == (24, 24)
    folder = write_job(fits, tmp_path, {"command": "linrec bench"})
    (row,) = make_rows([folder])
    assert (row["status"], row["message"], row["parameters"]) == (*fits.ended, None)
    assert fits.ended[1] in write_page([row], tmp_path, title="suite").read_text()
    # once it can be built, it is another job in the same folder
    (mended,) = make_jobs([narrow], [f"{OWN}:Halved"], [0], parameters=after.sizes.parameters)
    assert mended.config.model.d_model % 16 == 0 and mended.ended is None
    assert write_job(mended, tmp_path, {"command": "linrec bench"}) == folder
    assert json.loads((folder / "job.json").read_text())["parameters"] == mended.sizes.parameters


def test_a_mixer_that_looks_at_its_numbers_is_built_with_memory():
    config = ModelConfig(vocab_size=10, d_model=16, n_layers=1, mixer=f"{OWN}:Rounded")
    # the largest eigenvalue of a half times the identity, as a number
    assert sizes(config).parameters == sum(p.numel() for p in LanguageModel(config).parameters())


def test_numbers_of_parameters_may_fall_from_a_width_to_the_next():
    # blocks are as many as divide the width: 8 at 264, 16 at 272
    config = ModelConfig(vocab_size=10, d_model=256, n_layers=1, mixer="rg_lru", channel_mixing="none")
    wide, wider = (sizes(dataclasses.replace(config, d_model=width)).parameters for width in (264, 272))
    assert wide > wider
    for n in (wider - 200, wider, wider + 200):
        found = with_parameters(config, n)
        assert found.d_model == 272
        assert with_parameters(config, sizes(found).parameters) == found


@pytest.mark.parametrize("mixer", ["attention", "hyena", "gla", f"{OWN}:Identity", f"{OWN}:Streamless"])
def test_a_state_that_grows_is_told_from_one_that_does_not(mixer):
    of_all = sizes(dataclasses.replace(CONFIG, mixer=(mixer, "lru")))
    lru = mixers.build("lru", 32).state_size
    assert of_all.grows == (of_all.state - lru if mixer in ("attention", "hyena") else 0)
    assert of_all.state > lru or ":" in mixer


@thorough
def test_what_cannot_be_built_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="there is no mixer 'gate_lop'; did you mean"):
        make_jobs(get_suite("smoke"), ["gate_lop"], [0])
    with pytest.raises(ConfigError, match="Impossible on copying: its model cannot be built: RuntimeError: "):
        make_jobs(get_suite("smoke"), ["gla", f"{OWN}:Impossible"], [0])
    with pytest.raises(ConfigError, match=r"gla.* on adding: .* ValueError: `d_qk` must be a positive"):
        make_jobs(get_suite("smoke")[2:], ["gla(n_heads=0)"], [0])
    with pytest.raises(ValueError, match="no suite 'smok'; did you mean 'smoke'"):
        get_suite("smok")
