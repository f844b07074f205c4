"""Refuses values and combinations of options before a model is read or a device is used.

Each rule is a generator of messages, so that a user sees all errors of a command at once.
"""

import importlib.util
import math
import re
from collections.abc import Iterator

from fsdp_qlora.config.learn import LEARN, Learn, contradiction, read_learn
from fsdp_qlora.config.marks import OF_ADAPTER, of_quantizer
from fsdp_qlora.config.objectives import LABELS, OBJECTIVES, PAIRS, TEXTS, Reference, RowKind
from fsdp_qlora.config.options import DEFAULTS, LIMITS, TrainConfig, names_marked
from fsdp_qlora.config.text import ALL, TOWERS, is_regex, pairs, url_error
from fsdp_qlora.config.train_types import PACKAGES, QUANT_TYPES, TRAIN_TYPES
from fsdp_qlora.utils.files import PUBLIC, folder_error, is_repository, mirror_error

# Options of answers in training that answers to held-out prompts have, too.
_OF_SCORES = ("max_completion_length", "on_reward_error")
_MOST_TOKENS = 2**26  # of a micro-batch: at 4,096 numbers in 16 bits for each they are 512 GiB
NEEDS_LM_EVAL = 'needs the package lm_eval: pip install "fsdp_qlora[lm-eval]"'


def check(config: TrainConfig) -> list[str]:
    """Check the values of the options and their combination; returns one message per error."""
    return out_of_range(config) + [error for rules in _RULES for error in rules(config)]


def out_of_range(config: TrainConfig) -> list[str]:
    """Check each value against the limit of its option; returns one message per error."""
    return [
        f"--{name} must be {limit.allowed}, but is {getattr(config, name)!r}."
        for name, limit in LIMITS.items()
        if not limit.accepts(getattr(config, name))
    ]


def _changed(config: TrainConfig, *names: str) -> list[str]:
    return [name for name in names if getattr(config, name) != getattr(DEFAULTS, name)]


def _quantization_conflicts(c: TrainConfig) -> Iterator[str]:
    kind = c.kind
    # The values auto and off are for every base: a cache that nothing fills does no harm.
    options = _changed(c, "allow_unquantized")
    if c.quant_cache not in ("auto", "off"):
        options.append("quant_cache")
    if options and kind.quantizer is None:
        yield (
            f"--train_type {c.train_type} does not quantize: leave out {_flags(options)}, or use "
            "--train_type qlora."
        )
    for quantizer in sorted({other.quantizer for other in TRAIN_TYPES.values() if other.quantizer}):
        options = _changed(c, *names_marked(of_quantizer(quantizer)))
        # By the table and not by `kind`, whose quantizer is already what --quant_type made of it.
        if options and TRAIN_TYPES[c.train_type].quantizer != quantizer:
            takers = [name for name, other in TRAIN_TYPES.items() if other.quantizer == quantizer]
            yield (
                f"--train_type {c.train_type} does not take {_flags(options)}, which is for "
                f"{', '.join(takers)}."
            )
    if _changed(c, "double_quant") and QUANT_TYPES[c.quant_type] != "bnb_4bit":
        yield f"--quant_type {c.quant_type} does not take --double_quant, which is for nf4 and fp4."
    package = PACKAGES.get(kind.quantizer or "")
    if package and importlib.util.find_spec(package) is None:
        yield f"--train_type {c.train_type} needs the package {package}: pip install {package}."


