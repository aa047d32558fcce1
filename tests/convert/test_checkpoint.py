import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from linrec import convert
from linrec.convert import ConversionError, Options, delta_net, from_hugging_face, model_types
from linrec.convert.checkpoint import open_checkpoint

from . import released

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b.half": torch.ones(2).bfloat16(),
    "c": torch.tensor([1, 2]),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "none such", "top": {"__float__": "Infinity"}}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(folder):
    (folder / "model.safetensors").unlink()
    places = {}
    for name, tensor in TENSORS.items():
        places[name] = f"model-{name[0]}.safetensors"
        save_file({name: tensor}, folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def test_model_types_are_the_files_of_the_folder():
    files = {path.stem for path in Path(convert.__file__).parent.glob("*.py")}
    assert set(model_types()) == files - {"__init__", *convert.SHARED}


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_tensors_are_taken_once_and_in_single_precision_at_least(kind, request):
    with open_checkpoint(request.getfixturevalue(kind)) as (options, tensors):
        assert options.read("top", float) == float("inf")
        assert torch.equal(tensors.take("a", 2, 3), TENSORS["a"])
        half = tensors.take("b.half", 2)
        assert half.dtype == torch.float32 and torch.equal(half, TENSORS["b.half"].float())
        assert "c" in tensors and "a" not in tensors
        with pytest.raises(ConversionError, match=r"`model_type`.*`c`"):
            tensors.check_all_taken()
        with pytest.raises(ConversionError, match="has no tensor `a`; the nearest is `c`"):
            tensors.take("a", 2, 3)
        with pytest.raises(ConversionError, match=r"`c`.* got int64. Quantised"):
            tensors.take("c", 2)
        tensors.check_all_taken()


def test_shapes_are_those_that_are_asked_for(folder):
    with (
        open_checkpoint(folder) as (_, tensors),
        pytest.raises(ConversionError, match=r"`a`.*\(3, 2\) by config.json; got \(2, 3\)"),
    ):
        tensors.take("a", 3, 2)


def test_options_are_of_their_kind():
    options = Options({"n": 3, "flag": True, "null": None}, "config.json")
    assert options.read("n", int) == 3 and options.read("n", float) == 3.0
    assert options.read("null", int, 5) == options.read("absent", int, 5) == 5
    assert options.supported("absent", ("silu",), "silu") == "silu"
    for name, kind in (("flag", int), ("n", bool), ("n", str)):
        with pytest.raises(ConversionError, match=f"config.json: `{name}`.*{kind.__name__}"):
            options.read(name, kind)
    for name in ("null", "absent"):
        with pytest.raises(ConversionError, match=f"config.json has no `{name}`"):
            options.read(name, int)


def test_an_unknown_model_type_gives_the_nearest(folder):
    (folder / "config.json").write_text('{"model_type": "mamba3"}')
    with pytest.raises(ConversionError, match="`model_type` 'mamba3'; did you mean 'mamba"):
        from_hugging_face(folder)
    # what lies beside the architectures is none
    (folder / "config.json").write_text('{"model_type": "checkpoint"}')
    with pytest.raises(ConversionError, match="`model_type` 'checkpoint'"):
        from_hugging_face(folder)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_code_in_a_pickle_does_not_run(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin"):
        from_hugging_face(folder)


@pytest.mark.parametrize("content", [{"a": 1}, [torch.ones(1)]])
def test_a_pickle_holds_tensors_by_name(folder, content):
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    message = (
        "has no tensor|it must hold a dict of tensors by name" if content else "there is no `model_type`"
    )
    with pytest.raises(ConversionError, match=message):
        from_hugging_face(folder)


def test_pickles_are_read_as_safetensors_are(folder, sharded):
    for path in folder.glob("*.safetensors"):
        torch.save({**load_file(path)}, path.with_suffix(".bin"))
        path.unlink()
    index = folder / "model.safetensors.index.json"
    index.rename(folder / "pytorch_model.bin.index.json")
    places = json.loads((folder / "pytorch_model.bin.index.json").read_text().replace(".safetensors", ".bin"))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(places))
    with open_checkpoint(folder) as (_, tensors):
        assert tensors.shape("a") == (2, 3) and set(tensors) == set(TENSORS)
        assert torch.equal(tensors.take("a", 2, 3), TENSORS["a"])


def test_an_rwkv_names_the_tensor_that_is_missing(tmp_path):
    with pytest.raises(ConversionError, match=r"there is no .*no\.pth"):
        convert.from_rwkv_lm(tmp_path / "no.pth")
    torch.save({"emb.weight": torch.ones(3, 2)}, tmp_path / "one.pth")
    with pytest.raises(ConversionError, match=r"`blocks\.0\.att\.key\.weight`"):
        convert.from_rwkv_lm(tmp_path / "one.pth")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "there is no .*config.json; a checkpoint is a folder with config.json and"),
        ("config.json", "{", "config.json cannot be read as JSON"),
        ("config.json", "[]", "config.json must hold a JSON object; got list"),
        ("config.json", "{}", "config.json has no `model_type`"),
        ("model.safetensors", None, "there is no .*model.safetensors; download or copy the whole checkpoint"),
        ("model.safetensors", "x", "model.safetensors cannot be read as tensors of safetensors"),
    ],
)
def test_files_that_cannot_be_read(file, content, message, folder):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ConversionError, match=message):
        from_hugging_face(folder)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "model-a.safetensors", "x": "model-a.safetensors"}, "has `x`, but the file lacks it"),
        ({"a": "model-x.safetensors"}, "there is no .*model-x.safetensors"),
        ({"a": "../model-a.safetensors"}, "must have a `weight_map`"),
        ({"a": 1}, "must have a `weight_map`"),
        (None, "must have a `weight_map`"),
    ],
)
def test_an_index_names_what_is_there(places, message, sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ConversionError, match=message):
        from_hugging_face(sharded)


def test_there_is_a_folder(tmp_path):
    with pytest.raises(ConversionError, match=r"there is no folder .*none; pass one"):
        from_hugging_face(str(tmp_path / "none"))


def test_strengths_of_two_everywhere_are_refused():
    path = released.FOLDER / "delta_net_no_beta_fla" / "config.json"
    options = Options({**json.loads(path.read_text()), "allow_neg_eigval": True}, path)
    with pytest.raises(ConversionError, match=r"`allow_neg_eigval`.*True.*False"):
        delta_net.config(options)


@pytest.mark.parametrize(("case", "eps"), [("delta_net_fla", 1e-6), ("delta_net_options_fla", 0.0)])
def test_sums_of_features_have_no_eps(case, eps):
    path = released.FOLDER / case / "config.json"
    assert delta_net.config(Options(json.loads(path.read_text()), path)).mixer_args["qk_eps"] == eps
