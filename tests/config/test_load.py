"""From file, variables and flags to one checked run: order, meaning, and what is said when something is wrong."""

import time

import pytest

from polarlm.cli import main
from polarlm.config import ModelConfig, UserError, check_same_run, default_name, dump_run, load_run, load_run_folder

RUN = """\
name: demo
model: {family: llama, layers: 4, hidden: 64, heads: 4}
train:
  steps: 10
  seq_len: 64
  micro_batch_size: 2
parallel: {ranks: 2}
"""


HYBRID = ["--parallel.ranks", "8", "--parallel.context-method", "hybrid", "--parallel.context"]


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "run.yaml"

    def load(*flags, text=RUN, environment=None, **here):
        path.write_text(text)
        return load_run(path, environment=environment or {}, flags=flags, **here)

    return load


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001", '"1e-5"', "1E-5"])
def test_every_spelling_of_a_number_is_that_number(load, text):
    for_flag = load("--train.optimizer.lr", text.strip('"')).config
    assert for_flag.train.optimizer.lr == 1e-5
    in_yaml = load(text=RUN.replace("train:\n", f"train:\n  optimizer: {{lr: {text}}}\n")).config
    assert in_yaml.train.optimizer.lr == 1e-5


def test_file_then_environment_then_flags(load):
    assert load().config.train.seq_len == 64
    loaded = load(environment={"SEQ_LEN": "128"})
    assert loaded.config.train.seq_len == 128
    assert loaded.notes == ["SEQ_LEN=128: train.seq_len is 128"]
    loaded = load("--train.seq-len", "256", environment={"SEQ_LEN": "128"})
    assert loaded.config.train.seq_len == 256
    assert loaded.notes == []


def test_an_empty_variable_is_an_unset_one(load):
    assert load(environment={"SEQ_LEN": "", "GAS": " ", "SP_TYPE": ""}).config == load().config


def test_model_flag_is_short_for_the_preset():
    loaded = load_run(None, environment={}, flags=["--model", "GPT125M", "--train.steps", "5", "--model.layers", "2"])
    model = loaded.config.model
    assert (model.layers, model.hidden, model.heads, model.ffn) == (2, 768, 16, 3072)


def test_yaml_words_that_only_look_like_booleans_and_times_stay_text(load):
    assert load(text=RUN.replace("demo", "on")).config.name == "on"


def test_a_longer_sequence_raises_max_positions_and_says_so(load):
    loaded = load("--model.max-positions", "32")
    assert loaded.config.model.max_positions == 64
    assert loaded.notes == ["model.max_positions raised from 32 to train.seq_len 64"]


def test_a_runs_own_file_on_other_ranks_keeps_the_global_batch(load):
    own = dump_run(load("--train.global-batch-size", "8").config)
    assert "gradient_accumulation_steps: 2" in own
    loaded = load("--parallel.ranks", "4", text=own)
    assert (loaded.config.train.global_batch_size, loaded.config.train.gradient_accumulation_steps) == (8, 1)
    assert "train.gradient_accumulation_steps follows from it" in loaded.notes[0]
    with pytest.raises(UserError, match="leave one of the two out"):
        load("--parallel.ranks", "4", "--train.gradient-accumulation-steps", "2", text=own)


def test_batch_is_micro_times_accumulation_times_data_parallel(load):
    train = load("--train.global-batch-size", "12").config.train
    assert train.gradient_accumulation_steps == 3
    assert load("--train.gradient-accumulation-steps", "4").config.train.global_batch_size == 16
    assert load().config.train.global_batch_size == 4


def test_tokens_are_a_length_too(load):
    text = RUN.replace("steps: 10", "tokens: 10e3")
    assert load(text=text).config.train.steps == 40  # ceil(10000 / (4 x 64))


def test_of_two_ways_to_say_one_thing_the_later_source_counts(load):
    loaded = load("--train.tokens", "10e3")
    assert loaded.config.train.steps == 40
    assert any("train.tokens (--train.tokens) replaces train.steps (" in note for note in loaded.notes)


