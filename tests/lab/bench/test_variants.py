import dataclasses
import json

import pytest

from linrec.lab.bench import get_suite, make_jobs, make_rows
from linrec.lab.bench.jobs import write_job
from linrec.lab.bench.variants import folder_name, parse_variant, short, split_list
from linrec.lab.train import ConfigError
from linrec.models import LanguageModel, MemoryConfig, ModelConfig
from linrec.models.config import complete_mixer_args

OWN = f"{__package__}.own_mixers"


@pytest.mark.parametrize(
    ("text", "mixer", "arguments", "label"),
    [
        ("gate-loop", "gate_loop", {}, "gate_loop"),
        ("gla()", "gla", {}, "gla"),
        ("Mamba-2(d_state=4)", "mamba2", {"d_state": 4}, "mamba2(d_state=4)"),
        ("HGRN+gla", ("hgru", "gla"), {}, "hgru+gla"),
        # in the order of the signature, whatever order they are given in
        (" gla( d_v=8,n_heads = 2 )", "gla", {"n_heads": 2, "d_v": 8}, "gla(n_heads=2, d_v=8)"),
        (
            "gate_loop(magnitude_init=[0.5, 1], output_gate=True, transition='fixed')",
            "gate_loop",
            {"transition": "fixed", "magnitude_init": (0.5, 1), "output_gate": True},
            "gate_loop(transition='fixed', magnitude_init=(0.5, 1), output_gate=True)",
        ),
        (f"{OWN}:Powers(n=-3)", f"{OWN}:Powers", {"n": -3}, f"{OWN}:Powers(n=-3)"),
        (f"{OWN}:Powers(named='+,)')", f"{OWN}:Powers", {"named": "+,)"}, f"{OWN}:Powers(named='+,)')"),
        (f"{OWN}:Powers(n={{'a': None}})", f"{OWN}:Powers", {"n": {"a": None}}, None),
        (
            "gla + gla+ attention(window=16)",
            ("gla", "gla", "attention"),
            {"attention": {"window": 16}},
            "gla+gla+attention(window=16)",
        ),
    ],
)
def test_a_mixer_has_the_arguments_that_are_typed(text, mixer, arguments, label):
    found = parse_variant(text)
    assert (found.mixer, found.mixer_args) == (mixer, arguments)
    assert label in (None, found.label)
    # a label is a way to write it
    assert parse_variant(found.label) == found


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gla(n_head=2)", "argument of mixer 'gla' called 'n_head'; did you mean 'n_heads'.* 'gate_rank'"),
        (f"{OWN}:Powers(name=2)", "called 'name'; did you mean 'named'"),
        (f"{OWN}:Identity(m=2)", "called 'm', and none to choose from"),
        ("gal(n_heads=2)", "no mixer 'gal'; did you mean 'gla'"),
        ("gla+", "there is no mixer ''"),
        ("gla(n_heads=2", "must be NAME or NAME.argument=value"),
        ("gla(n_heads=2)(d_v=8)", "and nothing after it"),
        ("gla(2)", r"must be named, as in .*; got 'gla\(2\)'. It has n_heads, kv_heads,"),
        ("gla(**{'n_heads': 2})", "must be named"),
        ("gla(d_v=1, d_v=2)", "`d_v` of mixer 'gla' is given twice"),
        ("gla(n_heads=two)", "`n_heads` of mixer 'gla' must be a number, a quoted string, .*; got two"),
        ("gla(n_heads=open('x'))", r"must be a number, .*; got open\('x'\)"),
        ("gla(n_heads={2: 3})", r"must be a number, .*; got \{2: 3\}"),
        ("gla(n_heads=2)+lru+gla", "mixer 'gla' must have the same arguments at all its places"),
    ],
)
def test_what_is_no_mixer_with_arguments_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_variant(text)