def _adapter_conflicts(c: TrainConfig) -> Iterator[str]:
    kind = c.kind
    options = _changed(c, *names_marked(OF_ADAPTER))
    if options and not kind.adapter:
        yield (
            f"--train_type {c.train_type} has no adapter: leave out {_flags(options)}, or use "
            "--train_type lora."
        )
    if c.lora_target_parameters and c.lora_dropout:
        yield (
            f"--lora_dropout is {c.lora_dropout}, but --lora_target_parameters needs it to be 0: "
            "PEFT adapts experts without dropout."
        )
    if c.lora_target_parameters and kind.adapter == "dora":
        yield (
            f"--train_type {c.train_type} is DoRA, which PEFT has for linear layers only: leave "
            "out --lora_target_parameters."
        )
    # modules_to_save trains copies of the modules whose rows add_tokens would change.
    if c.add_tokens and c.modules_to_save:
        yield (
            "--add_tokens trains the rows of some tokens, and --modules_to_save trains all rows. "
            "Give one of them."
        )
    yield from _init_errors(c)
    yield from _merge_aware_errors(c)
    if not c.lora_target_modules and not c.lora_target_parameters:
        yield (
            "--lora_target_modules none leaves linear layers without adapters, so "
            "--lora_target_parameters must name weights of experts."
        )
    yield from _target_errors(c.lora_target_modules)
    yield from _tower_errors(c)
    yield from _pattern_errors("rank_pattern", c.rank_pattern, int, "a whole number of 1 or more")
    yield from _pattern_errors("alpha_pattern", c.alpha_pattern, float, "a number above 0")


def _init_errors(c: TrainConfig) -> Iterator[str]:
    kind = c.kind
    init = c.init_lora_weights
    if init == "true":
        return
    if kind.adapter and kind.quantizer is None:
        yield (
            "--init_lora_weights loftq corrects the quantization, but --train_type "
            f"{c.train_type} does not quantize."
        )
    if kind.adapter == "dora":
        yield (
            f"--train_type {c.train_type} is DoRA, which starts from the base: leave "
            "--init_lora_weights at true."
        )
    if c.lora_target_parameters:
        yield (
            f"--init_lora_weights {init} is for linear layers: leave out --lora_target_parameters."
        )


def _merge_aware_errors(c: TrainConfig) -> Iterator[str]:
    if not c.merge_aware or not c.kind.adapter:
        return
    of_files = TRAIN_TYPES[c.train_type]
    if of_files.adapter == "dora":
        yield f"--merge_aware is for LoRA, and --train_type {c.train_type} is DoRA: take qlora."
    elif of_files.quantizer != "bnb_4bit":
        yield (
            f"--merge_aware rounds to the format of the base's files, which --train_type "
            f"{c.train_type} does not train on as they are: take qlora."
        )
    elif c.quant_type != "auto":
        yield (
            f"--merge_aware rounds to the format of the base's files: leave out --quant_type "
            f"{c.quant_type}, and quantize the base before with fsdp-qlora quantize."
        )
    if c.lora_dropout:
        yield (
            "--merge_aware multiplies by weight and adapter in one, so it has no --lora_dropout: "
            "leave it at 0."
        )
    if c.init_lora_weights != "true":
        yield (
            f"--init_lora_weights {c.init_lora_weights} corrects a quantization that --merge_aware "
            "repeats: leave it at true."
        )
    if any(name in TOWERS for name in c.lora_target_modules):
        yield "--merge_aware: layers that compute images are not quantized. Leave the words out."
    kept_plain = _changed(c, "modules_to_save", "add_tokens")
    if kept_plain:
        yield f"--merge_aware trains quantized weights alone: leave out {_flags(kept_plain)}."
    if c.rollout_url:
        yield (
            "--merge_aware: a server would load the adapter beside its base, not merged into it: "
            "leave out --rollout_url."
        )


def _tower_errors(c: TrainConfig) -> Iterator[str]:
    words = ",".join(name for name in c.lora_target_modules if name in TOWERS)
    if words and c.rollout_url:
        yield (
            f"--lora_target_modules {words}: a server that loads the adapter may leave out those "
            "of layers that compute images: leave out the words, or --rollout_url."
        )
    if words and c.kind.adapter == "dora":
        yield (
            f"--lora_target_modules {words}: layers that compute images can have plain LoRA, and "
            f"--train_type {c.train_type} is DoRA. Leave the words out, or choose lora or qlora."
        )
    if words and c.init_lora_weights != "true":
        yield (
            f"--lora_target_modules {words}: layers that compute images are not quantized, and "
            f"--init_lora_weights {c.init_lora_weights} corrects a quantization. Leave it at true."
        )


