"""Let a trained model write.

polarlm generate                                   from nothing, with the newest run
polarlm generate runs/demo --prompt "Once upon" --temperature 0.8 --max-tokens 100
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from polarlm.cli.runs import add_run_argument, folder_of

if TYPE_CHECKING:
    from polarlm.data import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_run_argument(parser)
    parser.add_argument(
        "--prompt", action="append", help="text to go on from; repeat it for more; without it, the model starts freely"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="0 always takes the most likely token (1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the K most likely tokens; 0 is all (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest that reach this share (1.0)")
    parser.add_argument("--max-tokens", type=int, default=256, help="most tokens to write (256)")
    parser.add_argument("--stop", action="append", default=[], help="text to end at; repeat it for more")
    parser.add_argument("--seed", type=int, help="the same seed writes the same text; by default a new one each time")
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="the run's weights after STEP; else the newest")


def run(arguments: argparse.Namespace) -> None:
    """Print each prompt with what the model writes after it; a single one as it is written."""
    folder, tokenizer = _find_run(arguments.run)
    from polarlm.checkpoint import load_model  # these bring torch, so they wait until the folder is known to be good
    from polarlm.generate import Settings, generate

    settings = Settings(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        seed=arguments.seed,
    )
    model = load_model(folder, arguments.checkpoint)
    prompts = arguments.prompt or [""]
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        generate(model, tokenizer, prompts, settings, on_text=lambda _, text: print(text, end="", flush=True))
        print()
        return
    for prompt, completion in zip(prompts, generate(model, tokenizer, prompts, settings), strict=True):
        print(f"{prompt}{completion.text}\n")


def _find_run(folder: Path) -> "tuple[Path, Tokenizer]":
    """The run's folder, and the tokenizer it was trained with."""
    from polarlm.config import UserError, load_run_folder
    from polarlm.data import load_run_tokenizer

    folder = folder_of(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder; give one, such as runs/demo, or train first")
    load_run_folder(folder)
    return folder, load_run_tokenizer(folder)
