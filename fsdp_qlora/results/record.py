"""What a result's folder says of itself: training.json for programs and README.md, the model card, for people."""

import json
import math
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.checkpointing.layout import CARD, RECORD
from fsdp_qlora.config.text import identity_settings
from fsdp_qlora.data.rendering import CHAT, TEMPLATE, example_prompts
from fsdp_qlora.loading.hub import public_name
from fsdp_qlora.redact import redact_values
from fsdp_qlora.train_types import TrainType
from fsdp_qlora.version import VERSION

# What a training.json says of an adapter of which nothing is known.
_UNKNOWN: dict[str, Any] = {
    "format": 1, "base": {}, "run_id": None, "parent": None, "step": None, "num_tokens": None, "losses": {"loss": None},
    "prompt": None, "data": [], "eval_data": [], "settings": {}, "versions": {},
}  # fmt: skip
_KINDS = {"lora": "LoRA adapter", "dora": "DoRA adapter"}
_PACKAGES = ("fsdp_qlora", "torch", "transformers", "peft", "bitsandbytes", "hqq")


class Base(NamedTuple):
    """The base model as a result names it. is_on_hub: whether loaders find it by this name."""

    name: str
    is_on_hub: bool

    @classmethod
    def of(cls, model_name: str, published: str | None = None) -> "Base":
        """Of a model as an option names it. published: a name on the hub that is given to it."""
        name = published or public_name(model_name)
        return cls(name, is_on_hub="/" in name or not Path(model_name).expanduser().is_dir())


def training_record(
    about: Mapping[str, Any], progress: Mapping[str, Any], base: Base, settings: Mapping[str, Any], kind: TrainType
) -> dict[str, Any]:
    """The content of training.json.

    Args:
        about: the run's identity, as in its run.json and checkpoints. progress: of the step, as in the checkpoint.
        settings: the options that make the run this run, without paths.
    """
    step = progress["step"]
    losses = {"loss": progress.get("loss")}
    if progress.get("first_eval_loss") is not None:
        losses["first_eval_loss"] = progress["first_eval_loss"]
    if progress.get("last_eval_step") == step:
        losses["eval_loss"] = progress.get("eval_loss")
    shown = _PACKAGES if kind.quantizer == "hqq" else _PACKAGES[:-1]
    record = {
        "format": 1,
        "base": {"name": base.name, "is_on_hub": base.is_on_hub, "weights": about["facts"].get("base")},
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
        "settings": dict(settings),
        "versions": {name: version for name in shown if (version := _version(name))},
    }
    # As in a checkpoint's JSON, so that a run and `export` write the same.
    return dict(json.loads(json.dumps(redact_values(record))))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a clone that is not installed
        return None


