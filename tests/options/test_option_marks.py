"""What an option may do besides its value: written down here once more, so that no change of it goes unseen.

A run in a folder is continued if these options are as they were: a name that comes or goes changes which runs are.
"""

import ast
import dataclasses
import math
from typing import Any

import pytest

from fsdp_qlora.config.conflicts import check
from fsdp_qlora.config.marks import MAY_DIFFER, NO_EFFECT, OF_ADAPTER, PER_NODE, Limit, Mark, of_quantizer
from fsdp_qlora.config.options import TrainConfig, marks_of, names_marked
from fsdp_qlora.config.train_types import TRAIN_TYPES
from tests.tiny import ROOT

pytestmark = pytest.mark.quick

NAMES = [field.name for field in dataclasses.fields(TrainConfig)]

IDENTITY = """
    precision train_type lora_rank lora_alpha lora_dropout lora_target_modules lora_target_parameters modules_to_save
    use_rslora init_lora_weights rank_pattern alpha_pattern context_length num_epochs max_steps lr lr_scheduler
    warmup_ratio warmup_steps optimizer loraplus_lr_ratio wd apply_gradient_clipping grad_norm seed deterministic
    quant_type double_quant n_bits group_size int8_threshold quant_storage dataset_samples streaming shuffle_buffer
    dataset_format eval_fraction
"""
DIFFERS_BETWEEN_NODES = """
    model_name dataset prompt_template eval_dataset sample_prompts output_dir profiling_output
    overwrite_output_dir quant_cache loading_buffer_mib world_size nproc_per_node master_addr master_port verbose resume
    mirror llama_pro_path adapter
"""


def test_the_options_that_make_a_run_this_run_are_those_of_before() -> None:
    assert [name for name in NAMES if name not in names_marked(MAY_DIFFER)] == IDENTITY.split()


def test_the_options_that_may_differ_between_nodes_are_those_of_before() -> None:
    assert set(names_marked(PER_NODE)) == set(DIFFERS_BETWEEN_NODES.split())


def test_only_what_may_differ_on_resume_may_differ_between_nodes_or_be_without_effect() -> None:
    assert {*names_marked(PER_NODE), *names_marked(NO_EFFECT)} <= set(names_marked(MAY_DIFFER))


QUANTIZERS = sorted({kind.quantizer for kind in TRAIN_TYPES.values() if kind.quantizer})
MARKS = {"MAY_DIFFER": MAY_DIFFER, "PER_NODE": PER_NODE, "OF_ADAPTER": OF_ADAPTER, "NO_EFFECT": NO_EFFECT}


def test_every_mark_is_on_a_field_and_every_field_has_marks_that_are_known() -> None:
    known = {*MARKS.values(), *map(of_quantizer, QUANTIZERS)}
    used = {mark for name in NAMES for mark in marks_of(name) if not isinstance(mark, Limit)}
    assert used == known
    assert all(isinstance(mark, Mark) for mark in used)
    assert all(sum(isinstance(mark, Limit) for mark in marks_of(name)) <= 1 for name in NAMES)


def test_every_mark_is_asked_for_by_the_code_that_acts_on_it() -> None:
    sources = [path.read_text() for path in (ROOT / "fsdp_qlora").rglob("*.py")]
    calls = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    asked = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "names_marked"}
    assert {*MARKS, "of_quantizer(quantizer)"} == asked


# Options -> values that are accepted, and values that are refused.
LIMITS: dict[str, tuple[list[Any], list[Any]]] = {
    "world_size nproc_per_node max_steps": ([-1, 1, 8], [-2, 0]),
    "master_addr model_name quant_cache dataset output_dir resume profiling_output": (["x"], [""]),
    "lora_target_modules log_to": ([("x",)], [()]),
    "master_port": ([0, 65535], [-1, 65536]),
    "n_bits": ([8, 4, 3, 2], [1, 5, 16]),
    "group_size": ([32, 96], [0, 16, 48]),
    "int8_threshold wd": ([0.0, 6.0], [-1.0, math.inf, math.nan]),
    "lora_rank batch_size loading_buffer_mib gradient_accumulation_steps num_epochs save_total_limit "
    "active_steps profiling_frequency shuffle_buffer": ([1, 2], [0, -1]),
    "context_length": ([2], [1, 0]),
    "warmup_steps": ([-1, 0], [-2]),
    "eval_steps early_stopping show_samples save_steps wait_steps profiling_warmup_steps repeat": ([0, 1], [-1]),
    "save_minutes hang_minutes": ([0.0, 0.5, math.inf], [-0.5, math.nan]),
    "lora_dropout eval_fraction": ([0.0, 0.99], [-0.1, 1.0, math.nan]),
    "warmup_ratio max_bad_rows": ([0.0, 1.0], [-0.1, 1.01, math.nan]),
    "lr max_hours max_cost_usd price_per_hour": ([None, 1e-9], [0.0, -1.0, math.inf, math.nan]),
    "grad_norm loraplus_lr_ratio lora_alpha": ([0.1], [0.0, math.inf, math.nan]),
    "seed": ([0, 2**32 - 1], [-1, 2**32]),
    "dataset_samples": ([None, 1], [0]),
    "recompute": (["auto", "none", 0, 7], [-1]),
}


@pytest.mark.parametrize("names", LIMITS)
def test_a_value_within_the_limits_is_accepted_and_one_beyond_is_refused(names: str) -> None:
    accepted, refused = LIMITS[names]
    for name in names.split():
        assert not [value for value in accepted if is_refused(name, value)], name
        assert [value for value in refused if is_refused(name, value)] == refused, name


def test_options_without_a_limit_take_every_value() -> None:
    probes: dict[type, list[Any]] = {str: ["", "x"], int: [-1, 0, 2**40], float: [-1.0, math.nan]}
    for name in set(NAMES) - set(" ".join(LIMITS).split()) - {"train_type"}:
        values = probes.get(type(getattr(TrainConfig(), name)), [])
        assert not [value for value in values if is_refused(name, value)], name


def is_refused(name: str, value: object) -> bool:
    return any(line.startswith(f"--{name} must be ") for line in check(TrainConfig(**{name: value})))