def test_the_resolved_run_reads_back_to_itself(load, tmp_path):
    config = load("--train.global-batch-size", "12", "--model.rope-scaling.factor", "4").config
    (tmp_path / "config.yaml").write_text(dump_run(config))
    assert load_run_folder(tmp_path) == config


WRONG = {  # what the user gives -> words that the message must hold
    "unknown field": (["--train.seq-length", "5"], ["train.seq_length", "did you mean train.seq_len"]),
    "unknown section": (["--trian.steps", "5"], ["trian", "train"]),
    "text for a number": (["--train.steps", "many"], ["train.steps", "'many'"]),
    "fraction for a count": (["--train.steps", "10.5"], ["train.steps", "10.5"]),
    "negative": (["--model.layers", "-1"], ["model.layers", "-1"]),
    "zero": (["--train.seq-len", "0"], ["train.seq_len"]),
    "not finite": (["--train.optimizer.lr", "nan"], ["train.optimizer.lr"]),
    "unknown choice": (["--train.precision", "fp8"], ["train.precision", "bf16"]),
    "unknown preset": (["--model", "GPT13"], ["GPT13B"]),
    "batch that does not divide": (
        ["--train.global-batch-size", "10"],
        ["train.global_batch_size", "10", "micro_batch_size 2", "ranks 2", "8 or 12"],
    ),
    "batch that does not multiply": (
        ["--train.global-batch-size", "8", "--train.gradient-accumulation-steps", "3"],
        ["train.gradient_accumulation_steps", "12", "8", "use 2"],
    ),
    "heads": (["--model.heads", "5"], ["model.heads", "64", "5", "nearest allowed: 4"]),
    "kv heads": (["--model.kv-heads", "3"], ["model.kv_heads", "3", "nearest allowed: 2"]),
    "odd head for rotary": (["--model.heads", "64"], ["model.head_dim", "even"]),
    "tensor does not divide heads": (["--parallel.tensor", "3", "--parallel.ranks", "3"], ["heads 4", "tensor 3"]),
    "pipeline does not divide layers": (["--parallel.pipeline", "3", "--parallel.ranks", "3"], ["layers 4", "3"]),
    "context does not divide the sequence": (
        ["--parallel.context", "3", "--parallel.ranks", "3"],
        ["parallel.context", "64", "6"],
    ),
    "context and tensor do not divide the sequence": (
        "--parallel.context 2 --parallel.tensor 2 --parallel.ranks 4 --train.seq-len 6".split(),
        ["parallel.context", "seq_len 6", "multiple of 4", "context 2 x tensor 2", "4 or 8"],
    ),
    "tensor does not divide the sequence": (
        ["--parallel.tensor", "4", "--parallel.ranks", "4", "--train.seq-len", "6"],
        ["parallel.tensor", "seq_len 6", "multiple of 4", "4 or 8"],
    ),
    "world is no multiple": (["--parallel.tensor", "4"], ["parallel.ranks", "2", "tensor 4", "nearest allowed: 4"]),
    "a scale that rounds": (["--train.loss-scale.initial", "1000"], ["loss_scale.initial", "power of two", "1024"]),
    "more stages than layers": (
        ["--parallel.pipeline", "4", "--parallel.ranks", "4", "--parallel.pipeline-schedule", "ZBVZeroBubble"],
        ["parallel.pipeline", "8 stages", "layers 4"],
    ),
    "a split of other layers": (
        ["--parallel.pipeline", "2", "--parallel.pipeline-split", "1", "2"],
        ["parallel.pipeline_split", "2 stages of 3 layers", "2 stages", "layers 4"],
    ),
    "a schedule of two stages a rank": (
        ["--parallel.pipeline", "2", "--parallel.pipeline-schedule", "dualpipev", "--train.global-batch-size", "4"],
        ["train.gradient_accumulation_steps", "dualpipev", "at least 4", "gives 2"],
    ),
    "microbatches that make no rounds": (
        [
            "--parallel.pipeline",
            "2",
            "--parallel.pipeline-schedule",
            "interleaved1f1b",
            "--train.global-batch-size",
            "10",
        ],
        ["train.gradient_accumulation_steps", "multiple of parallel.pipeline 2", "4 or 6", "gives 5"],
    ),
    "an unknown schedule": (["--parallel.pipeline-schedule", "zigzag"], ["parallel.pipeline_schedule", "1f1b"]),
    "compiled tensor": (
        ["--parallel.tensor", "2", "--train.compile"],
        ["--train.compile", "2 tensor-parallel ranks", "parallel.tensor 1, or train.compile false"],
    ),
    "ulysses needs heads": (
        [
            "--parallel.context-method",
            "ulysses",
            "--parallel.context",
            "16",
            "--parallel.ranks",
            "16",
            "--model.heads",
            "40",
            "--model.kv-heads",
            "8",
            "--model.head-dim",
            "2",
        ],
        ["parallel.context", "16", "40 query", "allowed: 1, 2, 4, 8, 40"],
    ),
    "ring drops no attention": (["--parallel.context", "2", "--model.dropout", "0.1"], ["model.dropout", "ulysses"]),
    "hybrid drops no attention": (
        [*HYBRID, "4", "--parallel.context-ulysses", "2", "--model.dropout", "0.1"],
        ["model.dropout", "ulysses"],
    ),
    "hybrid needs heads": (
        [*HYBRID, "8", "--parallel.context-ulysses", "8"],
        ["parallel.context_ulysses", "8 ranks", "4 query", "allowed: 1, 2, 4;"],
    ),
    "hybrid that does not divide": (
        [*HYBRID, "8", "--parallel.context-ulysses", "3"],
        ["parallel.context_ulysses", "context 8", "3", "nearest allowed: 2"],
    ),
    "hybrid that does not divide the sequence": (
        [*HYBRID, "8", "--parallel.context-ulysses", "1", "--train.seq-len", "40"],
        ["parallel.context", "seq_len 40", "multiple of 16", "32 or 48"],
    ),
    "a degree of hybrid alone": (
        ["--parallel.context", "2", "--parallel.context-ulysses", "2"],
        ["parallel.context_ulysses", "for parallel.context_method hybrid, not ring", "leave it out"],
    ),
    "no such stage": (["--parallel.zero-stage", "4"], ["parallel.zero_stage", "4"]),
    "group that does not divide": (["--parallel.hybrid", "3"], ["parallel.hybrid", "2", "3", "nearest allowed: 2"]),
    "parameters that nobody shares": (
        ["--parallel.ranks", "1", "--parallel.offload", "parameters"],
        ["parallel.offload", "this run has 1", "more ranks"],
    ),
    "muon in host memory": (
        ["--parallel.offload", "optimizer", "--train.optimizer.name", "muon"],
        ["parallel.offload", "muon", "adamw"],
    ),
    "selective in two parts": (
        ["--parallel.pipeline", "2", "--parallel.pipeline-schedule", "zbvzerobubble", "--train.recompute", "selective"],
        ["train.recompute", "zbvzerobubble", "selective", "use full"],
    ),
    "recomputes nothing": (
        ["--train.recompute", "full", "--train.recompute-every", "5"],
        ["train.recompute_every", "5", "layers 4", "nearest allowed: 4"],
    ),
    "every second block of none": (
        ["--train.recompute-every", "2"],
        ["train.recompute_every", "2", "train.recompute is none", "selective or full, or leave it out"],
    ),
    "both lengths": (["--train.steps", "10", "--train.tokens", "5"], ["train.tokens", "train.steps"]),
    "warm-up longer than the run": (["--train.schedule.warmup-steps", "11"], ["warmup_steps", "11", "10"]),
    "plain RMSNorms of a model that has none": (
        ["--model.norm", "layernorm", "--train.fused-norms", "false"],
        ["--train.fused-norms: train.fused_norms", "model.norm is layernorm", "leave it out"],
    ),
    "adafactor has no fused steps": (
        ["--train.optimizer.name", "adafactor", "--train.optimizer.fused", "false"],
        ["train.optimizer.fused", "train.optimizer.name is adafactor", "use adamw or muon"],
    ),
    "short sequences longer than the run": (
        ["--train.seq-len-schedule", "[{until_step: 5, seq_len: 8}, {until_step: 11, seq_len: 16}]"],
        ["train.seq_len_schedule", "until_step 11", "10 steps", "use 10 at most", "more train.steps"],
    ),
    "short sequences longer than the run's tokens": (
        ["--train.tokens", "5120", "--train.seq-len-schedule", "[{until_step: 21, seq_len: 8}]"],
        ["train.seq_len_schedule", "until_step 21", "20 steps", "more train.tokens"],
    ),
    "value for a section": (["--train", "5"], ["train"]),
    "path in a name": (["--name", "../x"], ["name"]),
    "split of two": (["--data.split", "1", "2"], ["data.split"]),
    "a list with commas": (["--data.split", "1,0,0"], ["data.split", "'1,0,0'", "`[a, b]`", "`a b`"]),
    "a number for two": (["--train.optimizer.betas", "0.9"], ["train.optimizer.betas", "0.9", "a list", "`a b`"]),
}


