"""Loads a model's tokenizer, checks it against its own file, and finds what ends an answer."""

import json
import logging
from pathlib import Path

from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from fsdp_qlora.model.architecture.config import needs_own_code, one_process_at_a_time
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json

log = logging.getLogger("fsdp_qlora")

# A text with everything that tokenizers split differently: blanks, digits, case, signs, scripts.
_PROBE = (
    "The  12 567\n\n\tisn't f(x_1) == 3.14e-5;  // ABCdef Grün «да» 東京は今 안녕하 "
    "नमस्ते مرحبا 🙂🏽 ①½ ﬁ\r\n    a  "
)


def load_tokenizer(
    folder: Path, name: str, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a model folder.

    Args:
        trust_remote_code: run code from the folder.
    Raises:
        UserError: the folder has no tokenizer, or it needs its own code.
    """
    try:
        # Without an explicit trust_remote_code, transformers asks at the terminal whether to run a
        # tokenizer's code.
        with one_process_at_a_time(enabled=trust_remote_code):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if (folder / "tokenizer.json").is_file() and tokenizer.is_fast and not trust_remote_code:
            tokenizer = _as_in_file(tokenizer, folder)
        tokenizer("a")  # some errors, such as a wrong model_max_length, are raised only here
    except UserError:
        raise
    # transformers raises OSError, ValueError, TypeError or KeyError here
    except Exception as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise needs_own_code(name, folder) from error
        raise UserError(
            f"model_name {name}: no tokenizer can be read from {folder} ({type(error).__name__}). "
            "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) into the model "
            "folder."
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model_name {name}: its tokenizer has no eos_token, so the model could not learn to "
            "stop. Set eos_token in tokenizer_config.json."
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"model_name {name}: {folder} has no tokenizer files (tokenizer.json).")
    return tokenizer


def _as_in_file(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """A tokenizer that splits text as tokenizer.json does, if there is one, else the given one.

    Some classes of transformers build another tokenizer than the file has, with which the model was
    trained.
    """
    reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    expected = reference.encode(_PROBE, add_special_tokens=False)
    if tokenizer.encode(_PROBE, add_special_tokens=False) == expected:
        return tokenizer
    # The general class with the folder's settings, such as the chat template and special tokens,
    # which the file alone does not have.
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    is_plain = plain.encode(_PROBE, add_special_tokens=False) == expected
    decision = "it is used, and other programs may use tokenizer.json"
    if is_plain:
        decision = "tokenizer.json is used"
    log.warning(
        "%s splits some texts differently from tokenizer.json; %s.",
        type(tokenizer).__name__,
        decision,
    )
    return plain if is_plain else tokenizer


def is_made_for_chats(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes a token at which the model stops."""
    # A template alone says nothing: base models may have one, too, whose turns end in a token at
    # which the base does not stop.
    template = str(tokenizer.chat_template or "")
    tokens = tokenizer.convert_ids_to_tokens(end_tokens(folder, tokenizer))
    # Templates write the tokenizer's own token by the name of a variable.
    return "eos_token" in template or any(token in template for token in tokens if token)


def end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which the model stops, by the tokenizer and the folder's configurations."""
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    generation_config = read_json(folder / "generation_config.json")
    stops = [tokenizer.eos_token_id]
    for content in (config, text_config, generation_config):
        # one token, or a list of tokens
        ids = content.get("eos_token_id") if isinstance(content, dict) else None
        stops += ids if isinstance(ids, list) else [ids]
    # Each once, the tokenizer's first. `type`, since True is an int for isinstance.
    return list(dict.fromkeys(stop for stop in stops if type(stop) is int))


def generation_config_with(
    folder: Path, tokenizer: PreTrainedTokenizerBase, ends: list[str]
) -> str:
    """The folder's generation_config.json, or a new one, that names these end tokens too."""
    stops = [*end_tokens(folder, tokenizer), *tokenizer.convert_tokens_to_ids(ends)]
    content = read_json(folder / "generation_config.json")
    content["eos_token_id"] = list(dict.fromkeys(stops))
    return json.dumps(content, indent=2) + "\n"
