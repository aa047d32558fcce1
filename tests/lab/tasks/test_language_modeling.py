import dataclasses
import gzip
import json

import numpy as np
import pytest
import torch

from linrec.lab.corpora import TextCounts
from linrec.lab.tasks import NO_TARGET, LanguageModeling, ResizableTask, ScoredTask, Source, Task, TokenSplit
from linrec.lab.train import get_recipe
from linrec.text import ByteTokenizer, DataError

TEXT = "the cat sat on the mat, and the dog sat on the log.\n" * 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def numbers(n, length, **options):
    """Windows over n tokens that say where they are."""
    return TokenSplit.of(np.arange(n, dtype=np.uint16), length=length, **options)


def everything(split):
    return split.rows(torch.arange(len(split)))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 13, 17, 18])
@pytest.mark.parametrize("length", [1, 3, 4, 16])
def test_evaluation_predicts_every_token_but_the_first_exactly_once(n, length):
    split = numbers(n, length)
    batch = everything(split)
    assert batch.inputs.shape == batch.targets.shape == (-(-(n - 1) // length), length)
    counted = batch.targets != NO_TARGET
    assert batch.targets[counted].tolist() == list(range(1, n))
    assert torch.equal(batch.targets[counted], batch.inputs[counted] + 1)
    # what fills up the last window is its end, and token 0
    assert (batch.inputs[~counted] == 0).all()
    assert counted.flatten().tolist() == sorted(counted.flatten().tolist(), reverse=True)
    assert batch.reset is None and batch.inputs.dtype == batch.targets.dtype == torch.int64


@pytest.mark.parametrize("n", [0, 1])
def test_without_a_target_there_is_no_window(n):
    split = numbers(n, 4)
    assert len(split) == len(split.of_epoch(seed=0, epoch=0)) == 0
    assert everything(split).inputs.shape == (0, 4)


@pytest.mark.parametrize(
    ("n", "length", "windows"), [(5, 4, 1), (11, 4, 1), (12, 4, 2), (100, 4, 24), (7, 1, 6), (3, 4, 0)]
)
def test_windows_of_an_epoch_are_full_and_as_many_in_every_epoch(n, length, windows):
    for epoch in range(20):
        split = numbers(n, length).of_epoch(seed=3, epoch=epoch)
        batch = everything(split)
        assert batch.inputs.shape == (len(split), length) == (windows, length)
        assert torch.equal(batch.targets, batch.inputs + 1)
        # one after the other, without gaps
        flat = batch.inputs.flatten().tolist()
        assert flat == list(range(flat[0], flat[0] + len(flat))) if flat else windows == 0


def test_over_the_epochs_every_token_is_predicted_in_every_place_of_a_window():
    n, length = 41, 4
    seen = set()
    for epoch in range(200):
        targets = everything(numbers(n, length).of_epoch(seed=0, epoch=epoch)).targets
        seen |= {(int(target), place) for row in targets for place, target in enumerate(row)}
    # near the ends of the text some places do not exist
    possible = {(token, place) for token in range(1, n) for place in range(length) if place < token}
    possible -= {(token, place) for token, place in possible if token + length - 1 - place > n - 1}
    assert seen == possible


def test_epochs_depend_on_seed_and_epoch_alone():
    state = np.random.get_state()[1].copy(), torch.random.get_rng_state()
    offsets = [[numbers(1000, 50).of_epoch(seed=s, epoch=e).offset for e in range(8)] for s in range(3)]
    again = [[numbers(1000, 50).of_epoch(seed=s, epoch=e).offset for e in range(8)] for s in range(3)]
    assert offsets == again
    assert len({offset for row in offsets for offset in row}) > 15
    assert np.array_equal(np.random.get_state()[1], state[0])
    assert torch.equal(torch.random.get_rng_state(), state[1])
    # an epoch of an epoch is that of the whole
    twice = numbers(1000, 50).of_epoch(seed=0, epoch=0).of_epoch(seed=1, epoch=2)
    assert (twice.offset, len(twice)) == (offsets[1][2], 19)


def test_rows_come_in_the_order_asked_for():
    split = numbers(50, 7)
    whole = everything(split)
    index = torch.tensor([6, 0, 3, 3])
    some = split.rows(index)
    assert torch.equal(some.inputs, whole.inputs[index]) and torch.equal(some.targets, whole.targets[index])


@pytest.mark.parametrize(
    ("dtype", "largest"), [(np.uint16, 2**16 - 1), (np.uint32, 2**32 - 1)], ids=["uint16", "uint32"]
)
def test_large_tokens_keep_their_value(dtype, largest):
    tokens = np.array([largest, 0, largest // 2 + 1, largest // 2, largest], dtype=dtype)
    split = TokenSplit.of(tokens, length=4)
    batch = everything(split)
    assert (
        batch.inputs[0].tolist() == tokens[:-1].tolist() and batch.targets[0].tolist() == tokens[1:].tolist()
    )
    assert split.tokens().dtype == dtype and np.array_equal(split.tokens(), tokens)


def test_resets_are_where_documents_begin():
    starts = [0, 5, 6, 13, 19]
    split = numbers(21, 4, starts=np.array(starts))
    for moved in (split, *(split.of_epoch(seed=0, epoch=epoch) for epoch in range(5))):
        batch = everything(moved)
        expected = [[token in starts for token in row] for row in batch.inputs.tolist()]
        counted = batch.targets != NO_TARGET
        assert batch.reset[counted].tolist() == torch.tensor(expected)[counted].tolist()
        # nothing begins beyond the end
        assert not batch.reset[~counted].any()


def test_small_splits_move_and_large_ones_stay(monkeypatch):
    split = numbers(20, 4, starts=np.array([0, 7]))
    moved = split.to("meta")
    assert moved.ids.device.type == moved.starts.device.type == "meta"
    assert moved.rows(torch.tensor([0])).reset.device.type == "meta"
    assert split.to("cpu") is split
    monkeypatch.setattr("linrec.lab.tasks.language_modeling.MOVED", 39)
    assert split.to("meta") is split


def test_another_length_is_cut_from_the_same_tokens():
    split = numbers(30, 4).of_epoch(seed=0, epoch=1)
    longer = split.with_length(29)
    assert everything(longer).targets.tolist() == [list(range(1, 30))]
    with pytest.raises(ValueError, match="`length` must be at least 1; got 0"):
        split.with_length(0)


def test_a_file_is_cut_into_training_and_validation(file):
    task: Task = LanguageModeling(path=file, length=8).prepared()
    source: Source = task.split("train")
    assert (task.vocab_size, task.n_outputs, task.chance) == (257, 257, 1 / 257)
    assert task.reset_token is None and not isinstance(task, ScoredTask)
    cut = int(len(TEXT) * 0.9)
    tokenizer = task.tokenizer_object()
    assert tokenizer.decode(task.split("train").tokens()) == TEXT[:cut]
    assert tokenizer.decode(task.split("validation").tokens()) == TEXT[cut:]
    assert len(source) == -(-(cut - 1) // 8) and len(task.split("test")) == 0
    assert task.split("train").counts == TextCounts(
        cut, 1, cut, cut, len(TEXT[:cut].split()), TEXT[:cut].count("\n") + 1
    )
    assert everything(task.split("train")).reset is None


def test_windows_of_another_length_are_of_the_same_text(file):
    task = LanguageModeling(path=file, length=8).prepared()
    short = task.at_length(3)
    assert isinstance(task, ResizableTask) and short == LanguageModeling(path=file, length=3).prepared()
    assert short.split("train").rows(torch.tensor([0])).inputs.tolist() == [
        task.split("train").rows(torch.tensor([0])).inputs[0, :3].tolist()
    ]


def test_documents_are_marked_and_reset(tmp_path):
    for name, text in {"train_0": "one", "train_1": "two!", "valid": "three", "test": "x"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    task = LanguageModeling(path=tmp_path, documents=True, length=4).prepared()
    end = ByteTokenizer.end_of_document
    expected = [*b"one", end, *b"two!", end]
    batch = everything(task.split("train"))
    assert batch.inputs.flatten().tolist() == expected[:-1]
    # the first token of a document is predicted from the end of the one before
    assert batch.targets.flatten().tolist() == expected[1:]
    assert batch.reset.tolist() == [[True, False, False, False], [True, False, False, False]]
    assert task.split("test").tokens().tolist() == [*b"x", end]


def test_rows_of_a_data_set_are_documents(tmp_path):
    datasets = pytest.importorskip("datasets", reason='the extra "text" is not installed')
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"story": ["ab", "", "cde", "f" * 10, "g"]})
    rows.save_to_disk(str(tmp_path / "saved"))
    fields = {
        "dataset": str(tmp_path / "saved"),
        "text_column": "story",
        "validation_share": 0.25,
        "length": 2,
    }
    task = LanguageModeling(documents=True, **fields).prepared()
    train = task.split("train")
    assert train.starts.tolist() == [0, 3, 7] and train.counts.documents == 3
    assert task.split("validation").tokens().tolist() == [*b"g", 256]
    stream = LanguageModeling(**fields).prepared()
    tokens = np.concatenate([stream.split(name).tokens() for name in ("train", "validation")])
    assert bytes(tokens.astype(np.uint8)) == b"ab\n\ncde\nffffffffff\ng\n"


def test_the_tokenizer_of_a_run_folder_is_taken_for_other_text(file, tmp_path):
    trained = LanguageModeling(path=file, tokenizer="characters", length=8).prepared()
    run = tmp_path / "run"
    run.mkdir()
    trained.tokenizer_object().save(run)
    other = tmp_path / "other.txt"
    other.write_text("a cat sat on a log")
    changed = {"path": other, "tokenizer": str(run), "validation_share": 0.0, "length": 4}
    task = dataclasses.replace(trained, **changed).prepared()
    assert task.vocab_size == trained.vocab_size
    assert (
        task.split("train").tokens().tolist() == trained.tokenizer_object().encode(other.read_text()).tolist()
    )
    other.write_text("a cow")
    with pytest.raises(DataError, match=r"the character 'w' \(U[+]0077\) is not among"):
        dataclasses.replace(trained, **changed).prepared()


def test_files_of_characters_between_spaces_are_read_as_penn_treebank_is(tmp_path):
    lines = {"train": ["aer_banknote", "_berlitz_N_"], "valid": ["a_note", "zl"], "test": ["bank"]}
    for part, words in lines.items():
        text = "".join(" " + " ".join(word) + " \n" for word in words)
        (tmp_path / f"ptb.char.{part}.txt").write_text(text)
        # the same by words, which a glob leaves out
        (tmp_path / f"ptb.{part}.txt").write_text("aer banknote")
    recipe = get_recipe("penn-treebank-char").task
    task = dataclasses.replace(recipe, path=tmp_path / "ptb.char.*.txt", length=8).prepared()
    decode = task.tokenizer_object().decode
    assert decode(task.split("train").tokens()) == "aer_banknote\n_berlitz_N_\n"
    assert decode(task.split("validation").tokens()) == "a_note\nzl\n"
    assert decode(task.split("test").tokens()) == "bank\n"
    assert task.vocab_size == len({*"aer_banknote_berlitz_N_\n"})
    # bits per byte are bits per character
    counts = task.split("train").counts
    assert counts.tokens == counts.bytes == counts.characters == 25
    assert recipe.length == 150 and recipe.tokenizer == "characters"


def test_penn_treebank_by_words(tmp_path):
    lines = {"train": ["aer banknote N", "berlitz <unk> N"], "valid": ["a N"], "test": ["berlitz", "N N"]}
    for part, words in lines.items():
        (tmp_path / f"ptb.{part}.txt").write_text("".join(f" {line} \n" for line in words))
        # the same by characters, which the glob leaves out
        (tmp_path / f"ptb.char.{part}.txt").write_text("x y z")
    recipe = get_recipe("penn-treebank").task
    task = dataclasses.replace(recipe, path=tmp_path / "ptb.[tv]*.txt", length=3).prepared()
    assert task.tokenizer_object().words == ("<eos>", "N", "<unk>", "aer", "banknote", "berlitz")
    assert task.vocab_size == 6
    assert task.split("train").tokens().tolist() == [3, 4, 1, 0, 5, 2, 1, 0]
    assert task.split("validation").tokens().tolist() == [2, 1, 0]
    counts = task.split("test").counts
    # the words and ends of lines by which perplexities are normalised
    assert counts.tokens == counts.words + counts.lines == 5


def test_a_file_is_cut_at_bytes_and_not_within_a_character(tmp_path):
    content = ("a" * 9 + "é" + "b" * 8 + "😀" + "c" * 3).encode()
    path = tmp_path / "enwik8"
    path.write_bytes(content)
    expected = {
        # of 26 bytes; the cut at 20 is within the emoji, and the cut at 10 within the é
        6: (content[:14], content[14:23], content[23:]),
        8: (content[:11], content[11:18], content[18:]),
    }
    for held_out, parts in expected.items():
        task = LanguageModeling(path=path, held_out_bytes=held_out, length=2).prepared()
        found = [
            bytes(task.split(name).tokens().astype(np.uint8)) for name in ("train", "validation", "test")
        ]
        assert found == list(parts)
    # read in several blocks
    path.write_bytes(bytes([*range(128)]) * 20_000)
    task = LanguageModeling(path=path, held_out_bytes=5000).prepared()
    tokens = np.concatenate([task.split(name).tokens() for name in ("train", "validation", "test")])
    assert bytes(tokens.astype(np.uint8)) == path.read_bytes()
    assert [task.split(name).counts.bytes for name in ("validation", "test")] == [5000, 5000]
    assert get_recipe("enwik8").task.held_out_bytes == 5_000_000
    with pytest.raises(
        DataError, match="must have more than 2 `held_out_bytes` = 2560000 bytes; it has 2560000"
    ):
        LanguageModeling(path=path, held_out_bytes=1_280_000).prepared()
    with pytest.raises(DataError, match="`held_out_bytes` needs `path` to be a single file; got"):
        LanguageModeling(path=tmp_path, held_out_bytes=1).prepared()


def test_a_larger_vocabulary_is_padding(file):
    task = LanguageModeling(path=file, length=8, vocab_size=320)
    assert task.prepared().vocab_size == 320 and task.prepared().chance == 1 / 320
    with pytest.raises(DataError, match=r"`vocab_size` must be at least the 257 tokens .*'bytes'; got 256"):
        dataclasses.replace(task, vocab_size=256).prepared()


def test_prepared_says_what_only_the_data_can_tell_and_nothing_else(file):
    task = LanguageModeling(path=file, tokenizer="characters", length=8)
    assert task.vocab_size is None and task.n_outputs is None
    prepared = task.prepared()
    assert prepared == dataclasses.replace(task, vocab_size=len(set(TEXT[: int(len(TEXT) * 0.9)])))
    assert prepared.prepared() == prepared and hash(prepared) == hash(prepared.prepared())
    with pytest.raises(DataError, match=r"`vocab_size` must be set; got None. Call `prepared\(\)`"):
        task.chance  # noqa: B018


def test_a_stored_configuration_is_the_same(file):
    task = LanguageModeling(path=file, cache=file.parent / "own", length=8).prepared()
    stored = json.loads(json.dumps(dataclasses.asdict(task), default=str))
    assert LanguageModeling(**stored) == task


def test_trivial_score_is_that_of_the_most_frequent_training_token(tmp_path):
    (tmp_path / "train.txt").write_text("aab" * 10)
    (tmp_path / "valid.txt").write_text("bbba")
    task = LanguageModeling(path=tmp_path, tokenizer="characters", length=4)
    # of b, b, a, the first token being no target
    assert task.trivial_score == pytest.approx(1 / 3)
    (tmp_path / "test.txt").write_text("bbb")
    assert dataclasses.replace(task).trivial_score == 0
    alone = LanguageModeling(path=tmp_path / "train.txt", length=4, validation_share=0.0)
    assert alone.trivial_score == pytest.approx(19 / 29)


def test_text_that_is_shorter_than_a_window(file):
    task = LanguageModeling(path=file, length=len(TEXT), validation_share=0.0)
    message = f"has {len(TEXT)} tokens, too few for a window of `length` = {len(TEXT)} and the token after it"
    with pytest.raises(DataError, match=message):
        task.prepared()
    # evaluation needs no full window
    assert len(task.split("train")) == 1
    assert dataclasses.replace(task, length=len(TEXT) - 1).prepared().vocab_size == 257


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "a", "dataset": "b"}, "one of `path` and `dataset` must be given; got both: a, b"),
        ({"length": 0}, "`length` must be at least 1; got 0"),
        ({"dataset": "a", "held_out_bytes": 5}, "and 0 for a `dataset`; got 5 and `dataset` = a"),
        (
            {"validation_share": -0.1},
            "`validation_share` and `test_share` must be at least 0, with a sum below",
        ),
        ({"validation_share": 0.5, "test_share": 0.5}, "with a sum below 1; got 0.5 and 0.5"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(DataError, match=message):
        LanguageModeling(**fields)


def test_without_text_there_is_an_error_that_says_how_to_give_it(file):
    with pytest.raises(DataError, match=r"got neither\. Pass --data\.path FILE, or --data\.dataset NAME"):
        LanguageModeling().prepared()
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist"):
        LanguageModeling(path=file.parent / "nowhere.txt").prepared()
    with pytest.raises(ValueError, match="no split 'valid'; did you mean 'validation'"):
        LanguageModeling(path=file).split("valid")


GENOME = ">chr1 the first\nACGTacgtNN\nRYAC\n>chr2\n" + "TTTTGGGGCC\n" * 3
RECORDS = {"chr1": "ACGTACGTNNNNAC", "chr2": "TTTTGGGGCC" * 3}
BED = [("chr1", 2, 9, "train"), ("chr2", 0, 12, "valid"), ("chr1", 0, 5, "train"), ("chr2", 25, 30, "test")]


def write_genome(folder, name="hg.ml.fa"):
    content = GENOME.encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (folder / "sequences.bed").write_text("".join("\t".join(map(str, line)) + "\n" for line in BED))
    return folder / name


@pytest.mark.parametrize("name", ["hg.ml.fa", "hg.fasta.gz"])
def test_intervals_of_a_genome_are_documents(tmp_path, name):
    path = write_genome(tmp_path, name)
    fields = {"path": path, "tokenizer": "characters", "documents": True, "length": 4}
    task = LanguageModeling(**fields, intervals=tmp_path / "sequences.bed").prepared()
    decode = task.tokenizer_object().decode
    for split, of in {"train": "train", "validation": "valid", "test": "test"}.items():
        pieces = [
            RECORDS[record][start:stop]
            for record, start, stop, to in sorted(BED, key=lambda b: b[0])
            if to == of
        ]
        tokens, starts = task.split(split).tokens(), task.split(split).starts.tolist()
        assert decode(tokens) == "".join(pieces)
        assert starts == np.cumsum([0, *map(len, pieces[:-1])]).tolist()
    assert get_recipe("hg38").task.documents
    # without intervals, records are documents
    whole = LanguageModeling(**fields, validation_share=0.5).prepared()
    assert (
        decode(whole.split("train").tokens())[:5] == "ACGTA" and len(whole.split("validation").tokens()) == 30
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chr1\t3\t5\tdev", "must have a name, two numbers, and train, valid or test in each line"),
        ("chr1\t5\t5\ttrain", "got 'chr1.t5.t5.ttrain' in line 5"),
        ("chr1\t5", "in line 5"),
        ("chr1\t5\t15\ttrain", "chr1 has 14 bases, and an interval ends at 15. The files are of different"),
        ("chr9\t5\t15\ttrain", "has no record 'chr9', which .*sequences.bed names"),
    ],
)
def test_intervals_that_are_not_of_the_genome_are_refused(tmp_path, line, message):
    path = write_genome(tmp_path)
    with (tmp_path / "sequences.bed").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        LanguageModeling(path=path, documents=True, length=2, intervals=tmp_path / "sequences.bed").prepared()


def test_genomes_that_cannot_be_read_are_refused(tmp_path):
    path = write_genome(tmp_path)
    with pytest.raises(DataError, match=r"hg38.fa does not exist. Download a genome .*hg38.fa.gz"):
        LanguageModeling(path=tmp_path / "hg38.fa").prepared()
    with pytest.raises(DataError, match=r"`intervals` = .*gone.bed cannot be read: .*human-sequences.bed"):
        LanguageModeling(path=path, intervals=tmp_path / "gone.bed").prepared()
    with pytest.raises(DataError, match="`intervals` needs a FASTA file as `path`; got None"):
        LanguageModeling(intervals=tmp_path / "sequences.bed").prepared()
    for content, message in (("ACGT\n>a\n", "before the first name"), ("", "it has none"), ("é>", "ascii")):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            LanguageModeling(path=path, documents=True).prepared()