def test_one_stage_a_rank_is_not_advised_where_it_is_what_does_not_fit():
    flags = "--model.layers 4 --model.hidden 8 --model.heads 2 --train.steps 1 --parallel.ranks 8 --parallel.pipeline 8"
    with pytest.raises(UserError) as raised:
        load_run(None, environment={}, flags=flags.split())
    (fault,) = raised.value.args
    assert "layers 4" in fault
    assert "nearest allowed: 4" in fault


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_stop_at_once_with_the_field_and_the_mend(case, tmp_path, capsys):
    flags, words = WRONG[case]
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    start = time.process_time()  # its own, whatever else the machine does
    code = main(["train", str(path), *flags])
    assert time.process_time() - start < 2
    message = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in message
    for word in words:
        assert word in message
    assert all(len(line) < 400 for line in message.splitlines())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  steps: x\n", ["run.yaml:2", "train.steps"]),
        ("train:\n  steps: 5\n  steps: 6\n", ["run.yaml:3", "train.steps", "twice", "run.yaml:2"]),
        ("train: [1, 2\n", ["run.yaml:2"]),
        ("- a\n", ["run.yaml:1"]),
        ("train:\n  stepps: 5\n", ["run.yaml:2", "train.stepps", "train.steps"]),
        ("a: &a [1]\nb: !!python/object:os.system {}\n", ["run.yaml:2"]),
    ],
)
def test_messages_name_file_and_line(load, text, words):
    with pytest.raises(UserError) as error:
        load(text=text)
    for word in words:
        assert word in str(error.value)


