import ast
import inspect
import io
import re
import tokenize
import typing
from pathlib import Path

import pytest
import torch

from linrec import mixers, models
from linrec.errors import folded
from linrec.lab.bench.variants import parse_variant
from linrec.literals import OTHER_NAMES, other_names
from linrec.nn.cells import NonlinearMixer
from linrec.nn.orthogonal import SkewFieldMixer
from linrec.nn.segment_mixer import SegmentMixer


def test_names_are_the_files_of_the_folder():
    files = {path.stem for path in Path(mixers.__file__).parent.glob("*.py")}
    assert set(mixers.names()) == files - {"__init__"}
    assert mixers.names() == sorted(mixers.names())


@pytest.mark.parametrize("name", mixers.names())
def test_every_file_gives_a_mixer_configured_by_keywords_alone(name):
    mixer = mixers.get(name)
    # no mixer derives from another one
    assert mixer.__bases__ in ((mixers.Mixer,), (SegmentMixer,), (NonlinearMixer,), (SkewFieldMixer,))
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
        "models/slot_memory.py",
    ],
)
def test_a_memory_of_segments_is_a_short_file(place):
    """The driver of segments carries the rest."""
    text = (Path(models.__file__).parent.parent / place).read_text()
    assert 50 < code_lines(text) <= 90


@pytest.mark.parametrize("name", mixers.names())
def test_a_mixer_has_the_name_of_its_class(name):
    kind = mixers.get(name)
    assert getattr(mixers, kind.__name__) is kind and kind.__name__ in dir(mixers)
    for spelling in (name, name.replace("_", "-"), name.upper(), name.replace("_", " "), kind.__name__):
        assert mixers.canonical(spelling) == name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HGRN", "hgru"),
        ("s6", "mamba"),
        ("Transformer", "attention"),
        ("mamba-2", "mamba2"),
        ("gated_deltanet", "gated_delta_net"),
        ("Retentive Network", "retnet"),
        ("Finch", "rwkv6"),
        ("griffin", "'hawk', 'rg_lru' or 'preset(\"griffin\")'"),
        ("xLSTM", "'mlstm', 'slstm' or 'xlstm_7b'"),
        ("rwkv", "'rwkv4', 'rwkv5', 'rwkv6' or 'rwkv7'"),
        ("performer", "'linear_attention(feature_map=\"performer\")'"),
        ("perfomer", "'linear_attention(feature_map=\"performer\")'"),
        ("GAU", "'flash_gau(linear=False)'"),
        ("memformer", "'MemoryConfig(kind=\"memformer\")'"),
        ("TTM", "'MemoryConfig(kind=\"token_turing_machine\")'"),
        ("TLB", "'MemoryConfig(kind=\"temporal_latent_bottleneck\")'"),
    ],
)
def test_the_name_of_a_paper_gives_its_mixer_or_an_error_with_its_mixers(name, meant):
    if meant in mixers.names():
        assert mixers.get(name) is mixers.get(meant) and type(mixers.build(name, 8)) is mixers.get(meant)
        config = models.ModelConfig(vocab_size=6, mixer=(name, "gla"), mixer_args={name: {}})
        assert config.mixer == (meant, "gla") and config.mixer_args == {meant: {}}
        return
    with pytest.raises(ValueError, match=re.escape(f"no mixer '{name}'; did you mean {meant}? Choose from")):
        models.ModelConfig(vocab_size=6, mixer=name)


def test_other_names_name_what_there_is():
    made = {"MemoryConfig": models.MemoryConfig, "preset": models.preset}
    for key in OTHER_NAMES:
        call = ast.parse(key, mode="eval").body
        if isinstance(call, ast.Name) or call.func.id in mixers.names():
            variant = parse_variant(key)
            mixers.build(mixers.get(variant.mixer), 64, **variant.mixer_args)
        else:
            eval(key, made)
    spellings = [folded(name) for name in [*mixers.names(), *other_names()]]
    assert len(set(spellings)) == len(spellings)


def test_type_checkers_know_the_names_of_all_mixers():
    assert list(typing.get_args(mixers.MixerName)) == mixers.names()


def test_a_misspelt_class_gives_the_nearest():
    with pytest.raises(AttributeError, match="no attribute 'HGRN'; did you mean 'HGRU'"):
        mixers.HGRN  # noqa: B018
    with pytest.raises(AttributeError, match="'XLSTM'; did you mean 'mlstm', 'slstm' or 'xlstm_7b'"):
        mixers.XLSTM  # noqa: B018


def test_an_unknown_name_gives_the_nearest_match():
    with pytest.raises(ValueError, match="there is no mixer 'gate_lop'; did you mean 'gate_loop'"):
        mixers.get("gate_lop")


def test_an_unknown_argument_gives_the_nearest_match():
    message = "there is no argument of mixer 'gate_loop' called 'n_head'; did you mean 'n_heads'"
    with pytest.raises(ValueError, match=message):
        mixers.build("gate_loop", 8, n_head=2)


def test_a_mixer_has_to_have_equations():
    with pytest.raises(NotImplementedError, match="Mixer must define `mix"):
        mixers.Mixer(8)(torch.zeros(1, 1, 8))
