"""Ranks that share the tokens of rows in layers with a convolution and a state, which one rank
hands to the next.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from fsdp_qlora.data.batches.micro_batch import describe_documents
from fsdp_qlora.distributed.context import ContextGroup
from fsdp_qlora.model.architecture.token_mixers import (
    ByDocument,
    can_continue,
    keep_documents_apart,
    pass_documents,
)
from tests.helpers.metrics import read_metrics
from tests.helpers.rounding import SGD
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import ROOT, all_slow_but, on_ranks, train_ok
from tests.parity.test_hybrids import HYBRIDS, TABLE
from tests.preferences.pairs import make_pairs

RANKS = 3
# One document on all ranks; documents that end where parts do; pieces of a token, and shorter than
# a convolution.
DOCUMENTS = [[72], [24, 24, 24], [23, 26, 23], [10, 36, 1, 1, 24], [71, 1]]
SHARED = [family for family, hybrid in HYBRIDS.items() if hybrid.apart and family != "jamba"]
ALIKE = {*SHARED} - {"qwen3_5_text", "lfm2"}


def _compare(folders: list[Path]) -> int:
    """Whether layers give what each document gives alone, and get its gradients, where three ranks
    share a row.
    """
    dist.init_process_group("gloo")
    context = ContextGroup(RANKS, dist.get_rank(), dist.group.WORLD)
    for folder, (number, lengths) in itertools.product(folders, enumerate(DOCUMENTS)):
        if number == 0:
            model = AutoModelForCausalLM.from_pretrained(folder)
            keep_documents_apart(model)
            layer = next(
                module
                for module in model.modules()
                if isinstance(vars(module).get("forward"), ByDocument)
            )
        by_document: Any = layer.forward
        assert can_continue(layer), folder
        layer.zero_grad()
        x, weights = torch.randn(2, 1, sum(lengths), 64, generator=torch.Generator().manual_seed(0))
        alone = [
            by_document.layer_forward(document)
            for document in x.requires_grad_().split(lengths, dim=1)
        ]
        expected = torch.cat(alone, dim=1)
        gradients = torch.autograd.grad((expected * weights).sum(), [x, *layer.parameters()])
        own = context.own(sum(lengths))
        part = x[:, own].detach().requires_grad_()
        _, kwargs = pass_documents(
            [by_document], layer, (), describe_documents(lengths) | {"context_group": context}
        )
        found = (
            checkpoint(layer, part, use_reentrant=False, **kwargs)
            if number % 2
            else layer(part, **kwargs)
        )
        (found * weights[:, own]).sum().backward()
        assert _is_near(found, expected[:, own]) and _is_near(part.grad, gradients[0][:, own]), (
            folder,
            lengths,
        )
        for parameter, gradient in zip(layer.parameters(), gradients[1:], strict=True):
            dist.all_reduce(parameter.grad)
            assert _is_near(parameter.grad, gradient), (folder, lengths)
    dist.destroy_process_group()
    return 0


def _is_near(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    # in float32, and the gradients of A_log are small differences of large terms
    assert found is not None
    return bool((found - expected).norm() <= 1e-4 * expected.norm())


@pytest.mark.parametrize(
    "families", [["qwen3_5_text", "lfm2"], pytest.param([*ALIKE], marks=pytest.mark.nightly)]
)
def test_a_rank_goes_on_from_the_state_of_the_rank_before(families, models, tmp_path):
    folders = [models(family, **HYBRIDS[family].shape) for family in families]
    statuses, output = on_ranks(RANKS, _compare, (folders,), tmp_path)
    assert statuses == [0] * RANKS, output[-4000:]


def test_the_documentation_names_the_hybrids_that_ranks_share():
    rows = re.findall(
        r"^\| (.+) \| `\w+` \| padding-free \| yes",
        (ROOT / "docs/models.md").read_text(),
        re.M,
    )
    stated = {family for families in rows for family in families.split(", ")}
    assert stated == {
        family.removesuffix("_text") for family, row in TABLE.items() if row.apart
    } - {"jamba"}


# Name -> (family, its ranks that share rows, options, the largest difference from one rank).
RUNS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], float]] = {
    "qwen3_5_text, recomputed": ("qwen3_5_text", (2,), {"recompute": "all", "max_steps": 2}, 1e-5),
    "lfm2 in 16 bits": ("lfm2", (2,), {"precision": "bf16", "max_steps": 2}, 2e-2),
    "answers in pairs": (
        "qwen3_5_text",
        (2,),
        {"objective": "dpo", "beta": 1.0, "max_steps": 2},
        1e-5,
    ),
    **{family: (family, (2, 4), {"max_steps": 10}, 1e-5) for family in SHARED},
}


@pytest.mark.parametrize("case", all_slow_but("qwen3_5_text, recomputed", RUNS, nightly=SHARED))
def test_hybrids_do_not_depend_on_context_parallelism(case, models, tmp_path):
    family, sizes, changed, allowed = RUNS[case]
    rows = make_pairs(40) if "objective" in changed else make_rows(40)
    options = {
        "model_name": models(family, **HYBRIDS[family].shape),
        "allow_unquantized": True,
        "lora_dropout": 0,
    }
    options |= {
        "dataset": write_rows(tmp_path / "rows.jsonl", rows),
        "batch_size": 2,
        "precision": "fp32",
    }
    options |= {"gradient_accumulation_steps": 2, **SGD, "lr": 0.02, **changed}
    found = []
    for size in (1, *sizes):
        said = train_ok(size, tmp_path / str(size), context_parallel_size=size, **options)
        numbers = read_metrics(tmp_path / str(size)) + read_metrics(
            tmp_path / str(size), "grad_norm"
        )
        adapter = load_file(tmp_path / str(size) / "adapter_model.safetensors")
        found.append(
            (
                torch.tensor(numbers),
                torch.cat([adapter[name].flatten() for name in sorted(adapter)]),
            )
        )
        shares = "ranks that share a row have one state for a document" in said
        assert shares == ("objective" in changed and size > 1)
    for numbers, adapter in found[1:]:
        assert (numbers / found[0][0] - 1).abs().max() < allowed
        assert (adapter - found[0][1]).norm() < allowed * found[0][1].norm()