def documents(record: Mapping[str, Any], *, kind: str | None, changed: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text: training.json and the model card.

    Args:
        kind: of the adapter; None for a whole model.
        changed: the settings that are not the program's defaults.
    """
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    return {RECORD: text, CARD: "\n".join(_card(record, kind, changed)) + "\n"}


def merged_documents(
    earlier: Mapping[str, Any], base: Base, settings: Mapping[str, Any], merged: Mapping[str, str]
) -> dict[str, str]:
    """File name -> text: training.json and the model card of an adapter that was merged into its base.

    Args:
        earlier: the adapter's training.json; empty if it is not of this program, and `base` and `settings` count then.
        merged: adapter, the name of its folder; kind, lora or dora; into, original or dequantized.
    """
    if earlier.get("format") != 1 or not _UNKNOWN.keys() <= earlier.keys():
        earlier = {**_UNKNOWN, "base": base._asdict(), "settings": dict(settings)}
    record = {**earlier, "merged": {**merged, "version": VERSION}}
    return documents(record, kind=None, changed=identity_settings(record["settings"])[1])


def how_to_load(base: Base, folder: str) -> list[str]:
    """Python lines that load an adapter."""
    if base.is_on_hub:
        return [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{folder}", dtype="auto")',
        ]
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("PATH_OF/{base.name}", dtype="auto")',
        f'model = PeftModel.from_pretrained(base, "{folder}")',
    ]


# --- the card ---


def _card(record: Mapping[str, Any], kind: str | None, changed: Mapping[str, Any]) -> Iterator[str]:
    base = Base(record["base"]["name"], record["base"]["is_on_hub"])
    what = _KINDS.get(kind or "", "model")
    yield from _front_matter(base, kind)
    yield f"# {what[0].upper()}{what[1:]} {'for' if kind else 'made from'} {base.name}"
    yield ""
    yield _origin(record, what if kind else None)
    yield ""
    yield from _facts(record, base)
    yield from ["", "## Prompt format", "", *_prompt(record["prompt"])]
    yield from ["", "## How to load", "", "```python"]
    if kind:
        yield from how_to_load(base, "PATH_OF/THIS_FOLDER")
    else:
        yield from ["from transformers import AutoModelForCausalLM", ""]
        yield 'model = AutoModelForCausalLM.from_pretrained("PATH_OF/THIS_FOLDER", dtype="auto")'
    yield from ["```", ""]
    if kind and not base.is_on_hub:
        yield (
            f"The base was a local folder called `{base.name}`, which no loader can find by that name: give its path. "
            "`--base_name OWNER/NAME` writes a name on the hub into the adapter."
        )
        yield ""
    yield from ["## Settings", "", "Those that differ from the program's defaults; `training.json` has them all.", ""]
    yield from [f"- `{name}`: {_shown(value)}" for name, value in changed.items()] or ["- none"]
    if record["versions"]:
        yield from ["", "## Versions", ""]
        yield ", ".join(f"{name} {version}" for name, version in record["versions"].items())


def _origin(record: Mapping[str, Any], what: str | None) -> str:
    """Where an adapter (what it is), or a model (None), comes from."""
    trained = f", trained with fsdp_qlora as `{record['settings'].get('train_type')}` to step {record['step']}"
    if (merged := record.get("merged")) is None:
        return f"{f'A {what}' if what else 'The model'}{trained}."
    into = "weights after the quantization of the training" if merged["into"] == "dequantized" else "own weights"
    known = trained if record["step"] is not None else ""
    return f"The {_KINDS[merged['kind']]} `{merged['adapter']}`{known}, merged into the base's {into}."


def _front_matter(base: Base, kind: str | None) -> Iterator[str]:
    yield "---"
    if base.is_on_hub:
        yield f"base_model: {base.name}"
    yield f"library_name: {'peft' if kind else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield "tags:"
    yield from [f"- {tag}" for tag in ([kind, "fsdp_qlora"] if kind else ["fsdp_qlora"])]
    yield "---"


def _facts(record: Mapping[str, Any], base: Base) -> Iterator[str]:
    losses, when = record["losses"], ", measured before the merge" if "merged" in record else ""
    yield f"- Base: {base.name}"
    for title, name in (("Data", "data"), ("Held-out data", "eval_data")):
        if record[name]:
            yield f"- {title}: {', '.join(_dataset(item) for item in record[name])}"
    if record["num_tokens"]:
        rows = f" of {record['rows_per_step']} rows" if record.get("rows_per_step") else ""
        yield f"- Trained on: {record['num_tokens']:,} tokens in {record['step']:,} steps{rows}"
    if losses["loss"] is not None:
        yield f"- Training loss of the last step: {losses['loss']:.4f}"
    if losses.get("eval_loss") is not None:
        perplexity = f" (perplexity {math.exp(losses['eval_loss']):.2f})" if losses["eval_loss"] < 100 else ""
        before, after = losses["first_eval_loss"], losses["eval_loss"]
        yield f"- Held-out loss: {before:.4f} before, {after:.4f} after{perplexity}{when}"
    if parent := record["parent"]:
        at = f" at step {parent['step']}" if parent.get("step") is not None else ""
        run = f", run {parent['run_id']}" if parent.get("run_id") else ""
        yield f"- Goes on from: the adapter {parent['name']}{run}{at}"


def _dataset(item: Mapping[str, Any]) -> str:
    rows = "streamed" if item["rows"] is None else f"{item['rows']:,} rows"
    return f"{item['name']} ({rows}, format {item['format']})"


def _prompt(prompt: Mapping[str, Any] | None) -> Iterator[str]:
    if prompt is None:
        yield "Not noted down when the adapter was trained."
    elif prompt["kind"] == CHAT:
        yield (
            "The chat template of this folder's tokenizer: "
            "`tokenizer.apply_chat_template(messages, add_generation_prompt=True)`."
        )
    elif prompt["kind"] == TEMPLATE:
        yield (
            "This text, to the letter, and the answer directly behind it. `tokenizer(prompt)` encodes it, with the "
            "tokens that the model wants in front."
        )
        for title, text in example_prompts(prompt).items():
            yield from ["", f"For a row {title}:" if title != "without" else "For a row without an input:", ""]
            yield from ["```text", *text.split("\n"), "```"]
    else:
        yield "None: the rows are text as it stands."


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
