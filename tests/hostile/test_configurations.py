"""A run file, a preset or a run's config.yaml from a stranger: a run whose every value stands there, or one line."""

import random

import yaml

from hostile.mutations import MUTANTS, REFUSED, changed_bytes, outcome_of
from polarlm.config import default_name, dump_run, load_run, places

RUN = """\
name: demo
seed: 1234
model: {family: llama, layers: 4, hidden: 64, heads: 4, kv_heads: 2, vocab_size: 300, rope_scaling: {factor: 2.0}}
data: {paths: [0.3 data/a, 0.7 data/b], tokenizer: tok, split: [90, 9, 1]}
train:
  steps: 30   # or tokens
  seq_len: 32
  micro_batch_size: 2
  global_batch_size: 8
  optimizer: {lr: 3e-4, betas: [0.9, 0.95], clip: 1.0}
  schedule: {name: cosine, warmup_steps: 3}
parallel: {ranks: 4, tensor: 2, pipeline: 2, pipeline_split: [2, 2]}
log: {trackers: [csv], samples: ["Once", "upon\\na"]}
"""

FIELDS = ("name", "seed", "model", "data", "train", "parallel", "checkpoint", "log")
YAML_VALUES = [
    "", "~", "true", "-1", "0", "010", "08", "1_0", "1__", "1e5", "1e999", "-.5", ".inf", ".nan", "1" * 50, "1" * 5000,
    str(2**31), str(2**63), str(2**64), "1000000007", "2147483647", "x", '"a\\0b"', '"\\uD800"', '"\\e[2J\\nx"',
    "'" + "a" * 5000 + "'", "[]", "[[]]", "{}", "{a: 1}", "[1, 2, 3]", "[" * 3000, "{" * 3000, "&a [*a]", "*missing",
    "&a {b: *a}", "!!python/object/apply:os.system [echo]", "!!python/name:os.system", "!!binary aGk=", "!!int x",
    "!!bool x", "!!float x", "!!timestamp x", "!!null x", "!!set {a}", "!!omap [a: 1]", "!!merge <<", "!!str 5",
    "!local 5", "? [a, b]", "- x", "|\n x", "%YAML 9", "---", "...", "1e999999999 data/a", "1" * 4000 + " data/a",
    "2001-99-99", "12:30", "<<: {a: 1}", "/etc/passwd", "../../secret",
]  # fmt: skip


def _changed_run(chance):
    """The run file with another value at one of its fields, or another key."""
    tree = yaml.safe_load(RUN)
    fields = [(section, key) for section, values in tree.items() if isinstance(values, dict) for key in values]
    section, key = chance.choice(fields)
    if chance.random() < 0.15:
        tree[section][chance.choice(["", "<<", "x.y", "__class__", "a" * 500, "seed"])] = tree[section].pop(key)
        return yaml.safe_dump(tree).encode()
    tree[section][key] = "PLACE"
    return yaml.safe_dump(tree).replace("PLACE", chance.choice(YAML_VALUES)).encode()


def _load(path):
    """A run as every command takes it: loaded, named, written down and laid out."""
    config = load_run(path, environment={}, devices=1).config
    written = dump_run(config)
    default_name(config)
    if config.parallel.ranks <= 1024:
        places(config.parallel)
    return config, written


def _said(config, content):
    """Whether every value of the run that the file names is the one that stands there, read as bare texts."""
    return all(_agrees(config, path, text) for path, text in _texts(yaml.load(content, yaml.BaseLoader)))


def _texts(tree, path=()):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _texts(value, (*path, *key.split(".")))
        else:
            yield (*path, *key.split(".")), value


def _agrees(config, path, text):
    for name in path:
        config = getattr(config, name)
    texts, values = (each if isinstance(each, list | tuple) else [each] for each in (text, config))
    if text in ("", "~", "null") or config is None:
        return text in ("", "~", "null")
    return len(texts) == len(values) and all(map(_is_alike, texts, values))


def _is_alike(text, value):
    if isinstance(value, str):
        return text == value
    return float(text.replace("_", "")) == value


def test_mutated_run_files(tmp_path):
    chance, path, again = random.Random(0), tmp_path / "run.yaml", tmp_path / "again.yaml"
    path.write_text(RUN)
    original, _ = _load(path)
    refused = 0
    for number in range(MUTANTS):
        content = _changed_run(chance) if number % 2 else changed_bytes(RUN.encode(), chance)
        path.write_bytes(content)
        try:
            found = outcome_of(lambda: _load(path), path, *FIELDS)
        except AssertionError as fault:
            raise AssertionError(content[:300]) from fault
        if found is REFUSED:
            refused += 1
            continue
        config, written = found
        again.write_text(written)
        assert load_run(again, environment={}).config == config
        assert config == original or _said(config, content), content
    assert MUTANTS // 3 < refused < MUTANTS
