import random

import torch

from linrec.serve import PrefixTree


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
