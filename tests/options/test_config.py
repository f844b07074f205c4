"""Options: where values come from, what is refused and how it is said."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest

from fsdp_qlora.checkpoint.run_folder import StartRequest, find_differences
from fsdp_qlora.commands.run_config import make_train_config, parse_train_config
from fsdp_qlora.config.marks import MAY_DIFFER, PER_NODE, of_quantizer
from fsdp_qlora.config.objectives import Objective, Reference
from fsdp_qlora.config.options import TrainConfig, names_marked, option_types
from fsdp_qlora.config.other_names import OLDER, OTHER_NAMES, advise
from fsdp_qlora.config.text import option_help, resolved_options, resolved_yaml
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.utils.errors import UserError

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
NAMES = [field.name for field in dataclasses.fields(TrainConfig)]


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as raised:
        parse_train_config(list(argv))
    return str(raised.value)


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


GRPO = "--objective grpo --rewards exact_match"
MODULES = {"lora_target_modules": ("q_proj", "v_proj")}
# Case -> flags, the YAML file, and the options that differ from the defaults.
ACCEPTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "flags win over YAML, and YAML over the defaults": (
        "--seed 8 --batch_size=3 --max_steps -1",
        "lr: 2e-4\nsave_model: no\nlora_target_modules: [q_proj, v_proj]\nseed: 7\nmirror: null\n",
        {"lr": 2e-4, "save_model": False, "seed": 8, "batch_size": 3, "max_steps": -1, **MODULES},
    ),
    "a list with commas": ("--lora_target_modules q_proj,v_proj", "", MODULES),
    "a list with spaces": ("--lora_target_modules q_proj v_proj", "", MODULES),
    "a list with both": ("--lora_target_modules q_proj, v_proj", "", MODULES),
    "a list of choices": ("--log_to wandb,jsonl", "", {"log_to": ("wandb", "jsonl")}),
    "an empty list": ("--add_tokens none", "", {"add_tokens": ()}),
    "an empty list in YAML": ("", "add_tokens: []\n", {"add_tokens": ()}),
    "flags win over older names in a file": (
        "--use_gradient_checkpointing true --group b",
        "low_memory: true\nuse_gradient_checkpointing: false\nname: a\nseed: 1\n",
        {"recompute": "all", "log_to": ("name=a", "group=b"), "seed": 1},
    ),
    "switches without a value": (
        "--use_cpu_offload --deterministic",
        "",
        {"use_cpu_offload": True, "deterministic": True},
    ),
    "choices in any case": (
        "--train_type HQQ_LoRA --optimizer Paged-AdamW-8bit --log_to STDOUT",
        "",
        {"train_type": "hqq_lora", "optimizer": "paged_adamw_8bit", "log_to": ("stdout",)},
    ),
    "dashes in names, and null for the default": (
        "",
        "lora-rank: 8\nmax_steps: null\noutput_dir:\nlr: ~\n",
        {"lora_rank": 8},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_flags_and_yaml_are_read_as_the_options_they_mean(case, yaml_file):
    given, text, options = ACCEPTED[case]
    words = given.split()
    argv = [*words[:2], *(["--config", yaml_file(text)] if text else []), *words[2:]]
    assert parse_train_config(argv) == TrainConfig(**options)


def test_options_from_python_are_read_as_those_of_a_file():
    assert make_train_config(None, {"add_tokens": []}).add_tokens == ()


@pytest.mark.parametrize("words", [[","], [" "], [""], [",,"], [", ", ""]], ids=repr)
def test_a_list_without_a_value_is_refused(words):
    lists = [name for name, hint in option_types().items() if get_origin(hint) is tuple]
    assert {"add_tokens", "rewards", "columns"} < {*lists}
    for name in lists:
        assert f"--{name}: expected one value or more" in error_of(f"--{name}", *words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n  \n", "has no token"),
        (": begin to reason\n", "a description without its token"),
        ("<a>: begin\n<a>: end\n", "<a> has two descriptions"),
    ],
)
def test_a_file_without_usable_new_tokens_is_refused(text, said, tmp_path):
    (tmp_path / "tokens.txt").write_text(text)
    assert said in error_of("--add_tokens", str(tmp_path / "tokens.txt"))


def test_new_tokens_that_are_named_twice_are_added_once(tmp_path):
    (tmp_path / "tokens.txt").write_text("\ufeff<a>\r\n\r\n<b>: begin\r\n<a>\r\n", encoding="utf-8")
    config = parse_train_config(["--add_tokens", str(tmp_path / "tokens.txt"), "<b>: begin", "<c>"])
    assert config.add_tokens == ("<a>", "<b>: begin", "<c>")


def test_the_command_of_the_2024_readme_is_accepted():
    command = (
        "--model_name meta-llama/Llama-2-70b-hf --batch_size 2 --context_length 512 --precision "
        "bf16 --train_type qlora --use_gradient_checkpointing true --use_cpu_offload true "
        "--dataset alpaca --reentrant_checkpointing true --log_to wandb --master_port 12355 "
        "--world_size -1"
    )
    notes: list[str] = []
    config = parse_train_config(command.split(), notes=notes)
    assert config.use_cpu_offload and config.batch_size == 2 and config.recompute == "all"
    older = {"--reentrant_checkpointing", "--master_port", "--use_gradient_checkpointing"}
    assert {note.split()[0] for note in notes} == older


# Options of earlier versions, what they are now, and the notes.
OLDER_OPTIONS = {
    "--low_memory true": ({}, ["--low_memory is no longer needed: weights are always streamed"]),
    "--llama_pro_path pro": ({"model_name": "pro"}, ["--llama_pro_path is now --model_name pro."]),
    "--warmup_steps -1 --world_size -1": ({}, []),
    "--world_size 2": ({"nproc_per_node": 2}, ["--world_size is now --nproc_per_node 2."]),
    "--use_gradient_checkpointing off": ({"recompute": "none"}, ["is now --recompute none."]),
    "--profile --with_stack": (
        {},
        ["--profile is no longer needed", "--with_stack is no longer needed"],
    ),
    "--warmup_steps 1": ({"warmup": 1}, ["--warmup_steps is now --warmup 1."]),
    "--apply_gradient_clipping true --grad_norm 2": ({"grad_norm": 2.0}, []),
    "--apply_gradient_clipping no": (
        {"grad_norm": 0.0},
        ["--apply_gradient_clipping is now --grad_norm 0."],
    ),
    "--log_to wandb --project_name a --name b,c --entity d": (
        {"log_to": ("wandb", "project=a", "name=b c", "entity=d")},
        ["--project_name is now --log_to project=a.", "--log_to name=b c.", "--log_to entity=d."],
    ),
    "--profile_memory": ({"verbose": True}, ["--profile_memory is now --verbose true."]),
    "--use_activation_cpu_offload true --recompute auto": (
        {"recompute": "offload"},
        ["is now --recompute offload."],
    ),
    "--master_addr 10.0.0.1 --master_port 1": (
        {},
        ["--master_addr is no longer needed", "--master_port is no"],
    ),
}


@pytest.mark.parametrize("given", OLDER_OPTIONS)
def test_older_names_of_options_are_read_as_what_they_mean_now(given, yaml_file):
    options, lines = OLDER_OPTIONS[given]
    pairs = [words.split() for words in given.removeprefix("--").split(" --")]
    as_yaml = "".join(f"{name}: {' '.join(value) or 'true'}\n" for name, *value in pairs)
    for argv in (given.split(), ["--config", yaml_file(as_yaml)]):
        notes: list[str] = []
        assert parse_train_config(argv, notes=notes) == TrainConfig(**options)
        assert all(line in note for line, note in zip(lines, notes, strict=True))
    from_python = {name: " ".join(value) or True for name, *value in pairs}
    assert make_train_config(None, from_python) == TrainConfig(**options)


def test_the_objective_decides_defaults_that_records_have_in_numbers(yaml_file):
    for argv, beta, loss_type in (
        ("", 0.1, "sigmoid"),
        ("--objective kto", 0.1, "sigmoid"),
        (GRPO, 0.0, "dapo"),
    ):
        config = parse_train_config(argv.split())
        request = StartRequest(resolved_options(config), names_marked(MAY_DIFFER))
        stored = request.options | {"beta": beta, "loss_type": loss_type}
        assert find_differences({"options": stored}, {}, request) == []
        again = parse_train_config(["--config", yaml_file(resolved_yaml(config))])
        assert resolved_options(again) == stored


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"objective": "sft"}, Reference.NONE),
        ({"objective": "simpo"}, Reference.NONE),
        ({"objective": "dpo"}, Reference.BASE),
        ({"objective": "dpo", "adapter": "folder"}, Reference.START),
        ({"objective": "dpo", "init_lora_weights": "loftq"}, Reference.START),
        ({"objective": "grpo"}, Reference.NONE),
        ({"objective": "grpo", "beta": 0.04}, Reference.BASE),
        ({"objective": "distill"}, Reference.BASE),
        ({"objective": "distill", "teacher": "another"}, Reference.NONE),
    ],
)
def test_an_objective_says_which_model_it_compares_with(options, reference):
    config = TrainConfig(**options)
    assert config.objective_row.reference(config) is reference
    config = dataclasses.replace(config, precompute_reference=True)
    assert config.objective_row.reference_beside(config) is Reference.NONE


@pytest.mark.parametrize("word", ["off", "no", "False", "off:replace"])
def test_a_run_that_is_not_resumed_is_said_in_words_of_yaml(word, yaml_file):
    assert parse_train_config(["--config", yaml_file(f"resume: {word}")]).start_from == "off"


@pytest.mark.parametrize(
    ("train_type", "rate"), [("qlora", 2e-4), ("bnb_llama_pro", 2e-4), ("full", 1e-5)]
)
def test_the_learning_rate_follows_the_train_type_and_is_recorded(train_type, rate, yaml_file):
    config = parse_train_config(["--train_type", train_type])
    assert config.objective_row.decided(config).lr == rate
    assert parse_train_config(["--config", yaml_file(resolved_yaml(config))]).lr == rate


def test_the_resolved_options_are_accepted_back(yaml_file):
    argv = "--lr 1e-5 --log_to wandb,name=run:1,group=#x --lora_target_modules q_proj k_proj"
    config = parse_train_config([*argv.split(), "--dataset", "/data/ä.json"])
    text = resolved_yaml(config)
    assert all(f"\n{name}: " in f"\n{text}" or f"\n{name}:\n" in f"\n{text}" for name in NAMES)
    decided = config.objective_row.decided(config)
    config = dataclasses.replace(config, **decided._asdict())  # as the text has them
    assert parse_train_config(["--config", yaml_file(text)]) == config
    of_2024 = text.replace("nproc_per_node: -1\n", "world_size: 2\n")
    for given, ranks in (([], 2), (["--world_size", "3"], 3)):
        argv = [*given, "--config", yaml_file(of_2024)]
        assert parse_train_config(argv).nproc_per_node == ranks


def test_unknown_names_are_all_reported_with_the_closest(yaml_file):
    path = yaml_file("lrr: 1\nseed: 1\nbatchsize: 4\nlearning_rate: 1\n")
    message = error_of("--config", path, "--contxt_length", "8", "--train-tpye=full")
    assert f'{path}, line 1: unknown key "lrr"; did you mean "lr"?' in message
    assert f'{path}, line 3: unknown key "batchsize"; did you mean "batch_size"?' in message
    assert 'line 4: unknown key "learning_rate"; did you mean "lr"?' in message
    assert "Unknown option --contxt_length; did you mean --context_length?" in message
    assert "Unknown option --train_tpye; did you mean --train_type?" in message


# Words of a command line -> what is said.
BAD_WORDS = {
    "--train_type qlroa": "did you mean qlora? Choices: full, lora, qlora",
    "--log_to tqdm,wnadb": "did you mean wandb?",
    "--lr abc": "--lr: expected a number, got 'abc'",
    "--batch_size 1.5": "--batch_size: expected a whole number, got '1.5'",
    "--save_model maybe": "--save_model: expected true or false, got 'maybe'",
    "--resume": "--resume: expected a value",
    "--no-save_model": "Unknown option --no_save_model; give --save_model false.",
    "--load_in_4bit true": "did you mean --train_type qlora?",
    "--sample_packing true": "Unknown option --sample_packing; did you mean --batching packed?",
    "--max_steps 0": "--max_steps must be -1",
    "--wd nan": "--wd must be a finite number, 0 or more",
    "--recompute -1": "--recompute must be 0 or more if it is a number",
    "--lora_dropout 1": "--lora_dropout must be 0 or more and below 1",
    "--lora_target_modules none": "--lora_target_parameters must name weights of experts",
    "--lora_target_modules all q_proj": "all cannot be combined",
    "--train_type full --lora_rank 8": "leave out --lora_rank",
    "--train_type lora --quant_type fp4": (
        "lora does not take --quant_type, which is for qlora, bnb_dora"
    ),
    "--train_type lora --allow_unquantized true": "leave out --allow_unquantized",
    "--n_bits 3": "qlora does not take --n_bits, which is for hqq_lora",
    "--objective simpo --precompute_reference true": "simpo has no reference model: leave out",
    "--objective dpo --loss_type dapo": (
        "--objective dpo has no --loss_type dapo. Give one of sigmoid, hinge, robust,"
    ),
    "--objective dpo --beta 0": "--beta must be above 0 for --objective dpo",
    "--objective dpo --num_generations 4": "dpo does not take --num_generations, which is for grpo",
    "--objective grpo": "--objective grpo needs --rewards: functions that score the completions",
    f"{GRPO} --label_smoothing 0.1": "does not take --label_smoothing",
    f"{GRPO} --rollout_url localhost:8000": "Give a URL such as http://localhost:8000",
    "--objective grpo --rewards number --rollout_url http://a --train_type dora": (
        "servers load only LoRA adapters"
    ),
    f"{GRPO} --eval_fraction 0.1": "cannot be used with --eval_fraction without --eval_rewards",
    f"{GRPO} --eval_rewards number": "--eval_rewards score answers to held-out rows: give",
    f"{GRPO} --eval_rewards number --eval_fraction 0.1 --best_by loss": "no held-out loss",
    "--best_by reward --eval_fraction 0.1": "--best_by reward is a score: it needs --eval_rewards",
    "--max_completion_length 64 --eval_fraction 0.1": "does not take --max_completion_length",
    f"{GRPO} --train_type full": "it cannot be used with --train_type full",
    "--merge_aware true --lora_dropout 0.1": "so it has no --lora_dropout",
    "--merge_aware true --train_type bnb_dora": "is DoRA: take qlora",
    "--merge_aware true --train_type int8_lora": "int8_lora does not train on as they are",
    "--merge_aware true --quant_type nvfp4": "quantize the base before with fsdp-qlora quantize",
    "--merge_aware true --train_type lora": "lora does not train on as they are",
    "--merge_aware true --train_type full": "has no adapter: leave out --merge_aware",
    "--merge_aware true --init_lora_weights loftq": "leave it at true",
    "--merge_aware true --lora_target_modules vision": "layers that compute images are not",
    "--merge_aware true --modules_to_save lm_head": "leave out --modules_to_save",
    "--merge_aware true --add_tokens <a>": "leave out --add_tokens",
    f"{GRPO} --merge_aware true --rollout_url http://a": "leave out --rollout_url",
    "--train_type hqq_lora --n_bits 5": "--n_bits must be 8, 4, 3 or 2, but is 5",
    "--train_type hqq_lora --group_size 48": "--group_size must be a multiple of 32, but is 48",
    "--eval_fraction 0.1 --eval_dataset x.json": "Give one",
    "--eval_steps 5": "--eval_steps needs rows",
    "--eval_tasks arc_easy": "--eval_tasks are measured at each evaluation: give --eval_fraction",
    "--packing true": "Unknown option --packing; did you mean --batching packed?",
    "--grad_norm 2 --apply_gradient_clipping false": (
        "is the older name of grad_norm, which is given too"
    ),
    "--save_steps 500": "Unknown option --save_steps; did you mean --save_every?",
    "--overwrite_output_dir true": "did you mean --resume auto:replace?",
    "--kto_desirable_weight 2": "kto_weights takes both weights, the desirable one first.",
    "--dry_run samples=x": "--dry_run must be true, false, samples or samples=NUMBER",
    "--save_every 15s": (
        "--save_every must be minutes such as 15m, steps such as 500, both, or none, but is"
    ),
    "--epsilon 0.1,0.2,0.3": "--epsilon must be one or two finite numbers",
    "--objective grpo --rewards number --rollout_ahead true": "give --rollout_url, too.",
    "--kto_weights -1": "--kto_weights must be one or two finite numbers",
    "--warmup 1.5": "--warmup must be a share from 0.0 to 1.0, or a number of steps, but is 1.5",
    "--log_to wandb,run=1": "'run=1' is not a choice",
    "--use_gradient_checkpointing maybe": (
        "--use_gradient_checkpointing: expected true or false, got 'maybe'"
    ),
    "--recompute 3 --use_gradient_checkpointing true": "Give one",
    "--recompute some": "--recompute: expected auto|all|none|offload|host|INT, got 'some'",
    "--use_cpu_offload maybe": "--use_cpu_offload: expected auto|true|false|INT, got 'maybe'",
    "--use_cpu_offload -2": "--use_cpu_offload must be above 1 if it is a number",
    "--batch_size 2 3": "--batch_size: expected one value, got 2: 2 3",
    "train": "Unexpected argument 'train'",
    "--config missing.yaml": "--config missing.yaml: cannot read it",
    "--config /dev/zero": "--config /dev/zero: cannot read it: it is not a file",
    "--output_dir out\udcff": r"--output_dir is not UTF-8 text: 'out\udcff'",
    # Words of other trainers.
    "--sequence_parallel_degree 2": "did you mean --context_parallel_size?",  # axolotl
    "--sequence_parallel_size 2": "did you mean --context_parallel_size?",  # ms-swift
    "--context_parallel_dim 2": "did you mean --context_parallel_size?",  # torchtune
    "--dp_shard_size 2": "see sharding_strategy",
    "--quant_bits 4": "did you mean --train_type qlora?",
    "--full_finetuning true": "did you mean --train_type full?",
    "--split_dataset_ratio 0.01": "did you mean --eval_fraction?",
    "--attn_impl flash_attn": "did you mean --attn_implementation flash_attention_2?",
    "--random_state 3407": "did you mean --seed?",
    "--rlhf_type dpo": "did you mean --objective?",
    "--adapter qlora": "did you mean --train_type qlora?",
    "--load_in_8bit false": "that is the default here",
    "--deepspeed x.json": "the model is sharded without a config",
    "--optim adamw_torch_fused": "did you mean --optimizer fused_adamw?",
    "--push_to_hub --lrr 1": "did you mean --lr?",
    "rows.jsonl": "Did you mean --dataset rows.jsonl?",
    "demo": "Did you mean --config demo?",
}


@pytest.mark.parametrize(("words", "says"), BAD_WORDS.items())
def test_bad_input_on_the_command_line_says_what_to_do(words, says):
    assert says in error_of(*words.split())


@pytest.mark.parametrize(
    "place",
    [
        "s3://bucket/run",
        "https://user:PaSs@host/run",
        "sftp:/host/run",
        "file:///data/run",
        "s3:bucket/run",
        ":sftp,host=box,user=me,pass=PaSs:run",
        "me:PaSs@box:run",
        "box:/data/run",
        "gs:",
        ":local:/data",
    ],
)
def test_urls_are_not_taken_for_folders_and_hide_passwords(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("mirror", "output_dir", "resume", "quant_cache"):
        if (option, place[:5]) == ("mirror", "s3://"):
            continue
        error = error_of(f"--{option}", place)
        assert f"--{option} must be a local folder" in error and "hf:OWNER/NAME" in error
        assert "PaSs" not in error
    for option in ("mirror", "output_dir", "resume"):
        for folder in ("./a:b", "/a:b", "../s3:/x", "~/a:b", "runs/10:30", "C"):
            parse_train_config([f"--{option}", folder])
    for known in (
        *("hf:owner/name", "hf://owner/name", "s3://bucket/run"),
        *("gs://bucket/run", "sftp://user:PaSs@host/run"),
    ):
        parse_train_config(["--mirror", known])
    for unknown in ("rclone:s3:bucket", "hf:name", "s3://", "hf:a:PaSs@owner/name"):
        assert "PaSs" not in error_of("--mirror", unknown)


# A YAML file -> what is said of it.
BAD_FILES = {
    "train_type: qlroa": "line 1: train_type: 'qlroa' is not a choice; did you mean qlora?",
    "\nlr: abc": "line 2: lr: expected a number, got 'abc'",
    "seed: [1, 2]": "line 1: seed: expected one value, got 2: 1 2",
    "seed: 1\nseed: 2": "line 2: seed is already given in line 1",
    "lr:\n  peak: 1": "line 1: lr expects a value or a list of values; options are not nested",
    "- seed": "expected lines of the form `option: value`",
    "seed: 1\nname: [a, b\n": "line 3: not valid YAML",
    "seed: " + "[" * 900 + "]" * 900: "options are not nested",
}


@pytest.mark.parametrize(("text", "says"), BAD_FILES.items())
def test_bad_input_in_the_yaml_file_names_file_line_and_key(text, says, yaml_file):
    path = yaml_file(text)
    message = error_of("--config", path)
    assert path in message
    assert says in message


@pytest.mark.parametrize("lines", ["key{}: 1\n", "lr: 1\n", "seed{}: {}\n"])
def test_a_file_of_nonsense_is_refused_in_a_screenful(lines, yaml_file):
    text = "".join(lines.format(number, number) for number in range(20_000))
    assert len(error_of("--config", yaml_file(text)).splitlines()) < 30
    assert len(error_of("--config", yaml_file("seed: " + "9" * 100_000))) < 1200


def test_every_other_name_stands_for_an_option_and_its_value():
    for other, option in OTHER_NAMES.items():
        assert option in (*NAMES, *OLDER)
        for value in ("true", "false", "4", "8", "auto", "adamw_torch", "bfloat16"):
            found = advise(other, value)
            if found and found.value:
                parse_train_config([f"--{found.option}", found.value])


def test_wrong_values_ranges_and_combinations_are_reported_together(yaml_file):
    argv = "--batch_size -1 --lora_rank 0 --lr abc --eval_fraction 2 --lrr 3"
    message = error_of(*argv.split())
    assert message.startswith("5 options are wrong")
    assert all(name in message for name in argv.split()[::2])
    argv = "--batch_size 0 --num_epochs 0 --train_type full --lora_rank 8 --eval_steps 3"
    message = error_of(*argv.split())
    assert all(name in message for name in ("batch_size", "num_epochs", "lora_rank", "eval_steps"))
    # Even where a flag wins.
    message = error_of("--config", yaml_file("lr: abc"), "--lr", "1e-4")
    assert "line 1: lr: expected a number" in message


def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "hqq" else find(name)
    )
    assert "hqq_lora needs the package hqq: pip install hqq" in error_of("--train_type", "hqq_lora")


def test_help_lists_all_options_and_group_help_its_own(capsys):
    groups = option_help()
    helps = {name: text for group in groups.values() for name, text in group.items()}
    assert list(helps) == NAMES and all(text.endswith(".") for text in helps.values())
    for text in helps.values():
        assert not re.match("(Of|As of|What|Those|Where|How) ", text)
    for words, names in (([], helps), (["data"], groups["data"])):
        with pytest.raises(SystemExit):
            parse_train_config(["--help", *words])
        shown = capsys.readouterr().out
        # Since 3.13 Python names an option's value once, behind all its names.
        assert re.findall(r"^  --(\w+)[ ,]", shown, re.MULTILINE) == list(names)
        assert shown.count("(default:") == len(names)
        headings = re.findall(r"^(\w+):$", shown, re.MULTILINE)
        assert headings == (list(groups) if not words else ["data"])
        assert len(re.findall(r"^  fsdp-qlora train ", shown, re.MULTILINE)) == 3


def test_every_choice_has_its_row_in_the_table_it_selects_from():
    from fsdp_qlora.data.text.formats import FORMATS
    from fsdp_qlora.distributed.layout import SHARDING_STRATEGIES
    from fsdp_qlora.model.architecture.precision import PRECISIONS
    from fsdp_qlora.observability.metric_log import SINKS
    from fsdp_qlora.sharding.optimizer import OPTIMIZERS
    from fsdp_qlora.training.trainer import SCHEDULES

    hints = option_types()
    tables = {
        "train_type": TRAIN_TYPES,
        "precision": PRECISIONS,
        "sharding_strategy": SHARDING_STRATEGIES,
        "optimizer": OPTIMIZERS,
        "lr_scheduler": SCHEDULES,
        "dataset_format": FORMATS,
    }
    for name, table in tables.items():
        assert set(get_args(hints[name])) - {"auto"} == set(table), name
    sinks = get_args(get_args(hints["log_to"])[0])
    assert {name for name in sinks if not name.endswith("=")} == set(SINKS)


def test_a_group_of_options_is_a_dataclass_with_fields_of_their_names():
    @dataclasses.dataclass
    class Saving:
        enabled: bool
        total_limit: int
        seed: int = 9

    config = TrainConfig(seed=5)
    assert config.pick(Saving, prefix="save_", enabled=config.save_model) == Saving(True, 3, 5)
    with pytest.raises(AttributeError, match="enabled"):
        config.pick(Saving, prefix="save_")


def test_every_option_is_read():
    """An option that nothing reads is a promise that is not kept."""
    read: set[str] = set()
    for path in (ROOT / "fsdp_qlora").rglob("*.py"):
        text = path.read_text()
        uses_options = "TrainConfig" in text or "options.config[" in text
        if uses_options and path.parent.name != "config":
            parts = path.relative_to(ROOT).with_suffix("").parts
            read |= read_in(importlib.import_module(".".join(parts)))
    # The properties that combine options read them as `self`, an objective as `options`.
    for cls, name in ((TrainConfig, "self"), (Objective, "options")):
        for node in ast.walk(ast.parse(inspect.getsource(cls))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name:
                read.add(node.attr)
    assert sorted(set(NAMES) - read) == []


def read_in(module: ModuleType) -> set[str]:
    """The options that a module reads of a config."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Attribute() if ast.unparse(node.value) in ("config", "self.config"):
                found.add(node.attr)
            case ast.Subscript() if ast.unparse(node.value) == "options.config":
                found.add(ast.literal_eval(node.slice))
            case ast.Call() if ast.unparse(node.func) in ("config.pick", "self.config.pick"):
                found |= picked(node, module)
            case ast.Call() if ast.unparse(node) == "names_marked(of_quantizer(quantizer))":
                for kind in TRAIN_TYPES.values():
                    found |= {*names_marked(of_quantizer(kind.quantizer))}
    return found


