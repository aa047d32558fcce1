"""`linrec publish RUN FOLDER`: write the folder of a language model that transformers loads."""

from collections.abc import Sequence

from transformers.utils import logging

from linrec.cli.options import PublishOptions
from linrec.cli.output import say
from linrec.cli.parsing import one_line_errors
from linrec.lab.publishing.publish import publish, push
from linrec.lab.train import load_run


def run(options: PublishOptions, words: Sequence[str]) -> int:
    """Run `linrec publish`."""
    # a bar for each file would hide the messages
    logging.disable_progress_bar()
    with one_line_errors():
        publish(load_run(options.run, trust_code=options.trust_code), options.folder)
        say(f"all in {options.folder}")
        if options.push is not None:
            say(f"uploaded to {push(options.folder, options.push)}")
    return 0
