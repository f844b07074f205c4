"""The model's architecture: configuration, tokenizer, meta model, and its blocks and layers found
by structure.
"""

import ast
import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import init_empty_weights
from filelock import FileLock
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.utils import HF_MODULES_CACHE

from fsdp_qlora.model.architecture.attention import choose_sdpa
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.architecture.shapes import any_layer_has
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json, read_named, why_not_writable
from fsdp_qlora.utils.text import shown

log = logging.getLogger("fsdp_qlora")

# Llama 3.1 405B has 126; a damaged configuration may have so many that building would not end
_MAX_BLOCKS = 1000
_MOST_OF_A_WEIGHT = 2**35  # elements; all experts of a layer of Kimi K2 have 2**33
# elements of a tensor; smaller tensors cost little, and may become buffers, which must be real
_LARGE = 2**24
# A text of what tokenizers split differently: blanks, digits, case, signs, scripts.
_PROBE = (
    "The  12 567\n\n\tisn't f(x_1) == 3.14e-5;  // ABCdef Grün «да» 東京は今 안녕하 "
    "नमस्ते مرحبا 🙂🏽 ①½ ﬁ\r\n    a  "
)
NEW_BLOCKS = "new_blocks"  # in config.json: indices of the decoder blocks that `expand` added
_READ = re.compile(r"self\.([\w.]+)\.(?:weight|bias)")  # a weight that a method reads
# an attribute that a condition requires
_SWITCH = re.compile(r"(?:^| and )self\.(?!training)(\w+)(?= and |$)")
# in the paths of parameters, but not in weight files
_WRAPPERS = ("_checkpoint_wrapped_module", "base_layer")


def canonical_name(name: str) -> str:
    """A parameter's or module's path in the weight files, without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def load_config(folder: Path, name: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a decoder-only model's configuration.

    Args:
        folder: the model's folder, or its config.json under any name.
        trust_remote_code: run code from the folder; the log names its files.
    Raises:
        UserError: config.json is missing or unreadable, or the model is not decoder-only or needs
        its own code.
    """
    _check_model_type(
        folder if folder.is_file() else folder / "config.json",
        name,
        trust_remote_code=trust_remote_code,
    )
    if trust_remote_code:
        log.info("The model's own code may run (--trust_remote_code): %s.", _own_code(folder))
    try:
        with _one_process_at_a_time(enabled=trust_remote_code):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds here
        raise UserError(f"model_name {name}: its config.json cannot be used: {error}") from error
    if (
        config.is_encoder_decoder
        or _auto_class(config, trust_remote_code=trust_remote_code) is None
    ):
        raise UserError(
            f"model_name {name} is of type {config.model_type!r}, which is not a decoder-only "
            "language model. "
            "Give a causal language model (llama, mistral, qwen, gemma, phi, ...)."
        )
    if not _has_decoder(config):
        raise UserError(
            f"model_name {name} is of type {config.model_type!r}, whose config.json gives no "
            "hidden size of a decoder, "
            "so it cannot be trained here. Give a causal language model (llama, mistral, qwen, "
            "gemma, phi, ...)."
        )
    blocks = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(blocks, int) and blocks > _MAX_BLOCKS:
        raise UserError(
            f"model_name {name}: its config.json has num_hidden_layers {blocks}, and at most "
            f"{_MAX_BLOCKS} are "
            "supported. Download it again."
        )
    return config


def _has_decoder(config: PretrainedConfig) -> bool:
    """Whether a configuration has one text model with one hidden size; blt has several models of
    bytes and patches.
    """
    try:
        text = config.get_text_config()
    except ValueError:
        return False
    return isinstance(text, PretrainedConfig) and "hidden_size" in {
        *vars(text),
        *text.attribute_map,
    }


