"""`samples.jsonl`: how a model's writing grows while it trains."""

import json
from pathlib import Path

from polarlm.checkpoint import load_model
from polarlm.config import load_run_folder
from polarlm.data import load_run_tokenizer
from polarlm.generate.engine import generate
from polarlm.generate.settings import Settings

_TEMPERATURE = 0.8
_SEED = 0  # the same draws at every step, so that only the model differs


def write_samples(run_folder: Path, step: int) -> None:
    """Let the model of a run's checkpoint go on from each prompt of `log.samples`, and append what it writes.

    Raises:
        UserError: as `load_model` and `generate`.
    """
    config = load_run_folder(run_folder)
    prompts = config.log.samples
    if not prompts:
        return
    model, tokenizer = load_model(run_folder, step), load_run_tokenizer(run_folder)
    settings = Settings(temperature=_TEMPERATURE, max_tokens=config.log.sample_tokens, seed=_SEED)
    completions = generate(model, tokenizer, prompts, settings)
    with (run_folder / "samples.jsonl").open("a", encoding="utf-8") as file:
        for prompt, completion in zip(prompts, completions, strict=True):
            line = {"step": step, "prompt": prompt, "text": completion.text}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
