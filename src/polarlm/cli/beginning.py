"""What comes before a run starts, now or in a job: its configuration completed and checked, and its folder made."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polarlm.config import RunConfig

RUNS = Path("runs")


def run_file(run: Path | None) -> tuple[Path | None, Path | None]:
    """(the file to read where a user gave a run file or a run's folder, the folder in the latter case).

    A link such as runs/latest, which will point elsewhere, is followed.

    Raises:
        UserError: a folder that is none of a run.
    """
    from polarlm.config import UserError

    if run is None or not run.is_dir():
        return run, None
    if run.is_symlink():
        run = Path(os.path.relpath(run.resolve()))
    if not (run / "config.yaml").exists():
        raise UserError(f"{run}: no config.yaml there, so this is not a run folder; give one, or a run file")
    return run / "config.yaml", run


def complete(config: "RunConfig") -> "RunConfig":
    """Fill in what the data and its tokenizer decide, and find out now whether they can be used.

    Raises:
        UserError: they cannot, or a prompt of `log.samples` is more than the model takes.
    """
    from polarlm.config import UserError, default_name, with_tokenizer
    from polarlm.data import check_tokenizer, encode_prompt, load_tokenizer, open_split, tokenizer_of

    tokenizer = config.data.tokenizer or tokenizer_of(config.data)
    loaded = load_tokenizer(tokenizer)
    check_tokenizer(config.data, loaded, tokenizer)
    config = with_tokenizer(config, tokenizer, loaded.vocab_size)
    splits = ("train", "validation") if config.train.eval_every else ("train",)
    for split in splits:
        open_split(config.data, config.train.seq_len, config.seed, split, config.model.vocab_size)
    for prompt in config.log.samples:
        try:
            encode_prompt(loaded, prompt, config.model.max_positions)
        except UserError as error:
            raise UserError(f"log.samples: {error}") from None
    return config.model_copy(update={"name": config.name or default_name(config)})


def check_weights(config: "RunConfig") -> None:
    """Find out now whether the run can start from `train.init_from`.

    Raises:
        UserError: it cannot.
    """
    from polarlm.checkpoint import check_weights
    from polarlm.config import UserError

    try:
        check_weights(Path(config.train.init_from), config.model)
    except UserError as error:
        raise UserError(f"train.init_from: {error}") from None


def find_run(config: "RunConfig") -> Path | None:
    """The newest run of this name, or None where it has not begun."""
    from polarlm.config import load_run_folder
    from polarlm.launch import run_folder

    newest = run_folder.find(RUNS, config.name)
    if newest is None or load_run_folder(newest).name == config.name:
        return newest
    return RUNS / config.name if (RUNS / config.name).is_dir() else None


def make_folder(config: "RunConfig") -> Path:
    """A new run's folder, empty but for its logs'."""
    from polarlm.config import UserError
    from polarlm.launch import run_folder

    try:
        return run_folder.create(RUNS, config.name)
    except OSError as error:
        raise UserError(f"{_cannot_write(error)}, or choose another name") from None


def fill_folder(folder: Path, config: "RunConfig", is_new: bool, starts_now: bool = True) -> None:
    """Put the resolved configuration and the tokenizer into the run's folder; one that starts now is the newest run.

    Raises:
        UserError: the run to go on with is not this one, or the system lets us write nothing; then no new one is left.
    """
    from polarlm.config import UserError, check_same_run, dump_run, load_run_folder
    from polarlm.data import load_tokenizer
    from polarlm.launch import run_folder

    if not is_new:
        check_same_run(load_run_folder(folder), config)
    try:
        if not (folder / "tokenizer").exists():
            load_tokenizer(config.data.tokenizer).save(folder / "tokenizer")
        aside = folder / ".config.yaml.partial"
        aside.write_text(dump_run(config), encoding="utf-8")
        os.replace(aside, folder / "config.yaml")
        if starts_now:
            run_folder.announce(folder)
    except OSError as error:
        if is_new:
            shutil.rmtree(folder)
        raise UserError(_cannot_write(error)) from None


def _cannot_write(error: OSError) -> str:
    return f"{error.filename or RUNS}: cannot be written ({error.strerror}); mend that, or train in another folder"