def picked(call: ast.Call, module: ModuleType) -> set[str]:
    """The options that `config.pick(Class, prefix="...", given=...)` in a module reads by their
    names.
    """
    keywords = {word.arg: word.value for word in call.keywords}
    prefix = ast.literal_eval(keywords.pop("prefix")) if "prefix" in keywords else ""
    fields = dataclasses.fields(getattr(module, ast.unparse(call.args[0])))
    names = {field.name for field in fields} - set(keywords)
    return {prefix + name if prefix + name in NAMES else name for name in names}


# --- marks: written down here once more, so that no change of them goes unseen ---

# A run in a folder is continued if these options are as they were.
IDENTITY = """
    train_type precision quant_type double_quant n_bits group_size int8_threshold dataset_samples
    dataset_format context_length shuffle drop_duplicates eval_fraction objective lr num_epochs
    max_steps lr_scheduler warmup optimizer wd grad_norm neftune_alpha best_by seed deterministic
    lora_rank lora_alpha lora_dropout lora_target_modules lora_target_parameters modules_to_save
    add_tokens use_rslora init_lora_weights merge_aware rank_pattern alpha_pattern loraplus_lr_ratio
    beta loss_type label_smoothing sft_weight simpo_gamma kto_weights rating_threshold teacher
    teacher_adapter top_k num_generations max_completion_length temperature scale_rewards epsilon
    num_iterations rollout_ahead
"""


def test_options_in_a_runs_identity_are_unchanged():
    assert [name for name in NAMES if name not in names_marked(MAY_DIFFER)] == IDENTITY.split()


def test_only_what_may_differ_on_resume_may_differ_between_nodes():
    assert set(names_marked(PER_NODE)) <= set(names_marked(MAY_DIFFER))
