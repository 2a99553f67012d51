import itertools

import pytest

from polarlm.generate import StopStrings


def run(pieces, *stop):
    """What came out for each piece, whether it stopped, and what the flush gave."""
    watch, out = StopStrings(stop), []
    for piece in pieces:
        out.append(watch.push(piece))
        if watch.stopped:
            return out, True, ""
    return out, False, watch.flush()


def test_without_stop_texts_everything_passes_at_once():
    assert run(["a", "bc"]) == (["a", "bc"], False, "")


def test_a_stop_text_over_several_pieces_is_not_written():
    assert run(["one E", "N", "D two"], "END") == (["one ", "", ""], True, "")


def test_a_beginning_that_comes_to_nothing_is_written_later():
    assert run(["one E", "N", "ter"], "END") == (["one ", "", "ENter"], False, "")
    assert run(["one E", "N"], "END") == (["one ", ""], False, "EN")


def test_the_earliest_of_several_counts():
    assert run(["abcdef"], "e", "cd", "zz") == (["ab"], True, "")


def test_a_beginning_inside_a_beginning():
    assert run(["aa", "ab"], "aab") == (["", "a"], True, "")


@pytest.mark.parametrize("stop", [("ab",), ("aab", "ba"), ("bbb", "abab")])
def test_however_the_text_is_cut_the_same_comes_out(stop):
    for letters in itertools.product("abc", repeat=6):
        text = "".join(letters)
        places = [text.find(one) for one in stop if one in text]
        expected = text[: min(places)] if places else text
        for pieces in (list(text), [text[:2], text[2:5], text[5:]]):
            out, stopped, rest = run(pieces, *stop)
            assert ("".join(out) + rest, stopped) == (expected, bool(places))
