import dataclasses

import pytest
import torch

from polarlm.config import ModelConfig, UserError
from polarlm.data import load_tokenizer
from polarlm.generate import Settings, engine, generate
from polarlm.model import Transformer, initialise

TOKENIZER = load_tokenizer("bytes")
EOD = TOKENIZER.eod_id
GREEDY = Settings(temperature=0, max_tokens=20)
PROMPTS = ["ab", "hello", "the night "]


def build(family="llama", vocab_size=TOKENIZER.vocab_size, **fields):
    shape = {"layers": 2, "hidden": 32, "heads": 4, "max_positions": 64, "init_std": 0.3}
    config = ModelConfig(family=family, vocab_size=vocab_size, **shape | fields)
    model = Transformer(config)
    initialise(model, config, seed=3)
    return model.eval()


class Script(torch.nn.Module):
    """A head that always finds the next id of a script likeliest; prompts are read in one go."""

    def __init__(self, ids, vocab_size):
        super().__init__()
        self.ids, self.vocab_size = iter(ids), vocab_size

    def forward(self, hidden):
        return torch.nn.functional.one_hot(torch.full(hidden.shape[:2], next(self.ids)), self.vocab_size).float()


def write_script(ids, **settings):
    """The completion of a model that writes these ids, and the pieces it came in."""
    model = build()
    model.head = Script(ids, TOKENIZER.vocab_size)
    pieces = []
    asked = Settings(**{"temperature": 0, "max_tokens": 50} | settings)
    (completion,) = generate(model, TOKENIZER, ["x"], asked, on_text=lambda _, text: pieces.append(text))
    assert "".join(pieces) == completion.text
    return completion, pieces


def greedy_without_cache(model, prompt, count):
    ids = TOKENIZER.encode(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids]), torch.arange(len(ids))[None])
            ids = [*ids, int(logits[0, -1, : TOKENIZER.vocab_size].argmax())]
    return ids[-count:]


@pytest.mark.parametrize("fields", [{"family": "gpt"}, {"kv_heads": 2}, {"kv_heads": 1, "qk_norm": True}])
def test_greedy_is_what_the_plain_model_finds_likeliest(fields):
    model = build(**fields)
    for prompt, completion in zip(PROMPTS, generate(model, TOKENIZER, PROMPTS, GREEDY), strict=True):
        written = [*completion.ids, EOD][: completion.completion_tokens]
        assert written == greedy_without_cache(model, prompt, len(written))


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("prompts", [PROMPTS, ["one", "two", "six"]])
@pytest.mark.parametrize("settings", [GREEDY, Settings(seed=11, max_tokens=20)])
def test_a_batch_writes_what_each_prompt_would_alone(family, prompts, settings):
    model = build(family)
    together = generate(model, TOKENIZER, prompts, settings)
    alone = [generate(model, TOKENIZER, [prompt], settings)[0] for prompt in prompts]
    assert together == alone


def test_rows_of_different_settings_do_not_touch_each_other():
    model = build()
    each = [GREEDY, Settings(seed=1, max_tokens=7), Settings(temperature=0, max_tokens=30)]
    together = generate(model, TOKENIZER, ["night"] * 3, each)
    assert together == [generate(model, TOKENIZER, ["night"], one)[0] for one in each]
    assert [len(one.ids) for one in together] == [20, 7, 30]


def test_a_row_that_ends_early_leaves_the_others_alone():
    """The end of document is made likely, so that rows end at different steps."""
    model = build(tied_embeddings=False)
    with torch.no_grad():
        model.head.weight[EOD] *= 3
    settings = Settings(seed=5, max_tokens=40)
    together = generate(model, TOKENIZER, PROMPTS * 2, settings)
    assert together == [generate(model, TOKENIZER, [prompt], settings)[0] for prompt in PROMPTS * 2]
    ended = [one for one in together if one.finish_reason == "stop"]
    assert ended
    assert len({one.completion_tokens for one in together}) > 1
    assert all(EOD not in one.ids and one.completion_tokens == len(one.ids) + 1 for one in ended)


@pytest.mark.parametrize("columns", [1, 3, 100])
def test_reading_the_prompts_in_pieces_changes_nothing(columns, monkeypatch):
    model = build()
    expected = generate(model, TOKENIZER, PROMPTS, GREEDY)
    monkeypatch.setattr(engine, "PREFILL_COLUMNS", columns)
    assert generate(model, TOKENIZER, PROMPTS, GREEDY) == expected


