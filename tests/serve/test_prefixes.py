import errno
import random

import pytest
import torch

from linrec.generation import state_file
from linrec.serve import Engine, PrefixTree, prefixes
from linrec.serve.snapshot_files import load_snapshots, save_snapshots
from tests.generation.models import build
from tests.tiers import tiered


@pytest.fixture
def bare(monkeypatch):
    """Count nothing but the content of states."""
    monkeypatch.setattr(prefixes, "OBJECTS", 0)
    monkeypatch.setattr(prefixes, "TENSOR", 0)


@pytest.mark.usefixtures("bare")
def test_the_longest_prefix_is_found_within_the_budget_and_the_oldest_leave_first():
    """A tree beside a dict of prefixes, over random strings of few letters."""
    draws = random.Random(0)
    for budget in (120, 400, 3000, 10**6):
        tree, kept = PrefixTree(budget), {}
        for step in range(600):
            salt, tokens = draws.choice("ab"), [draws.randrange(3) for _ in range(draws.randrange(1, 9))]
            if draws.random() < 0.5:
                state = torch.full((draws.randrange(1, 4),), step)
                tree.put(tokens, state, salt=salt)
                kept.setdefault((salt, *tokens), state)
                used = (salt, *tokens)
            else:
                used = None
            alive = {key: state for key, state in kept.items() if _held(tree, key)}
            # a state that had to leave is forgotten, and nothing else
            kept = alive
            length, state = tree.find(tokens, salt=salt)
            prefixes = [(salt, *tokens[:n]) for n in range(len(tokens), 0, -1)]
            best = next((key for key in prefixes if key in kept), None)
            assert (length, state) == ((0, None) if best is None else (len(best) - 1, kept[best]))
            assert tree.nbytes <= budget and len(tree) == len(kept)
            assert used is None or used in kept or budget < 120
            assert tree.nbytes == _counted(tree)
        if budget == 10**6:
            assert len(kept) > 200


@pytest.mark.usefixtures("bare")
def test_what_was_used_last_stays():
    # room for two states of eight bytes beside their tokens
    tree = PrefixTree(32)
    tree.put([1], torch.zeros(1))
    tree.put([2], torch.zeros(2))
    assert tree.find([1, 5]).length == 1
    tree.put([3], torch.zeros(1))
    assert [tree.find([n]).length for n in (1, 2, 3)] == [1, 0, 1]
    tree.put([4], torch.zeros(1000))
    assert len(tree) == 2


@pytest.mark.parametrize("name", tiered(["gate_loop", "attention"], ["transformer_xl", "hybrid"]))
def test_snapshots_in_files_are_those_of_the_tree(name, tmp_path):
    model = build(name)
    engine = Engine(model, chunk=4)
    for salt in ("", "key"):
        first = engine.submit(list(range(11)), n_tokens=5, seed=1, salt=salt)
        first.result()
    count = save_snapshots(engine.prefixes, tmp_path, model)
    assert count == len(engine.prefixes) == len(list(tmp_path.iterdir())) > 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    again = Engine(model, chunk=4)
    assert len(load_snapshots(again.prefixes, tmp_path, model, precision="bf16-mixed")) == count
    assert load_snapshots(again.prefixes, tmp_path, model) == []
    assert again.prefixes.nbytes == engine.prefixes.nbytes
    prompt = [*first.tokens, 3, 4]
    turns = [each.submit(prompt, n_tokens=5, salt="key") for each in (engine, again)]
    assert turns[0].result() == turns[1].result() and turns[1].cached == 15
    assert again.submit(prompt, n_tokens=1, salt="other").result() and again.counts["cached"] == 15
    # the least recently used leave first, as before
    small = Engine(model, snapshots=again.prefixes.nbytes // 2)
    load_snapshots(small.prefixes, tmp_path, model)
    assert small.submit(prompt, n_tokens=1, salt="key").result() and small.counts["cached"] == 15
    damaged = sorted(tmp_path.iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    refused = load_snapshots(Engine(model).prefixes, tmp_path, model)
    assert len(refused) == 1 and damaged.name in refused[0]
    other = load_snapshots(Engine(build(name, seed=1)).prefixes, tmp_path, build(name, seed=1))
    assert sum("another model" in sentence for sentence in other) == count - 1
    # snapshots that the tree has forgotten leave the folder too
    assert save_snapshots(small.prefixes, tmp_path, model) == len(list(tmp_path.iterdir()))


def test_a_full_disk_leaves_whole_snapshots_and_says_so(tmp_path, monkeypatch):
    model = build("gate_loop")
    engine = Engine(model, chunk=4)
    engine.submit(list(range(11)), n_tokens=5).result()
    count = save_snapshots(engine.prefixes, tmp_path, model)
    before = {path.name for path in tmp_path.iterdir()}
    engine.submit([*range(5), 1, 2, 3, 4], n_tokens=5).result()
    room = [2]

    def written(path, *arguments, **options):
        room[0] -= 1
        if room[0] < 0:
            path.write_bytes(b"the beginning")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *arguments, **options)

    write = state_file.write_tensors
    monkeypatch.setattr(state_file, "write_tensors", written)
    with pytest.raises(OSError, match="No space left"):
        save_snapshots(engine.prefixes, tmp_path, model)
    assert before <= {path.name for path in tmp_path.iterdir()}
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".snapshot"]
    tree = Engine(model).prefixes
    assert load_snapshots(tree, tmp_path, model) == [] and len(tree) >= count


def _nodes(tree):
    found = list(tree._roots.values())
    for node in found:
        found += node.below.values()
    return found


def _counted(tree):
    return sum(node.nbytes + len(node.edge) for node in _nodes(tree))


def _held(tree, key):
    path, read = tree._walk(torch.tensor(key[1:]).numpy().tobytes(), key[0])
    return bool(path) and read == 8 * len(key[1:]) and path[-1] in tree._used
