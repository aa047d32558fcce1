"""What the tests of tasks of recall share: samples as lists, answers by a plain program."""

from linrec.lab.tasks import NO_TARGET

FEW = {"n_train": 20, "n_validation": 5, "n_test": 60}


def check_against(oracle, split):
    """Compare the targets of every sample with what the oracle says of its inputs: {step: answer}."""
    for inputs, targets in zip(split.inputs.tolist(), split.targets.tolist(), strict=True):
        asked = {step: target for step, target in enumerate(targets) if target != NO_TARGET}
        assert asked and asked == oracle(inputs)


def check_next_tokens(task, other, masked=()):
    """Trained on all tokens, a task has the inputs of the other one, and the next tokens for targets."""
    both = [task.split("train"), other.split("train")]
    # of an epoch too, also where it has samples of its own
    for train, same in (both, [split.of_epoch(seed=1, epoch=2) for split in both]):
        rows = zip(
            train.inputs.tolist(),
            same.inputs.tolist(),
            train.targets.tolist(),
            same.targets.tolist(),
            strict=True,
        )
        for inputs, same_inputs, targets, answers in rows:
            assert inputs == same_inputs
            assert targets == [NO_TARGET if token in masked else token for token in inputs[1:]] + answers[-1:]
    # the answers that are asked for, and what they are compared with, stay
    assert (task.split("test").targets == other.split("test").targets).all()
    assert task.trivial_score == other.trivial_score
