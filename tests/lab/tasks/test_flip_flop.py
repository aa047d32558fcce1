import itertools

import pytest

from linrec.lab.tasks.lookup import FlipFlop

FEW = {"n_train": 20, "n_validation": 5, "n_test": 50}


def pairs(split):
    """Instruction letters and bits of every sample."""
    for row in split.inputs.tolist():
        yield ["01wri"[token] for token in row[::2]], row[1::2]


def test_reads_have_the_bit_written_last_and_are_asked_for_it_beforehand():
    task = FlipFlop(length=40, ignore=0.5, test_lengths=(80,), **FEW)
    for name, split in {"test": task.split("test"), **task.probes}.items():
        assert split.inputs.shape == (50, 80 if name == "80" else 40)
        groups = iter(split.group.tolist())
        for (instructions, bits), targets in zip(pairs(split), split.targets.tolist(), strict=True):
            assert instructions[0] == "w" and instructions[-1] == "r"
            assert set(instructions) <= set("wri") and set(bits) <= {0, 1}
            group, wanted, memory, age = next(groups), [], None, 0
            for instruction, bit in zip(instructions, bits, strict=True):
                memory, age = (bit, 0) if instruction == "w" else (memory, age + 1)
                if instruction == "r":
                    assert bit == memory and group[len(wanted)] == age
                wanted += [memory if instruction == "r" else -100, -100]
            assert targets == wanted


def test_instructions_have_the_published_frequencies():
    task = FlipFlop(**FEW)
    assert list(task.probes) == ["dense", "sparse"]
    for split, ignore in (
        (task.split("test"), 0.8),
        (task.probes["dense"], 0.1),
        (task.probes["sparse"], 0.98),
    ):
        assert split.inputs.shape == (50, 512)
        # the first and the last are given
        drawn = [letter for instructions, _ in pairs(split) for letter in instructions[1:-1]]
        for letter, p in {"i": ignore, "w": (1 - ignore) / 2, "r": (1 - ignore) / 2}.items():
            off = 4 * (p * (1 - p) / len(drawn)) ** 0.5
            assert drawn.count(letter) / len(drawn) == pytest.approx(p, abs=off)
        bits = [
            bit
            for letters, row in pairs(split)
            for letter, bit in zip(letters, row, strict=True)
            if letter != "r"
        ]
        assert sum(bits) / len(bits) == pytest.approx(0.5, abs=2 / len(bits) ** 0.5)
        # none depends on the one before
        changes = [one != other for one, other in itertools.pairwise(bits)]
        assert sum(changes) / len(changes) == pytest.approx(0.5, abs=2 / len(changes) ** 0.5)
    assert task.chance == 0.5
    assert task.trivial_score == pytest.approx(0.5, abs=0.15)


def test_fields_out_of_range_are_refused():
    for length in (2, 7):
        with pytest.raises(ValueError, match=f"`length` must be even and at least 4.*got {length}"):
            FlipFlop(length=length)
    for field in ("ignore", "ignore_dense", "ignore_sparse"):
        with pytest.raises(ValueError, match=f"`{field}` must be a probability, in 0 .. 1; got 1.5"):
            FlipFlop(**{field: 1.5})
