import ast
import inspect
import io
import tokenize
from pathlib import Path

import pytest

from linrec import mixers, models
from linrec.nn.segment_mixer import SegmentMixer
from linrec.nn.skew_field import SkewFieldMixer


def test_names_are_the_files_of_the_folder():
    files = {path.stem for path in Path(mixers.__file__).parent.glob("*.py")}
    assert set(mixers.names()) == files - {"__init__"}
    assert mixers.names() == sorted(mixers.names())


@pytest.mark.parametrize("name", mixers.names())
def test_every_file_gives_a_mixer_configured_by_keywords_alone(name):
    mixer = mixers.get(name)
    # no mixer derives from another one
    assert mixer.__bases__ in ((mixers.Mixer,), (SegmentMixer,), (SkewFieldMixer,))
    width, *others = inspect.signature(mixer).parameters.values()
    assert width.name == "d_model"
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in others)


@pytest.mark.parametrize("name", mixers.names())
def test_the_equations_come_first(name):
    """`mix` is the first method after `__init__`, and the base class's `forward` calls it."""
    methods = [key for key, value in vars(mixers.get(name)).items() if inspect.isfunction(value)]
    assert methods[:2] == ["__init__", "mix"]


BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text):
    """Lines of a file that are not blank, comment or docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        n for token in tokens if token.type not in BLANK for n in range(token.start[0], token.end[0] + 1)
    }
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_lines_of_code_are_counted_without_words():
    text = (
        '"""Two\nlines."""\n\n# why\nx = f(  # how\n    """a\n    value""",\n)\n\ndef g():\n    """One."""\n'
    )
    assert code_lines(text) == 5


@pytest.mark.parametrize(
    "place",
    [
        "mixers/compressive_transformer.py",
        "mixers/block_state.py",
        "models/memformer.py",
    ],
)
def test_a_memory_of_segments_is_a_short_file(place):
    """The driver of segments carries the rest."""
    text = (Path(models.__file__).parent.parent / place).read_text()
    assert 50 < code_lines(text) <= 90


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
