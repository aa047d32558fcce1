import re
import stat

import pytest
import safetensors.torch
import torch

from linrec.generation import GenerationState, StateFileError, generate, load_state, pad_prompts, save_state
from linrec.generation.state import named
from linrec.generation.state_file import NAME
from linrec.tensor_files import read_tensors, write_tensors
from tests.tiers import tiered

from .models import FIRST, MIXERS, build, prompt

every_mixer = pytest.mark.parametrize("name", tiered(FIRST, rare=MIXERS))


@every_mixer
@pytest.mark.parametrize("precision", tiered(["32-true"], ["bf16-mixed"]))
def test_a_state_from_a_file_goes_on_as_if_it_had_not_been_in_one(name, precision, tmp_path):
    model = build(name, dtype=torch.float32)
    tokens, reset = pad_prompts([prompt()[0], prompt()[1, :3]])
    options = {"seed": 6, "precision": precision}
    whole, _ = generate(model, tokens, reset=reset, n_tokens=12, **options)
    first, state = generate(model, tokens, reset=reset, n_tokens=5, **options)
    save_state(tmp_path / "state", state, model)
    loaded = load_state(tmp_path / "state", build(name, dtype=torch.float32))
    second, _ = generate(model, state=loaded, n_tokens=7, **options)
    assert torch.equal(torch.cat([first, second], dim=1), whole)
    kept = named(state.layers, "layers")
    assert list(named(loaded.layers, "layers")) == list(kept)
    for part, tensor in named(loaded.layers, "layers").items():
        torch.testing.assert_close(tensor, kept[part], rtol=0, atol=0)


def test_a_prompt_that_was_only_read_is_kept_whole(tmp_path):
    model = build("hgru")
    tokens, reset = pad_prompts([prompt()[0], prompt()[1, :1]])
    _, state = generate(model, tokens, reset=reset, n_tokens=0)
    save_state(tmp_path / "state", state, model)
    loaded = load_state(tmp_path / "state", model)
    assert loaded.reset.tolist() == [False, True] and loaded.drawn == 0
    found, _ = generate(model, state=loaded, n_tokens=9)
    assert torch.equal(found, generate(model, tokens, reset=reset, n_tokens=9).tokens)


def test_a_file_is_replaced_whole_and_readable_like_others(tmp_path):
    model, path = build("hgru"), tmp_path / "state"
    path.write_text("what was there")
    mode = stat.S_IMODE(path.stat().st_mode)
    _, state = generate(model, prompt(), n_tokens=2)
    save_state(path, state, model)
    assert load_state(path, model).drawn == 2
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    model, path = build("hgru"), tmp_path / "state"
    _, state = generate(model, prompt(), n_tokens=2)
    save_state(path, state, model)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_state(path, state, model)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def complaint(path, model) -> str:
    with pytest.raises(StateFileError) as caught:
        load_state(path, model)
    return str(caught.value)


def test_a_state_of_another_model(tmp_path):
    model, path = build("hgru"), tmp_path / "state"
    save_state(path, generate(model, prompt(), n_tokens=2).state, model)
    for other in (
        build("hgru", seed=1),
        build("hgru", dropout=0.1),
        build("hgru", dtype=torch.float32),
        build("lru"),
    ):
        assert "was saved by another model" in complaint(path, other)


def test_files_that_are_no_states(tmp_path):
    model, path = build("hgru"), tmp_path / "state"
    assert complaint(path, model) == f"the state {path} cannot be read: No such file or directory."
    assert "cannot be read: Is a directory" in complaint(tmp_path, model)
    path.write_text("a letter")
    assert f"{path} is not a state file" in complaint(path, model)
    safetensors.torch.save_file({"token": torch.zeros(1)}, path)
    assert f"{path} holds no generation state" in complaint(path, model)
    save_state(path, generate(model, prompt(), n_tokens=2).state, model)
    path.write_bytes(path.read_bytes()[:-8])
    assert f"{path} is not a state file" in complaint(path, model)


def rewritten(path, change) -> None:
    """Change the tensors and the description of a state file."""
    tensors, about = read_tensors(path, name=NAME)
    change(tensors, about)
    write_tensors(path, tensors, about, name=NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, about: t.pop("token"), "it has no `token` of shape (b) and dtype int64"),
        (lambda t, about: t.update(token=torch.zeros(2)), "it has no `token` of shape (b) and dtype int64"),
        (lambda t, about: t["token"].add_(13), "its `token` is not in 0 .. 12"),
        (lambda t, about: t["token"].sub_(13), "its `token` is not in 0 .. 12"),
        (lambda t, about: t.update(reset=torch.zeros(2)), "its `reset` is not of shape (2,) and dtype bool"),
        (lambda t, about: t.pop("layers.1"), "its part layers.1 is missing"),
        (
            lambda t, about: t.update({"layers.1": t["layers.1"][:1]}),
            "its part layers.1 must have shape (2, 8); it has (1, 8).",
        ),
        (
            lambda t, about: about["complex"].remove("layers.1"),
            "its part layers.1 must have shape (2, 8); it has (2, 8, 2).",
        ),
        (
            lambda t, about: t.update({"layers.1": torch.zeros(2, 8)}),
            "its part layers.1 must have a dtype like torch.complex128; it has torch.float32.",
        ),
        (lambda t, about: t.update({"layers.2": t["token"].clone()}), "has no part layers.2"),
        (lambda t, about: t.update({"layers.rows.0": torch.tensor([0, 0])}), "each of 2 rows once"),
        (lambda t, about: about.pop("drawn"), "it lacks the number of generated tokens"),
        (lambda t, about: about.update(drawn=-1), "it lacks the number of generated tokens"),
        (lambda t, about: about.update(format=3), "was written by linrec 0.1.0; linrec 0.1.0 cannot read"),
    ],
)
def test_damaged_states(change, message, tmp_path):
    model, path = build("hgru"), tmp_path / "state"
    save_state(path, generate(model, prompt(), n_tokens=2).state, model)
    rewritten(path, change)
    assert message in complaint(path, model)


def test_a_cache_may_have_any_number_of_steps_but_no_other_shape(tmp_path):
    model, path = build("attention"), tmp_path / "state"
    save_state(path, generate(model, prompt(), n_tokens=2).state, model)
    assert load_state(path, model).layers[0].cache.k.shape == (2, 6, 1, 8)
    rewritten(path, lambda t, about: t.update({"layers.0.cache.k": torch.zeros(2, 6, 8, 1)}))
    expected = re.escape("its part layers.0.cache.k must have shape (2, 0, 1, 8); it has (2, 6, 8, 1)")
    assert re.search(expected, complaint(path, model))


def test_the_size_of_a_state_is_that_of_the_models_state():
    state = GenerationState(
        (torch.zeros(3, 4), (None, torch.zeros(3, dtype=torch.complex64))), torch.zeros(3)
    )
    assert state.nbytes == 3 * 4 * 4 + 3 * 8
