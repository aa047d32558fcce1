import inspect
from pathlib import Path

import pytest

from linrec import mixers
from linrec.nn.segment_mixer import SegmentMixer


def test_names_are_the_files_of_the_folder():
    files = {path.stem for path in Path(mixers.__file__).parent.glob("*.py")}
    assert set(mixers.names()) == files - {"__init__"}
    assert mixers.names() == sorted(mixers.names())


@pytest.mark.parametrize("name", mixers.names())
def test_every_file_gives_a_mixer_configured_by_keywords_alone(name):
    mixer = mixers.get(name)
    # no mixer derives from another one
    assert mixer.__bases__ in ((mixers.Mixer,), (SegmentMixer,))
    width, *others = inspect.signature(mixer).parameters.values()
    assert width.name == "d_model"
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in others)


@pytest.mark.parametrize("name", mixers.names())
def test_the_equations_come_first(name):
    """`mix` is the first method after `__init__`, and the base class's `forward` calls it."""
    methods = [key for key, value in vars(mixers.get(name)).items() if inspect.isfunction(value)]
    assert methods[:2] == ["__init__", "mix"]


def test_hyphens_and_underscores_are_equal():
    assert mixers.get("gate-loop") is mixers.get("gate_loop")


def test_an_unknown_name_gives_the_nearest_match():
    with pytest.raises(ValueError, match="there is no mixer 'gateloop'; did you mean 'gate_loop'"):
        mixers.get("gateloop")


def test_an_unknown_argument_gives_the_nearest_match():
    message = "there is no argument of mixer 'gate_loop' called 'n_head'; did you mean 'n_heads'"
    with pytest.raises(ValueError, match=message):
        mixers.build("gate_loop", 8, n_head=2)


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        mixers.Mixer(8)