def test_commas_and_folders():
    listed = "gla(n_heads=2, d_v=8),lru, a:B(c=[1,(2,3)], d='),(')"
    assert split_list(listed) == ["gla(n_heads=2, d_v=8)", "lru", "a:B(c=[1,(2,3)], d='),(')"]
    labels = ["gla", "gla(n=1)", "gla(n=(1,))", "gla+n-1", "a:b", "a(b='ü/..')", "a" * 300, "a" * 301]
    names = [folder_name(label) for label in labels]
    assert len({*names}) == len(names) and all(len(name) < 90 for name in names)
    assert names[0] == "gla" and not any({*name} & {*"()'/:+*? "} for name in names)
    assert short("a.b:C(d={'e': 1})+gla+f:G") == "C(d={'e': 1})+gla+G"


def test_variants_of_a_mixer_are_jobs_of_their_own(tmp_path):
    typed = ["gla", "gla(n_heads=2)", "gla+attention(window=4)", f"{OWN}:Powers(n=3)"]
    jobs = make_jobs(get_suite("smoke")[:1], typed, [0])
    assert [job.mixer for job in jobs] == typed
    assert len({job.folder for job in jobs}) == 4
    gla, heads, pattern, own = (job.config.model for job in jobs)
    # the other arguments are the mixer's own
    assert gla.mixer_args == complete_mixer_args("gla", {})
    assert heads == dataclasses.replace(
        gla,
        mixer_args={**gla.mixer_args, "n_heads": 2},
        **{name: getattr(heads, name) for name in ("d_model", "d_channel_mixing")},
    )
    assert pattern.mixer == ("gla", "attention") and pattern.mixer_args["attention"]["window"] == 4
    assert [type(block.mixer).__name__ for block in LanguageModel(pattern).blocks] == ["GLA", "Attention"]
    assert own.mixer_args == {"n": 3, "named": ""}
    assert isinstance(gla, ModelConfig)
    for job in jobs:
        assert job.sizes.parameters == pytest.approx(jobs[0].sizes.parameters, rel=0.02)
    row = make_rows([write_job(jobs[1], tmp_path, {"command": ""})])[0]
    assert row["mixer"] == "gla(n_heads=2)" and row["mixer_args"] == json.loads(json.dumps(heads.mixer_args))


@pytest.mark.parametrize(
    ("mixers", "complaint"),
    [
        (["gla(d_v=8, n_heads=2)", "gla(n_heads=2,d_v=8)"], "'gla(n_heads=2, d_v=8)' is given twice"),
        (["gla(gate='x')"], "called 'gate'; did you mean 'gate_rank'"),
        (["gla+lru+gla"], "gla+lru+gla on copying: `mixer` must be a pattern of 1 to 2 names"),
    ],
)
def test_jobs_of_no_such_variants_are_refused(mixers, complaint):
    with pytest.raises(ConfigError) as refused:
        make_jobs(get_suite("smoke"), mixers, [0])
    assert complaint in str(refused.value)


def test_a_memory_stands_after_the_mixers():
    text = "gla+attention(window=4)@recurrent_memory(segment_length=8, n_tokens=2)"
    variant = parse_variant("gla + attention(window=4) @ recurrent-memory(n_tokens=2, segment_length=8)")
    assert variant.label == text == parse_variant(text).label
    assert variant.mixer == ("gla", "attention")
    plain, job = make_jobs(get_suite("smoke")[:1], ["gla+attention(window=4)", text], [0])
    assert isinstance(job.config.model, ModelConfig) and isinstance(plain.config.model, ModelConfig)
    memory = MemoryConfig(kind="recurrent_memory", segment_length=8, n_tokens=2)
    assert job.config.model.memory == memory
    assert plain.config.model.memory == MemoryConfig()
    model = LanguageModel(job.config.model)
    assert job.sizes is not None and job.sizes.state == model.state_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gla@recurent_memory", "did you mean 'recurrent_memory'"),
        ("gla@recurrent_memory(tokens=2)", "argument of memory 'recurrent_memory' called 'tokens'"),
        ("gla@enhanced_recurrence(n_tokens=2)", "'enhanced_recurrence' called 'n_tokens'"),
        ("gla@recurrent_memory(2)", "arguments of memory 'recurrent_memory' must be named"),
        ("gla@recurrent_memory(n_tokens=0)", "`n_tokens` must be at least 1; got 0"),
    ],
)
def test_memories_that_do_not_exist_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_variant(text)