def test_temperature_zero_is_deterministic_for_any_seed():
    model = build()
    written = [
        generate(model, TOKENIZER, ["a"], Settings(temperature=0, seed=seed, top_p=0.5, max_tokens=9))
        for seed in (1, 2)
    ]
    assert written[0] == written[1]


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_writing_stops_where_the_context_ends(family):
    model = build(family)
    generous = dataclasses.replace(GREEDY, max_tokens=1000)
    for length, room in ((60, 4), (63, 1), (64, 0)):
        (completion,) = generate(model, TOKENIZER, ["x" * length], generous)
        assert (len(completion.ids), completion.finish_reason) == (room, "length")
    together = generate(model, TOKENIZER, ["x" * 62, "y"], generous)
    assert [len(completion.ids) for completion in together] == [2, 63]
    with pytest.raises(UserError, match=r"prompt: 65 tokens .* 64"):
        generate(model, TOKENIZER, ["x" * 65], generous)


def test_ids_beyond_the_tokenizer_are_never_written():
    model = build(vocab_size=384, tied_embeddings=False)
    with torch.no_grad():
        model.head.weight[TOKENIZER.vocab_size :] *= 20
    for settings in (GREEDY, Settings(seed=0, max_tokens=20)):
        (completion,) = generate(model, TOKENIZER, ["x"], settings)
        assert max(completion.ids) < TOKENIZER.vocab_size


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(UserError, match="tokenizer"):
        generate(build(vocab_size=100), TOKENIZER, ["x"], GREEDY)


def test_an_empty_prompt_starts_from_the_end_of_document():
    model = build()
    (completion,) = generate(model, TOKENIZER, [""], GREEDY)
    with torch.no_grad():
        logits = model(torch.tensor([[EOD]]), torch.tensor([[0]]))
    assert completion.prompt_tokens == 1
    assert completion.ids[0] == logits[0, 0].argmax()


@pytest.mark.parametrize("character", ["é", "→", "🌍"])
def test_a_character_over_several_tokens_comes_whole(character):
    text = f"a{character} b"
    completion, pieces = write_script([*text.encode(), EOD])
    assert completion.text == text
    assert pieces == ["a", character, " ", "b"]
    assert completion.completion_tokens == len(text.encode()) + 1


def test_a_character_cut_by_max_tokens_is_one_replacement_at_most():
    completion, pieces = write_script("a🌍".encode(), max_tokens=3)
    assert completion.finish_reason == "length"
    assert completion.text in ("a", "a\ufffd")
    assert pieces[0] == "a"
    assert completion.completion_tokens == 3


def test_a_stop_text_over_several_tokens():
    completion, pieces = write_script(b"one ENter, END two", stop=("END",))
    assert completion.text == "one ENter, "
    assert completion.finish_reason == "stop"
    assert completion.completion_tokens == len("one ENter, END")
    assert "E" not in pieces


def test_what_a_stop_text_held_back_is_written_at_the_end():
    assert write_script([*b"one EN", EOD], stop=("END",))[0].text == "one EN"
    assert write_script(b"one EN", stop=("END",), max_tokens=6)[0].text == "one EN"


def test_without_stop_texts_the_text_is_the_decoded_ids():
    model = build()
    pieces = {0: "", 1: "", 2: ""}

    def hear(number, text):
        pieces[number] += text

    for number, one in enumerate(generate(model, TOKENIZER, PROMPTS, Settings(seed=2, max_tokens=30), hear)):
        assert one.text == pieces[number] == TOKENIZER.decode(one.ids)


def test_a_model_in_training_goes_on_training():
    model = build("gpt", dropout=0.5).train()
    settings = Settings(temperature=0, max_tokens=5)
    assert generate(model, TOKENIZER, ["a"], settings) == generate(model, TOKENIZER, ["a"], settings)
    assert model.training
    assert model.blocks["0"].attention.core.training
    tokens = torch.arange(10)[None]
    assert model(tokens, tokens).shape == (1, 10, TOKENIZER.vocab_size)
    model(tokens, tokens, targets=tokens).backward()


def test_no_tokens_asked_none_written():
    (completion,) = generate(build(), TOKENIZER, ["abc"], Settings(max_tokens=0))
    assert (completion.text, completion.completion_tokens, completion.prompt_tokens) == ("", 0, 3)
