"""Describes a result: training.json for programs, and README.md, the model card, for people."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from huggingface_hub import ModelCardData

from fsdp_qlora import __version__
from fsdp_qlora.config.text import identity_settings
from fsdp_qlora.config.train_types import PACKAGES, TrainType
from fsdp_qlora.data.text.rendering import TEMPLATE, example_prompts
from fsdp_qlora.utils.environment import versions
from fsdp_qlora.utils.hub import public_name
from fsdp_qlora.utils.redact import redact_values
from fsdp_qlora.utils.run_files import CARD, RECORD

_TEMPLATE = Path(__file__).resolve().parent / "card.md"
# The training.json of an adapter from another program.
_UNKNOWN: dict[str, Any] = {
    "format": 1,
    "base": {},
    "run_id": None,
    "parent": None,
    "step": None,
    "num_tokens": None,
    "losses": {"loss": None},
    "prompt": None,
    "data": [],
    "eval_data": [],
    "settings": {},
    "versions": {},
}
_KINDS = {"lora": "LoRA adapter", "dora": "DoRA adapter"}
_PACKAGES = ("fsdp_qlora", "torch", "transformers", "peft", "bitsandbytes")


class BaseName(NamedTuple):
    """The base model's name in a result. is_on_hub: whether loaders find it by this name."""

    name: str
    is_on_hub: bool

    @classmethod
    def of(cls, model_name: str, published: str | None = None) -> "BaseName":
        """The name for a --model_name. published: its name on the hub, if it was given."""
        name = published or public_name(model_name)
        # Without a slash it is a name such as gpt2 of the hub, or that of a local folder.
        is_local = "/" not in name and Path(model_name).expanduser().is_dir()
        return cls(name, is_on_hub=not is_local)


def training_record(
    about: Mapping[str, Any], progress: Mapping[str, Any], base: BaseName, kind: TrainType
) -> dict[str, Any]:
    """The content of training.json.

    Args:
        about: the run's identity, as in its run.json and checkpoints.
        progress: of the step, as in the checkpoint.
    """
    step = progress["step"]
    losses = {"loss": progress.get("loss")}
    # The eval_loss only if these weights were evaluated: an earlier step's would praise others.
    if progress.get("first_eval_loss") is not None:
        losses["first_eval_loss"] = progress["first_eval_loss"]
    if progress.get("last_eval_step") == step:
        losses["eval_loss"] = progress.get("eval_loss")
        if progress.get("eval_score") is not None:
            losses["eval_score"] = progress["eval_score"]
    if progress.get("best_by", "loss") != "loss":
        losses["best_by"] = progress["best_by"]
    installed = versions()
    packages = (*_PACKAGES, PACKAGES.get(kind.quantizer or ""))
    base_facts = {
        "name": base.name,
        "is_on_hub": base.is_on_hub,
        "weights": about["facts"].get("base"),
    }
    if "base_format" in about:
        base_facts["format"] = about["base_format"]
    record = {
        "format": 1,
        "base": base_facts,
        "run_id": about["run_id"],
        "parent": about.get("parent"),
        "step": step,
        "num_tokens": progress.get("num_tokens"),
        "rows_per_step": about.get("global_batch_size"),
        "losses": losses,
        "precision": about["facts"].get("precision"),
        "prompt": about.get("prompt"),
        "data": about.get("data", []),
        "eval_data": about.get("eval_data", []),
        "settings": identity_settings(about["options"])[0],
        "versions": {name: installed[name] for name in packages if name in installed},
    }
    # Tuples become lists, as in a checkpoint's JSON, so that a run and `export` write the same.
    return dict(json.loads(json.dumps(redact_values(record))))


def documents(record: Mapping[str, Any], *, kind: str | None) -> dict[str, str]:
    """File name -> text: training.json and the model card.

    kind: the adapter's, lora or dora; None for a whole model.
    """
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    return {RECORD: text, CARD: _card(record, kind)}


def merged_documents(
    earlier: Mapping[str, Any],
    base: BaseName,
    settings: Mapping[str, Any],
    merged: Mapping[str, str],
) -> dict[str, str]:
    """File name -> text: training.json and the card of an adapter that was merged into its base.

    Args:
        earlier: the adapter's training.json; empty if it is not of this program, and `base` and
            `settings` count then.
        merged: adapter, the name of its folder; kind, lora or dora; into, original or dequantized.
    """
    # Another program's folder may have a training.json, too, with other keys.
    if earlier.get("format") != 1 or not _UNKNOWN.keys() <= earlier.keys():
        earlier = _UNKNOWN | {"base": base._asdict(), "settings": dict(settings)}
    record = dict(earlier) | {"merged": dict(merged) | {"version": __version__}}
    return documents(record, kind=None)


def _card(record: Mapping[str, Any], kind: str | None) -> str:
    name = record["base"]["name"]
    base = BaseName(name, record["base"].get("is_on_hub", "/" in name))
    objective = record["settings"].get("objective", "sft")
    tags = [kind] if kind else []
    tags.append("fsdp_qlora")
    if objective != "sft":
        tags.append(objective)
    metadata = ModelCardData(
        base_model=base.name if base.is_on_hub else None,
        library_name="peft" if kind else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
    )
    prompt = record["prompt"]
    eval_loss = record["losses"].get("eval_loss")
    perplexity = None
    # Other objectives' losses are no negative log-likelihoods; exp(100) says nothing, and from 710
    # on it is no float.
    if objective == "sft" and eval_loss is not None and eval_loss < 100:
        perplexity = math.exp(eval_loss)
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    # A name from outside in Markdown: one line, and no markup.
    environment.filters["name"] = lambda name: re.sub(
        r"([\\`*\[\]<>])", r"\\\1", " ".join(str(name).split())
    )
    return environment.from_string(_TEMPLATE.read_text()).render(
        {"merged": None} | dict(record),
        metadata=metadata.to_yaml(),
        base=base,
        stored=record["base"].get("format"),
        kind=kind,
        kinds=_KINDS,
        perplexity=perplexity,
        prompts=example_prompts(prompt) if prompt and prompt["kind"] == TEMPLATE else {},
        changed=identity_settings(record["settings"])[1],
    )
