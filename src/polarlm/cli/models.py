"""List the model presets, ours and your own, with their exact sizes; nothing is built."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="the same as a JSON list")
    parser.epilog = (
        "Your own presets go into ~/.config/polarlm/presets.yaml, a name and its model fields each:\n"
        "  small: {family: llama, layers: 6, hidden: 384, heads: 6, vocab_size: 8192}"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print every preset."""
    rows = [_describe(key) for key in _keys()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    columns = list(rows[0])
    cells = [[f"{value:,}" if key == "parameters" else str(value) for key, value in row.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for cell in (columns, *cells):
        first, *rest = (f"{text:>{width}}" for text, width in zip(cell, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]))
    print("\ntied shapes count their head once; learned positions are counted as many as the column says")


def _keys() -> list[str]:
    from polarlm.config import known_presets

    return list(known_presets())


def _describe(key: str) -> dict[str, object]:
    from polarlm.config import UserError, check_preset
    from polarlm.plan import count_parameters

    model = check_preset(key)
    # The deck's GPT shapes take as many positions as SEQ_LEN says, 2048 where it says nothing.
    model = model.model_copy(update={"max_positions": model.max_positions or 2048})
    if model.vocab_size is None:
        raise UserError(f"preset {key}: vocab_size is missing, without which its size is open")
    return {
        "key": key,
        "family": model.family,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn": model.ffn,
        "vocab_size": model.vocab_size,
        "positions": model.max_positions,
        "parameters": count_parameters(model),
    }
