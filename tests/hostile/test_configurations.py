"""A run file, a preset or a run's config.yaml from a stranger: a run whose every value stands there, or one line."""

import os
import random

import pytest
import yaml

from hostile.mutations import MUTANTS, REFUSED, changed_bytes, outcome_of
from polarlm.config import (
    DataConfig,
    UserError,
    default_name,
    dump_run,
    known_presets,
    load_run,
    load_run_folder,
    places,
    sources,
)
from polarlm.data import read_paths

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


def _bomb(levels):
    """Each name stands for ten of the one before."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def _chain(link):
    """Each name stands for twice the one before."""
    return "\n".join(["a0: &a0 {b: 1}", *(f"a{n}: &a{n} {link.format(f'a{n - 1}')}" for n in range(1, 40))])


SHAPE = "model: {layers: 1, hidden: 16, heads: 2, vocab_size: 9}\n"
ATTACKS = {  # a run file -> what is said of it
    "a bomb of lists": (_bomb(12), "more than 10000 values, with all that its aliases stand for"),
    "a bomb under a field": (f"{_bomb(12)}\ndata: {{paths: *a11}}", "more than 10000 values"),
    "a bomb of mappings": (_chain("{{b: *{0}, c: *{0}}}"), "more than 10000 values"),
    "a bomb of merges": (_chain('{{!!merge "<<": [*{0}, *{0}]}}'), "the tag 'merge' does not fit"),
    "what holds itself": ("train: &a {x: *a}", "more than 10000 values"),
    "nesting": ("a: " + "[" * 10**5, "nested deeper than 50 levels"),
    "nesting of mappings": ("a: " + "{a: " * 5 * 10**4, "nested deeper than 50 levels"),
    "megabytes": ("# " + "x" * 2**20, "is larger than 262144 bytes"),
    "a giant key": ("x" * 10**5 + ": 1\n" + SHAPE, "not YAML: "),
    "many unknown keys": (SHAPE + "train: {" + ", ".join(f"k{n}: 1" for n in range(4000)) + "}", "faults more"),
    "no UTF-8": (b"name: \xff\xfe", "cannot be read"),
    "NUL": (b"name: a\0b", "cannot be read"),
    "nothing": ("", "is missing"),
    "a list": ("- 1", "a run file is a mapping"),
    "code": (SHAPE + "train: !!python/object/apply:os.system [touch pwned]", "does not fit; leave it out"),
    "code in a name": (SHAPE + "name: !!python/name:os.system x", "does not fit; leave it out"),
    "code as a key": (SHAPE + "? !!python/object/apply:os.system [touch pwned]\n: 1", "does not fit; leave it out"),
    "a module": (SHAPE + "train: {steps: !!python/module:os x}", "does not fit; leave it out"),
    "a key twice": (SHAPE + SHAPE, "model.layers is given twice"),
    "an unknown key without a value": (SHAPE + "train: {steps: 1, seed:}", "train.seed: unknown field"),
    "a size no array has": (SHAPE + "train: {steps: 1, seq_len: 2147483648}", "train.seq_len"),
    "steps beyond 64 bits": (SHAPE + "train: {steps: 99999999999999999999}", "should be at most 9223372036854775807"),
    "a size of a hundred digits": (SHAPE + f"train: {{steps: 1, seq_len: {'9' * 100}}}", "train.seq_len"),
    "a size of 5000 digits": (SHAPE + f"train: {{steps: 1, seq_len: {'9' * 5000}}}", "train.seq_len"),
    "a long number that is none": (SHAPE + f"train: {{steps: {'9' * 10**5}x}}", "train.steps"),
    "infinity": (SHAPE + "train: {steps: 1, optimizer: {lr: 1e999}}", "train.optimizer.lr"),
    "not a number": (SHAPE + "train: {steps: 1, optimizer: {lr: .nan}}", "train.optimizer.lr"),
    "a width of 90 digits": (f"model: {{layers: 1, hidden: {'9' * 90}, heads: 7}}", "model.hidden"),
    "a width that nothing divides": (
        "model: {layers: 1, hidden: 2147483647, heads: 7, vocab_size: 9}\ntrain: {steps: 1}", "nearest allowed: 1"),
    "layers without end": ("model: {layers: 2000000000, hidden: 8, heads: 2}\ntrain: {steps: 1}", "model.layers"),
    "ranks without end": (SHAPE + "train: {steps: 1}\nparallel: {ranks: 2000000000}", "parallel.ranks"),
    "a name that leads out": (SHAPE + "name: ../../x\ntrain: {steps: 1}", "name: "),
    "an absolute name": (SHAPE + "name: /tmp/x\ntrain: {steps: 1}", "name: "),
    "a path with NUL": (SHAPE + 'train: {steps: 1}\ndata: {paths: ["a\\0b"]}', "the character NUL"),
    "a key that steers the terminal": ('"\\e[2J\\nx": 1\n' + SHAPE + "train: {steps: 1}", "\\x1b[2J\\nx"),
    "a value that steers the terminal": (SHAPE + 'train: {steps: "\\e[2J"}', "\\x1b[2J"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ATTACKS)
def test_what_its_maker_can_do_to_a_run_file(kind, tmp_path, monkeypatch):
    content, said = ATTACKS[kind]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as refusal:
        _load(path)
    assert said in str(refusal.value)
    assert outcome_of(lambda: _load(path), path, *FIELDS, "and ") is REFUSED
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("opening", "[{")
def test_what_is_nested_too_deep_is_refused_before_more_of_it_is_read(opening):
    loader = sources._Loader(opening * 3000)
    with pytest.raises(yaml.YAMLError, match="nested deeper"):
        loader.get_single_node()
    assert loader.tokens_taken + len(loader.tokens) < 60  # at each the scanner looks at all that are open


def test_numbers_are_those_of_yaml_1_2(tmp_path):
    """`010` is ten, and `08` a number at all."""
    path = tmp_path / "run.yaml"
    path.write_text(SHAPE + "seed: 010\ntrain: {steps: 08, seq_len: 1_6}")
    config, _ = _load(path)
    assert (config.seed, config.train.steps, config.train.seq_len) == (10, 8, 16)


@pytest.mark.parametrize("weight", ["1e999999999", "1" * 4000, "1" * 10**5 + "x", "1e-999999999", "." + "1" * 4000])
def test_a_weight_without_end_is_no_weight(weight, tmp_path):
    data = DataConfig(paths=[f"{weight} data/a"])
    assert [path.weight for path in outcome_of(lambda: read_paths(data), "")] == [None]
    listed = tmp_path / "list"
    listed.write_text(f"{weight} data/a\n")
    assert outcome_of(lambda: read_paths(DataConfig(file_list=str(listed))), listed) is REFUSED


@pytest.mark.parametrize("value", YAML_VALUES)
def test_presets_of_any_kind(value, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "polarlm/presets.yaml"
    path.parent.mkdir()
    run = tmp_path / "run.yaml"
    run.write_text("model: {preset: own}\ntrain: {steps: 1}")
    for text in (f"own: {value}", f"own: {{layers: 2, hidden: {value}, heads: 2, vocab_size: 9}}", value):
        path.write_text(text)
        outcome_of(known_presets, path)
        found = outcome_of(lambda: _load(run), path, run, "preset ", *FIELDS)
        assert found is REFUSED or found[0].model.layers == 2


def test_a_link_out_of_a_runs_folder_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text(SHAPE + "train: {steps: 1}")
    (tmp_path / "run/config.yaml").symlink_to("../secret")
    with pytest.raises(UserError, match=r"config\.yaml: leads to .*secret, outside of its folder"):
        load_run_folder(tmp_path / "run")


def test_a_pipe_is_no_runs_configuration(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    assert outcome_of(lambda: load_run_folder(tmp_path), tmp_path) is REFUSED