def test_a_section_left_empty_is_not_given(load):
    assert load(text=RUN + "data:\nlog:\n  every:\n").config == load().config


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(UserError, match="no such file; `polarlm init"):
        load_run(tmp_path / "nothing.yaml", environment={})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_run(tmp_path / "binary.yaml", environment={})


def test_the_decks_variables(load):
    megatron = {"MODEL_SIZE_KEY": "GPT125M", "SEQ_LEN": "32", "MICRO_BATCH": "1", "GAS": "2", "ZERO_STAGE": "0"}
    config = load_run(None, environment=megatron, flags=["--train.steps", "1"]).config
    assert (config.model.preset, config.train.seq_len, config.train.gradient_accumulation_steps) == ("GPT125M", 32, 2)
    with pytest.raises(UserError, match="SP_TYPE: 'deepspeed' is unknown; known: megatron, ds"):
        load(environment={"SP_TYPE": "deepspeed"})
    assert load(environment={"SP_TYPE": "megatron"}).config.parallel.tensor == 2
    ulysses = load(environment={"SP_TYPE": "ds"}).config.parallel
    assert (ulysses.context, ulysses.context_method, ulysses.tensor) == (2, "ulysses", 1)


@pytest.mark.parametrize(
    ("flags", "devices", "nodes", "degree"),
    [
        ("--parallel.context 8", 8, 2, 4),  # a node's
        ("--parallel.context 8 --model.kv-heads 2", 8, 1, 4),  # no more than heads
        ("--parallel.context 4 --parallel.tensor 2", 8, 2, 2),  # tensor ranks stand between
        ("--parallel.context 8", 24, 4, 2),  # a node of 6 holds no second four
        ("--parallel.context 2 --parallel.ranks 4", 1, 1, 2),  # no more than there are
        ("--parallel.context 1", 8, 2, 1),
        ("--parallel.context 8 --parallel.context-ulysses 1", 8, 2, 1),
    ],
)
def test_a_hybrid_shares_heads_within_a_node_as_far_as_they_go(load, flags, devices, nodes, degree):
    text = RUN.replace("parallel: {ranks: 2}", "parallel: {context_method: hybrid}")
    config = load(*flags.split(), text=text, devices=devices, nodes=nodes).config
    parallel = config.parallel
    assert (parallel.context_ulysses, parallel.ulysses, parallel.ring) == (degree, degree, parallel.context // degree)
    assert (f"-cp{parallel.context}-ulysses{degree}" in default_name(config)) == (degree > 1)


def test_a_resumed_hybrid_may_become_a_ring(load):
    hybrid = load("--parallel.context", "2", "--parallel.context-method", "hybrid").config
    changed = load("--parallel.context-method", "ring", text=dump_run(hybrid))
    check_same_run(hybrid, changed.config)
    assert (changed.config.parallel.ring, changed.config.parallel.context_ulysses) == (2, None)
    assert "context_ulysses" in " ".join(changed.notes)


def test_a_resumed_run_keeps_what_decides_its_result(load):
    before = load().config
    changed = "--train.steps 20 --parallel.ranks 1 --train.global-batch-size 4 --train.recompute full"
    check_same_run(before, load(*changed.split()).config)
    for flags, field in (
        (["--model.layers", "2"], "model.layers: 4 in the run, 2 now"),
        (["--seed", "1"], "seed: 1234 in the run, 1 now"),
        (["--train.seq-len", "32"], "train.seq_len"),
        (["--train.global-batch-size", "8"], "train.global_batch_size: 4 in the run, 8 now"),
        (["--data.tokenizer", "other"], "data.tokenizer"),
    ):
        with pytest.raises(UserError, match=r"train\.init_from") as error:
            check_same_run(before, load(*flags).config)
        assert field in str(error.value)


def test_a_familys_switches_can_be_overridden_one_by_one():
    model = ModelConfig(family="gpt", layers=1, hidden=64, heads=4, norm="rmsnorm", activation="swiglu")
    assert (model.norm, model.activation, model.position_embedding, model.bias) == (
        "rmsnorm",
        "swiglu",
        "learned",
        True,
    )
    assert model.ffn == 192  # 8/3 x 64 rounded up to a multiple of 64


@pytest.mark.parametrize(
    ("flag", "word", "found"),
    [("log.trackers", "csv", ["csv"]), ("parallel.pipeline-split", "2", [2]), ("data.paths", "a", ["a"])],
)
def test_a_list_of_one_may_be_written_without_brackets(flag, word, found):
    flags = "--model.layers 2 --model.hidden 8 --model.heads 2 --train.steps 1".split()
    config = load_run(None, environment={}, flags=[*flags, f"--{flag}", word]).config
    section, field = flag.replace("-", "_").split(".")
    assert getattr(getattr(config, section), field) == found
