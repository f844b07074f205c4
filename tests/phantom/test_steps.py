"""What one optimizer step asks of the GPU and of the other ranks, counted on the stand-in: it equals a formula, and the
host waits at listed places only."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig

from fsdp_qlora.adapters.insert import LoraOptions
from fsdp_qlora.config.train_types import TRAIN_TYPES
from fsdp_qlora.model.models import find_blocks
from fsdp_qlora.model.precision import PRECISIONS
from fsdp_qlora.planning.build_model import LayerOptions, build_model
from tests.phantom.environment import run, subtract
from tests.reference import encode
from tests.tiny import flags, make_rows, write_rows

ROW, BATCH = make_rows(1)[0], 2  # all rows are equal, so that each micro-batch has as many tokens and targets
# float64 of each rank in a step: loss, norm, three flags of `control`, memory allocated and reserved
NUMBERS = 7
ADAPTER_TENSORS = 2 * 7 * 2  # of 2 blocks
PER_STEP = {"fsdp_qlora/ranks/distributed.py": 1}  # all ranks' numbers come back
# With padding transformers asks the device whether a mask is needed.
PER_PADDED_MICRO_BATCH = {"fsdp_qlora/training/head_loss.py": 1}


@pytest.fixture(scope="module")
def step(models, tmp_path_factory):
    """Counts of one optimizer step of qlora on rank 0: step(ranks, **options)."""
    model, folder = models(), tmp_path_factory.mktemp("steps")
    dataset = write_rows(folder / "rows.jsonl", [ROW] * 64)

    def summary(ranks, machines, settings, max_steps, options):
        run_folder = tmp_path_factory.mktemp("run")
        arguments = flags(
            output_dir=run_folder / "output",
            max_steps=max_steps,
            **{"train_type": "qlora", "batch_size": BATCH, "context_length": 256, "seed": 0, "lr_scheduler": "constant"}
            | {"quant_cache": "off", "log_to": "jsonl", "precision": "bf16", "save_minutes": 0, "warmup_steps": 0}
            | {"sharding_strategy": "full_shard", "recompute": "all", "model_name": model, "dataset": dataset}
            | options,
        )
        by_rank = {rank: {"GROUP_RANK": rank * machines // ranks} for rank in range(ranks)}
        settings = {"LOCAL_WORLD_SIZE": ranks // machines, **settings}
        ended = run(
            ["train.py", *arguments], run_folder, ranks=ranks, settings=settings, settings_of_rank=by_rank, summary=True
        )
        assert [rank.status for rank in ended] == [0] * ranks, ended[0].output[-4000:]
        return ended[0].summary

    def start(ranks, *, machines=1, settings=None, **options):
        with ThreadPoolExecutor() as both:
            more, less = both.map(lambda steps: summary(ranks, machines, settings or {}, steps, options), (3, 2))
        return subtract(more, less)

    return start


def count_collectives(step):
    found = Counter()
    for each in step["collectives"]:
        found[each["kind"], each["group_size"], each["bytes"]] += each["count"]
    return dict(+found)


def sizes(model_folder, shards):
    """Bytes that FSDP2 moves of the tiny model's parts: (embedding, blocks, adapters of blocks, head, norm).

    A gather carries frozen weights as they are stored and trained ones as 16-bit elements, and the rows of each tensor
    filled up to a multiple of the shards.
    """
    meta = build_model(
        AutoConfig.from_pretrained(model_folder),
        TRAIN_TYPES["qlora"],
        PRECISIONS["bf16"],
        torch.device("cpu"),
        LayerOptions(
            lora=LoraOptions(rank=16, alpha=32),
            quantizer={"quant_type": "nf4", "double_quant": True},
        ),
        attn_implementation="sdpa",
    )

    def gathered(module, trains=False):
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad == trains]
        rows = [-(-parameter.shape[0] // shards) * shards for parameter in parameters]
        widths = [p.numel() // p.shape[0] * (2 if trains else p.element_size()) for p in parameters]
        return sum(row * width for row, width in zip(rows, widths, strict=True))

    model = meta.model
    blocks = find_blocks(model)
    return (
        gathered(model.get_input_embeddings()),
        [gathered(block) for block in blocks],
        [gathered(block, trains=True) for block in blocks],
        gathered(model.get_output_embeddings()),
        gathered(model.model.norm),
    )


def looked_up(model_folder):
    """Bytes of the embedding's rows of a row's tokens, each distinct one once."""
    [(ids, _)] = encode(model_folder, [ROW])
    return 2 * AutoConfig.from_pretrained(model_folder).hidden_size * len(ids.unique())


def of_vocabulary(model_folder, shards):
    """What rank 0 exchanges of embedding and head in a micro-batch, in which all ranks have equal tokens."""
    config = AutoConfig.from_pretrained(model_folder)
    [(ids, labels)] = encode(model_folder, [ROW])
    distinct, own = set(ids.flatten().tolist()), range(-(-config.vocab_size // shards))
    found = Counter()
    here = 2 * config.hidden_size * sum(token in own for token in distinct)  # bf16
    everywhere = 2 * config.hidden_size * len(distinct)
    # A row for each distinct token, from the rank that has it.
    found["send", shards, here] += shards
    found["recv", shards, here] += 1
    found["recv", shards, everywhere - here] += 1
    # One chunk: hidden states and targets, maxima and sums of exponentials with the target's logit, gradients.
    tokens = shards * BATCH * int((labels != -100).sum())
    found["all_gather", shards, 2 * config.hidden_size * tokens] += 1
    found["all_gather", shards, 8 * tokens] += 1
    found["all_reduce", shards, 4 * tokens] += 1
    found["all_reduce", shards, 2 * 4 * tokens] += 1
    found["reduce_scatter", shards, 2 * config.hidden_size * tokens] += 1
    return found


def expect(model_folder, *, shards, replicas, micro_batches, reductions=1):
    """Collectives of one step, as (kind, ranks of the group, bytes) -> how many."""
    _, blocks, adapters, _, norm = sizes(model_folder, shards)
    found = Counter()
    for _ in range(micro_batches if shards > 1 else 0):
        found += of_vocabulary(model_folder, shards)
        found["all_gather", shards, norm] += 1
        for block in blocks:
            found["all_gather", shards, block] += 2  # forward, and backward for the recomputation
    for adapter in adapters:
        gradients = 2 * adapter  # float32
        if shards > 1:
            found["all_gather", shards, adapter] += reductions  # they stay until gradients are reduced
            found["reduce_scatter", shards, gradients] += reductions
        if replicas > 1:
            found["all_reduce", replicas, gradients // shards] += reductions
    found["all_gather", shards * replicas, NUMBERS * 8 * shards * replicas] += 1
    return dict(found)


@pytest.mark.parametrize(
    ("sharding_strategy", "ranks", "machines", "shards", "micro_batches"),
    # auto replicates what fits.
    [("full_shard", 2, 1, 2, 2), ("auto", 2, 1, 1, 1), ("hybrid_full_shard", 4, 2, 2, 1)],
)
def test_collectives_of_a_step_are_those_of_the_formula(
    step, models, sharding_strategy, ranks, machines, shards, micro_batches
):
    options = {"sharding_strategy": sharding_strategy, "gradient_accumulation_steps": micro_batches}
    found = count_collectives(step(ranks, machines=machines, **options))
    assert found == expect(models(), shards=shards, replicas=ranks // shards, micro_batches=micro_batches)


def test_gradients_are_reduced_in_each_micro_batch_if_there_is_no_memory_to_add_them_up(step, models):
    found = count_collectives(
        step(2, settings={"PHANTOM_GIB": 1}, gradient_accumulation_steps=2, use_cpu_offload=False)
    )
    assert found == expect(models(), shards=2, replicas=1, micro_batches=2, reductions=2)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "offload", [{}, {"use_cpu_offload": True, "use_activation_cpu_offload": True}], ids=["", "offload"]
)
def test_the_host_waits_once_and_only_inputs_and_numbers_are_copied_where_the_device_computes(
    step, models, offload, micro_batches
):
    # bitsandbytes' optimizers wait for each tensor.
    options = {"optimizer": "adamw_8bit", "gradient_accumulation_steps": micro_batches}
    counts = step(1, **offload, **options)
    found = Counter()
    for sync in counts["syncs"]:
        found[sync["line"].split(":")[0]] += sync["count"]
    assert dict(+found) == PER_STEP | {"fsdp_qlora/optimizers/sharded.py": ADAPTER_TENSORS}
    moved = Counter()
    for copied in counts["copies"]:
        assert copied["pinned"] or not copied["stream"], copied
        moved[copied["kind"], "beside" if copied["stream"] else "at work"] += copied["bytes"] * copied["count"]
    assert moved["device_to_host", "at work"] == 8 * NUMBERS  # nothing frozen
    assert moved["host_to_device", "at work"] < micro_batches * (16 * 1024 + bool(offload) * looked_up(models()))
    if not offload:
        assert not moved["host_to_device", "beside"] and not moved["device_to_host", "beside"]
        return
    _, blocks, _, head, _ = sizes(models(), 1)
    # Where forward and backward turn, at the head and at the first block, two modules are there already. Of the
    # embedding only the tokens' rows are copied, at work.
    weights = micro_batches * (sum(blocks[:-1]) + sum(blocks[1:]) + head)
    inputs = moved["device_to_host", "beside"]
    assert inputs > 0
    aligned = 64 * 100 * micro_batches  # bytes between the parameters
    assert 0 <= moved["host_to_device", "beside"] - weights - inputs * (len(blocks) - 1) // len(blocks) < aligned


@pytest.mark.parametrize(("ranks", "options"), [(1, {"use_cpu_offload": True}), (2, {}), (2, {"padding": True})])
def test_long_rows_are_copied_from_pinned_memory_alone(step, models, tmp_path, ranks, options):
    row = {"instruction": "write", "input": "", "output": "water river " * 6000}
    dataset = write_rows(tmp_path / "rows.jsonl", [row] * 8)
    model = models(max_position_embeddings=16384)
    counts = step(ranks, dataset=dataset, model_name=model, context_length=16384, batch_size=1, **options)
    batch = [each for each in counts["copies"] if each["kind"] == "host_to_device" and each["bytes"] > 65536]
    assert batch and all(each["pinned"] for each in batch), counts["copies"]


def test_with_padding_the_host_waits_once_in_each_micro_batch(step):
    counts = step(1, gradient_accumulation_steps=3, padding=True)
    found = Counter()
    for sync in counts["syncs"]:
        found[sync["line"].split(":")[0]] += sync["count"]
    assert dict(+found) == PER_STEP | {place: 3 * number for place, number in PER_PADDED_MICRO_BATCH.items()}
