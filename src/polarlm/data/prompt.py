"""What a model is to go on from."""

from polarlm.config import UserError
from polarlm.data.tokenizer import Tokenizer


def encode_prompt(tokenizer: Tokenizer, prompt: str, max_positions: int) -> list[int]:
    """The ids of a prompt; of an empty one, the end of a document before.

    Raises:
        UserError: there is none to start from, or they are more than the model has positions.
    """
    ids = list(tokenizer.encode(prompt))
    if not ids and tokenizer.eod_id is None:
        raise UserError("prompt: is empty, and the tokenizer has no end-of-document token to start from; give a text")
    if len(ids) > max_positions:
        raise UserError(
            f"prompt: {len(ids)} tokens do not fit in the model's context of {max_positions} "
            "(model.max_positions); shorten it"
        )
    return ids or [tokenizer.eod_id]