def _auto_class(config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """transformers' class that builds a model with its head from the configuration; None if there
    is none.

    It builds the class that the checkpoint names, so that parameters have the same names; otherwise
    a class for text, or for images and text.
    """
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    built = {
        auto._model_mapping[type(config)]: auto
        for auto in classes
        if type(config) in auto._model_mapping
    }
    names = config.architectures if isinstance(config.architectures, list) else []
    return next(
        (auto for model, auto in built.items() if model.__name__ in names),
        next(iter(built.values()), None),
    )


def _own_code(folder: Path) -> str:
    return ", ".join(str(path) for path in sorted(folder.glob("*.py"))) or f"{folder} has none"


def _one_process_at_a_time(*, enabled: bool) -> contextlib.AbstractContextManager[object]:
    """A lock around transformers' copying of a model's code, which several ranks must not do at
    once.
    """
    if not enabled:
        return contextlib.nullcontext()
    folder = Path(HF_MODULES_CACHE)
    if not folder.is_dir() and (reason := why_not_writable(folder)):
        raise UserError(
            f"The model's code cannot be copied to {folder}: {reason}. Set HF_MODULES_CACHE to "
            "another folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "fsdp_qlora.lock")


def _needs_own_code(name: str, folder: Path) -> UserError:
    return UserError(
        f"model_name {name} needs its own Python code ({_own_code(folder)}), which is not run by "
        "default. Read that "
        "code; if you trust it, --trust_remote_code true runs it with your permissions."
    )


def _check_model_type(path: Path, name: str, *, trust_remote_code: bool) -> None:
    """Refuse models for which transformers would guess the type from the folder's name, or ask at
    the terminal.
    """
    if not path.is_file():
        raise UserError(
            f"model_name {name}: {path.parent} has no config.json, so it is not a model folder. "
            "Give a folder written by `save_pretrained` or downloaded from the hub."
        )
    try:
        content = dict(json.loads(read_named(path)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"model_name {name}: {path} is not valid JSON ({error}). Download it again."
        ) from error
    settings = content.get("quantization_config")
    if not isinstance(settings, dict | None):  # transformers would fail on it
        raise UserError(
            f"model_name {name}: config.json has quantization_config {shown(settings)}, not an "
            "object. Download it "
            "again, or give the model with 16- or 32-bit weights."
        )
    model_type = content.get("model_type")
    has_code = bool(content.get("auto_map"))
    if str(model_type) in CONFIG_MAPPING:
        return
    if has_code and not trust_remote_code:
        raise _needs_own_code(name, path.parent)
    if not has_code:
        raise UserError(
            f"model_name {name}: {path} has model_type {model_type!r}, which transformers "
            f"{transformers.__version__} does not support. For a newer model `pip install "
            "--upgrade transformers`."
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
        with _one_process_at_a_time(enabled=trust_remote_code):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if (folder / "tokenizer.json").is_file() and tokenizer.is_fast and not trust_remote_code:
            tokenizer = _as_in_file(tokenizer, folder)
        tokenizer("a")  # some errors, such as a wrong model_max_length, are raised only here
    except UserError:
        raise
    # transformers raises OSError, ValueError, TypeError or KeyError here
    except Exception as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise _needs_own_code(name, folder) from error
        raise UserError(
            f"model_name {name}: no tokenizer can be read from {folder} ({type(error).__name__}). "
            "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) into the model "
            "folder."
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model_name {name}: its tokenizer has no eos_token, so the model could not learn to "
            "stop. Set eos_token "
            "in tokenizer_config.json."
        )
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"model_name {name}: {folder} has no tokenizer files (tokenizer.json).")
    return tokenizer


def _as_in_file(tokenizer: PreTrainedTokenizerBase, folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of tokenizer.json where its class rebuilds another: the model was trained with
    that of the file.
    """
    in_file = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    wanted = in_file.encode(_PROBE, add_special_tokens=False)
    if tokenizer.encode(_PROBE, add_special_tokens=False) == wanted:
        return tokenizer
    plain: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    is_plain = plain.encode(_PROBE, add_special_tokens=False) == wanted
    taken = (
        ("tokenizer.json is used")
        if is_plain
        else ("it is used, and other programs may use tokenizer.json")
    )
    log.warning(
        "%s splits some texts otherwise than tokenizer.json; %s.", type(tokenizer).__name__, taken
    )
    return plain if is_plain else tokenizer


def is_made_for_chats(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template writes a token at which the model stops. Base models may have a
    template too.
    """
    tokens = tokenizer.convert_ids_to_tokens(end_tokens(folder, tokenizer))
    return any(
        token in str(tokenizer.chat_template or "")
        for token in ["eos_token", *filter(None, tokens)]
    )


def end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens at which the model stops: the tokenizer's, and what the configurations of the
    folder name.
    """
    config = read_json(folder / "config.json")
    stops = [tokenizer.eos_token_id]
    for content in (
        config,
        config.get("text_config"),
        read_json(folder / "generation_config.json"),
    ):
        named = content.get("eos_token_id") if isinstance(content, dict) else None
        stops += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(stop for stop in stops if type(stop) is int))


def generation_config_with(
    folder: Path, tokenizer: PreTrainedTokenizerBase, ends: list[str]
) -> str:
    """The folder's generation_config.json, or a new one, that names these end tokens too."""
    stops = [*end_tokens(folder, tokenizer), *tokenizer.convert_tokens_to_ids(ends)]
    content = read_json(folder / "generation_config.json") | {
        "eos_token_id": list(dict.fromkeys(stops))
    }
    return json.dumps(content, indent=2) + "\n"


def _attention_candidates(
    requested: str, config: PretrainedConfig, compute_dtype: torch.dtype, device: torch.device
) -> list[str]:
    if requested == "flash_attention_2" and (device.type == "cpu" or compute_dtype.itemsize != 2):
        raise UserError(
            "attn_implementation flash_attention_2 needs a GPU and 16-bit compute; this run "
            f"computes in {str(compute_dtype).removeprefix('torch.')} on {device.type}. Leave it "
            "at auto."
        )
    if requested not in ("auto", "sdpa"):
        return [requested]
    best_sdpa = choose_sdpa(config, compute_dtype, device)
    if requested == "sdpa":
        return [best_sdpa]
    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    fits_flash = (
        has_flash
        and compute_dtype.itemsize == 2
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
    flash = ["flash_attention_2"] if fits_flash else []
    # SDPA has no soft cap on attention logits (gemma2): transformers would leave it out silently.
    sdpa = [] if any_layer_has(config, "attn_logit_softcapping") else [best_sdpa]
    return [*flash, *sdpa, "eager"]


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device at once.

    accelerate moves a parameter there only after it was created, and the experts of a layer may
    exceed the memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            on_meta = func(*args, **(kwargs | {"device": "meta"}))
            if on_meta.numel() >= _LARGE:
                return on_meta
        return func(*args, **kwargs)


def build_meta_model(
    config: PretrainedConfig,
    *,
    attn_implementation: str,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device,
    experts_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Build the model with every parameter on the meta device and every buffer real.

    Args:
        attn_implementation: a transformers name, or "auto" for the best one that the model and
        device support. dtype: dtype of the parameters. compute_dtype, device: restrict "auto":
        flash-attn needs 16 bits and an Ampere GPU. experts_implementation: a transformers name;
        None for its default. trust_remote_code: run code from the model's folder.
    Raises:
        UserError: the requested attention implementation cannot be used, or the configuration is
        inconsistent.
    """
    candidates = _attention_candidates(attn_implementation, config, compute_dtype, device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if experts_implementation:
        options["experts_implementation"] = experts_implementation
    auto = _auto_class(config, trust_remote_code=trust_remote_code)
    for candidate in candidates:
        try:
            # Buffers stay real: rotary tables are computed at construction and are in no weight
            # file.
            with (
                _one_process_at_a_time(enabled=trust_remote_code),
                init_empty_weights(include_buffers=False),
                _LargeOnMeta(),
                no_init_weights(),
            ):
                model = auto.from_config(
                    config, dtype=dtype, attn_implementation=candidate, **options
                )
        except (ValueError, ImportError) as error:
            if candidate != candidates[-1]:
                continue
            raise UserError(
                f"The {config.model_type} model cannot be built with attn_implementation "
                f"{candidate}: {error}"
            ) from error
        except (
            ArithmeticError,
            AssertionError,
            LookupError,
            RuntimeError,
            TypeError,
            AttributeError,
        ) as error:
            raise UserError(
                f"The {config.model_type} model described by config.json cannot be built: "
                f"{str(error).partition(chr(10))[0]}. Download it again."
            ) from error
        sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
        wrong = [path for path, size in sizes.items() if not 0 < size <= _MOST_OF_A_WEIGHT]
        if wrong:
            raise UserError(
                f"The {config.model_type} model described by config.json has weights of size "
                f"{sizes[wrong[0]]}, such "
                f"as {wrong[0]}. Download it again."
            )
        model.tie_weights()
        model.config.use_cache = False
        return model
    raise AssertionError("no attention candidate")


def most_positions(config: PretrainedConfig) -> int | None:
    """The largest number of tokens in a row that the model supports; None if its configuration has
    no limit.
    """
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def at_most_positions(config: PretrainedConfig, length: int) -> int:
    """The smaller of `length` and the largest number of tokens that the model supports."""
    return min(length, most_positions(config) or length)


@torch.no_grad()
def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight as nn.Linear does, so that a quantized or adapted
    layer may replace it.

    A forward method of its own, such as a product by groups (deepseek_v4), is tried on small random
    values.
    """
    if not isinstance(module, nn.Linear) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if getattr(module.forward, "__func__", None) is nn.Linear.forward:
        return True
    weight = torch.sin(torch.arange(77.0, device="cpu")).view(7, 11)
    x = torch.eye(11, device="cpu")[None]
    bias = None if module.bias is None else weight[:, 0]
    small = copy.copy(module)
    vars(small)["_parameters"] = module._parameters | {"weight": weight, "bias": bias}
    try:
        return torch.allclose(small(x), F.linear(x, weight, bias), atol=1e-5)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


def block_linears(model: nn.Module, *, by_class_alone: bool = False) -> list[str]:
    """The paths of all linear layers inside the decoder blocks, in the order of the model; or of
    what only looks so.
    """
    inside = {*find_blocks(model).modules()}
    linears = (
        (path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear)
    )
    return [
        path for path, module in linears if module in inside and is_linear(module) != by_class_alone
    ]


def read_directly(model: nn.Module) -> list[str]:
    """The paths of the blocks' linear layers whose weight or bias another module reads, as a Mamba
    layer does.

    They are found in the modules' source code: a forward pass may read others with other kernels,
    and an adapter must be the same on every machine.
    """
    inside = {*find_blocks(model).modules()}
    read = {
        f"{path}.{child}"
        for path, module in model.named_modules()
        if module in inside
        for child, switches in _reads(type(module))  # type: ignore[arg-type]
        if all(getattr(module, switch, True) for switch in switches)
    }
    return [path for path in block_linears(model) if path in read]


@functools.cache
def _reads(kind: type[nn.Module]) -> set[tuple[str, frozenset[str]]]:
    """(Path of a child, the module's attributes that must be true so that it reads the child's
    weight or bias).
    """
    reads: set[tuple[str, frozenset[str]]] = set()
    classes = [vars(base) for base in kind.__mro__ if not base.__module__.startswith("torch.")]
    for name, method in (item for attributes in classes for item in attributes.items()):
        if inspect.isfunction(method) and not re.search("init|reset", name):
            with contextlib.suppress(OSError, SyntaxError):  # functions without a source file
                tree = ast.parse("if True:\n" + textwrap.indent(inspect.getsource(method), " "))
                reads.update(_reads_below(tree, frozenset()))
    return reads


def _reads_below(node: ast.AST, switches: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    if isinstance(node, ast.Attribute) and (read := _READ.fullmatch(ast.unparse(node))):
        yield read[1], switches
    for child in ast.iter_child_nodes(node):
        conditions = (
            _SWITCH.findall(ast.unparse(node.test))
            if isinstance(node, ast.If) and child in node.body
            else ()
        )
        yield from _reads_below(child, switches.union(conditions))


def new_blocks(config: PretrainedConfig, model_name: str) -> list[int]:
    """The indices of the blocks that block expansion added to a model.

    Raises:
        UserError: config.json does not record any.
    """
    indices = getattr(config, NEW_BLOCKS, None)
    count = config.get_text_config().num_hidden_layers
    if isinstance(indices, list) and indices and set(indices) <= set(range(count)):
        return indices
    raise UserError(
        f"{model_name}: its config.json does not list the added blocks ({NEW_BLOCKS}: {indices}). "
        "Create the model "
        "with fsdp-qlora expand MODEL --out FOLDER."
    )


def has_tied_embeddings(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, buffer) of the buffers that weight files contain."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