def _target_errors(targets: tuple[str, ...]) -> Iterator[str]:
    value = ",".join(targets)
    targets = tuple(name for name in targets if name not in TOWERS)
    if len(targets) > 1:
        special = [name for name in targets if name in (*ALL, "default")]
        if special:
            yield (
                f"--lora_target_modules: {min(special)} cannot be combined with other names, but "
                f"the value is {value}."
            )
        elif any(is_regex(name) for name in targets):
            yield (
                "--lora_target_modules: give one regular expression and nothing else, without "
                f"commas; the value is {value}."
            )
    elif targets and is_regex(targets[0]):
        reason = _regex_error(targets[0])
        if reason:
            yield (
                f"--lora_target_modules: {value} is neither a name nor a valid regular expression: "
                f"{reason}."
            )


def _pattern_errors(
    option: str, items: tuple[str, ...], to_number: type, allowed: str
) -> Iterator[str]:
    for name, value in pairs(items):
        try:
            is_valid = 0 < to_number(value) < math.inf  # NaN is neither
        except ValueError:
            is_valid = False
        if not name or not is_valid:
            item = f"{name}={value}" if value else name
            yield f"--{option} needs name=number with {allowed}, but has {item!r}."
            continue
        reason = _regex_error(name)
        if reason:
            yield f"--{option}: {name} is not a valid regular expression: {reason}."


def _regex_error(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None


def _objective_conflicts(c: TrainConfig) -> Iterator[str]:
    chosen = c.objective_row
    decided = chosen.decided(c)
    decided_by_default = DEFAULTS.objective_row.decided(DEFAULTS)._asdict()
    options_of_any = dict.fromkeys(name for o in OBJECTIVES.values() for name in o.options)
    for name in _changed(c, *options_of_any):
        # The record of a run has beta and loss_type as the objective decided them. They are no
        # change where they are what the default objective decides.
        is_decided = getattr(c, name) == decided_by_default.get(name)
        is_of_scores = c.eval_rewards and name in _OF_SCORES
        if name not in chosen.options and not is_decided and not is_of_scores:
            takers = [other for other, row in OBJECTIVES.items() if name in row.options]
            yield (
                f"--objective {c.objective} does not take --{name}, which is for "
                f"{', '.join(takers)}."
            )
    if c.loss_type not in ("auto", *chosen.loss_types):
        yield (
            f"--objective {c.objective} has no --loss_type {c.loss_type}. Give one of "
            f"{', '.join(chosen.loss_types)}."
        )
    if c.beta == 0 and chosen.beta > 0:
        yield f"--beta must be above 0 for --objective {c.objective}."
    if chosen.distills and decided.beta > 1:
        yield (
            f"--beta must be between 0 (forward KL divergence) and 1 (reverse) for --objective "
            f"{c.objective}."
        )
    has_reference_model = chosen.reference(c) is not Reference.NONE and not chosen.distills
    if c.precompute_reference and not has_reference_model:
        yield f"--objective {c.objective} has no reference model: leave out --precompute_reference."
    of_teacher = _changed(c, "teacher_adapter", "teacher_url", "top_k")
    if of_teacher and chosen.distills and not c.teacher:
        verb = "work" if len(of_teacher) > 1 else "works"
        yield f"{_flags(of_teacher)} only {verb} with --teacher NAME."
    is_rated = c.rating_threshold is not None
    formats = ("rating", "ratings")
    if is_rated and chosen.row_kind not in (PAIRS, LABELS):
        yield (
            f"--objective {c.objective} trains on all answers: leave out --rating_threshold, which "
            "is for dpo, kto and the other preference objectives."
        )
    if c.dataset_format != "auto" and is_rated != (c.dataset_format in formats):
        yield (
            f"--rating_threshold and --dataset_format {' or '.join(formats)} need each other. "
            "Leave the format at auto, or give both."
        )
    kind = chosen.kind_of_rows(c)
    if kind != TEXTS:
        yield from _answer_conflicts(c, kind)


def _answer_conflicts(c: TrainConfig, kind: RowKind) -> Iterator[str]:
    """Conflicts with objectives whose rows are more than texts: pairs, labels and prompts."""
    # The reference, where there is one, is the model without its adapter: all else must stay.
    trained_too = _changed(c, "modules_to_save", "add_tokens")
    if trained_too or not c.kind.adapter:
        refused = _flags(trained_too) or f"--train_type {c.train_type}"
        yield (
            f"--objective {c.objective} trains an adapter on a frozen model: it cannot be used "
            f"with {refused}."
        )
    objective = c.objective_row
    if objective.reference_beside(c) is Reference.START and c.kind.adapter == "dora":
        yield (
            f"--objective {c.objective} compares with the adapter that training starts from, and "
            "only LoRA keeps a copy of it. Merge the adapter into the base first, or take an "
            "objective without a reference (cpo, simpo, orpo)."
        )
    if kind.has_teacher and (c.batching == "padded" or c.context_parallel_size != 1):
        yield (
            f"--objective {c.objective} joins two texts: leave out --batching padded and "
            "--context_parallel_size."
        )
    learn = read_learn(c.learn) if LEARN.accepts(c.learn) else Learn()
    if learn.turns == "all":
        yield f"--objective {c.objective} trains on answers only: leave out --learn all."
    if kind.is_sampled and (learn.read_only or learn.keeps_empty):
        yield (
            f"--objective {c.objective} trains on the model's own completions, all of them: leave "
            f"out --learn {learn.text}."
        )


def _rollout_conflicts(c: TrainConfig) -> Iterator[str]:
    if not c.samples_answers:
        return
    if not (c.rewards or c.environment or c.objective_row.distills):
        yield (
            f"--objective {c.objective} needs --rewards: functions that score the completions, "
            "such as exact_match."
        )
    of_episodes = _changed(c, "max_turns", "tool_seconds", "episode_seconds")
    if of_episodes and not c.environment:
        verb = "need" if len(of_episodes) > 1 else "needs"
        yield f"{_flags(of_episodes)} {verb} --environment."
    not_of_episodes = _changed(c, "rollout_ahead", "eval_rewards")
    if not_of_episodes and c.environment:
        yield (
            f"--environment plays episodes, and {_flags(not_of_episodes)} takes answers of one "
            "turn. Leave out one of them."
        )
    if c.best_by == "loss":
        yield (
            f"--best_by loss: --objective {c.objective} has no held-out loss. Give reward, or the "
            "name of a function of --eval_rewards."
        )
    for name in _changed(c, "rollout_url", "teacher_url"):
        error = url_error(name, getattr(c, name))
        if error is not None:
            yield error
    if c.teacher and not c.teacher_url:
        yield (
            f"--objective {c.objective} needs --teacher on a server: give --teacher_url, or leave "
            "out --teacher."
        )
    # Servers do not divide the logits of prompts by a temperature.
    if c.teacher_url and c.temperature != 1:
        yield "--teacher_url: servers give probabilities at temperature 1: leave out --temperature."
    if c.rollout_url and c.kind.adapter == "dora":
        yield (
            f"--rollout_url: servers load only LoRA adapters, and --train_type {c.train_type} "
            "trains DoRA."
        )
    if c.rollout_ahead and not c.rollout_url:
        yield (
            "--rollout_ahead is for a server that completes prompts while the run trains: give "
            "--rollout_url, too."
        )
    refused = _changed(c, "precompute_reference")
    held_out = _changed(c, "eval_dataset", "eval_fraction")
    if refused or (held_out and not c.eval_rewards):
        advice = " without --eval_rewards, which scores answers to held-out prompts"
        yield (
            f"--objective {c.objective} generates its rows during training: it cannot be used "
            f"with {_flags([*held_out, *refused])}{'' if refused else advice}."
        )


def _data_conflicts(c: TrainConfig) -> Iterator[str]:
    if contradiction(c.learn):
        yield f"--learn: {contradiction(c.learn)} contradict each other."
    # The noise is scaled by the length of the row, of which a rank has a part only.
    if c.context_parallel_size != 1 and c.neftune_alpha:
        yield "--neftune_alpha needs whole rows on a rank: leave out --context_parallel_size."
    if c.context_parallel_size != 1 and c.batching == "padded":
        yield (
            "--context_parallel_size divides rows without padding among ranks: leave out "
            "--batching padded."
        )
    if c.batch_size * c.longest_row > _MOST_TOKENS:
        yield (
            f"--batch_size times --context_length must be at most {_MOST_TOKENS:,} tokens, more "
            "than any GPU holds."
        )
    if c.eval_dataset and c.eval_fraction > 0:
        yield "--eval_dataset and --eval_fraction both choose the evaluation rows. Give one."
    reasons = {
        "eval_steps": "needs rows to measure on",
        "eval_rewards": "score answers to held-out rows",
        "sample_prompts": "are answered at each evaluation",
        "eval_tasks": "are measured at each evaluation",
    }
    for name, reason in reasons.items():
        if getattr(c, name) and not c.eval_dataset and c.eval_fraction == 0:
            yield f"--{name} {reason}: give --eval_fraction (such as 0.05) or --eval_dataset."
    if c.eval_tasks and not importlib.util.find_spec("lm_eval"):
        yield f"--eval_tasks {NEEDS_LM_EVAL}"
    if c.best_by not in (None, "loss") and not c.eval_rewards:
        yield f"--best_by {c.best_by} is a score: it needs --eval_rewards."
    if c.early_stopping and not c.eval_steps:
        yield (
            "--early_stopping counts the evaluations during training: it needs --eval_steps (such "
            "as 50)."
        )


def _place_errors(c: TrainConfig) -> Iterator[str]:
    """Folders that are URLs, and names that are no repository of the hub.

    A URL would silently become a folder of this machine, with a password as its name.
    """
    folders = {
        "output_dir": c.output_dir,
        "resume": c.start_from or c.resume,
        "quant_cache": c.quant_cache,
        "adapter": c.adapter or "",
    }
    errors = [folder_error(name, folder) for name, folder in folders.items()]
    yield from filter(None, [*errors, mirror_error(c.mirror or "")])
    repositories = {"base_name": c.base_name, "push_to_hub": c.push_to_hub}
    for name, value in repositories.items():
        if value is None:
            continue
        repository = value.removesuffix(PUBLIC) if name == "push_to_hub" else value
        if not is_repository(repository):
            yield f"--{name} must be OWNER/NAME, a repository on the hub, but is {value!r}."


def _run_conflicts(c: TrainConfig) -> Iterator[str]:
    # Offloaded weights that train have their optimizer in host memory, where nothing is paged.
    trains_more = c.modules_to_save or c.add_tokens or not c.kind.adapter
    leaves_some = c.use_cpu_offload not in ("auto", False) and trains_more
    if c.optimizer.startswith("paged_") and leaves_some:
        yield (
            f"--optimizer {c.optimizer} pages from the GPU, where --use_cpu_offload leaves "
            f"{'not all that trains' if c.kind.adapter else 'nothing'}: use adamw_8bit."
        )
    if c.push_to_hub and not c.save_model:
        yield "--push_to_hub uploads what is saved: it needs --save_model true."


def _text_errors(c: TrainConfig) -> Iterator[str]:
    """Text with null characters, or that is not UTF-8: it would fail only when a file is written.

    Python keeps bytes of arguments that are not UTF-8 as lone surrogates.
    """
    for name, value in vars(c).items():
        for text in value if isinstance(value, tuple) else [value]:
            if not isinstance(text, str):
                continue
            writable = text.encode(errors="replace").decode().replace("\0", "")
            if writable != text:
                fault = "has a null character" if "\0" in text else "is not UTF-8 text"
                yield f"--{name} {fault}: {text[:80]!a}. Give the file or folder another name."


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


_RULES = (
    _text_errors,
    _quantization_conflicts,
    _adapter_conflicts,
    _objective_conflicts,
    _rollout_conflicts,
    _data_conflicts,
    _place_errors,
    _run_conflicts,
)
