"""The plan's judge for rows with images and adapters for images, as standin_memory.py is for text.

    python benchmarks/standin_images.py [--cases llava ...]

A case builds a published vision-language model from transformers' own configuration, with few
decoder blocks, as train.py does. It reads no weights, and does three steps of AdamW in bf16 with
adapters on decoder, encoder and projector, on texts or on pairs with DPO. Values of numbers that
are no floats are computed (stand_in/values), since models count the tokens of their images.
Convolutions are torch's own, since the stand-in has no cuDNN.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
ROWS = 2  # one for each rank


class Family(NamedTuple):
    """How a processor shows an image of a family: its outputs, and its tokens."""

    patches: tuple[int, int]
    pixels: tuple[int, ...]  # the shape of the pixels of one image
    num_tokens: int
    targets: str = "all,vision,projector"
    num_blocks: int = 4


# Of gemma3 as published.
SIGLIP: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
# An image of 1024 x 1024 pixels for a family that takes images of any size.
FAMILIES = {
    "qwen3_vl": Family((64, 64), (64 * 64, 1536), 1024),
    "gemma3": Family((64, 64), (1, 3, 896, 896), 256, "all,vision"),
    "llava": Family((24, 24), (1, 3, 336, 336), 576),
    "internvl": Family((32, 32), (4, 3, 448, 448), 1024),
}


def name_of(family: str, recompute: str, images: int, objective: str) -> str:
    """The name of a case."""
    shown = f"{images} {'image' if images == 1 else 'images'}"
    of_pairs = "" if objective == "sft" else f", {objective}"
    return f"{family}, {shown}, recompute {recompute}{of_pairs}"


CASES = {
    name_of(family, recompute, images, objective): (family, recompute, images, objective)
    for objective in ("sft", "dpo")
    for family in FAMILIES
    for images in (1, 4)
    for recompute in ("all", "none")
}


class HandMade:
    """Stands for a processor, of images of one size."""

    def __init__(self, row: Family, image_token: int) -> None:
        self.row = row
        self.image_token = image_token

    @property
    def example(self) -> dict[str, Any]:
        return self.outputs_of([b""])

    def outputs_of(self, names: Sequence[bytes]) -> dict[str, Any]:
        import torch

        row = self.row
        pixels = torch.zeros(len(names) * row.pixels[0], *row.pixels[1:])
        outputs = {"pixel_values": pixels}
        if len(row.pixels) == 2:
            outputs["image_grid_thw"] = torch.tensor([[1, *row.patches]] * len(names))
        return outputs

    def model_inputs(
        self, outputs: Sequence[Mapping[str, Any]], input_ids: Any, taken: Mapping[str, Any]
    ) -> dict[str, Any]:
        import torch

        inputs = {name: torch.cat([each[name] for each in outputs]) for name in outputs[0]}
        inputs["token_type_ids"] = inputs["mm_token_type_ids"] = (
            input_ids == self.image_token
        ).long()
        return {name: value for name, value in inputs.items() if name in taken}


def compute_integers() -> Any:
    """A mode in which the CPU computes operators on the device's integers alone."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from stand_in.values.memory import tensors_in
    from stand_in.values.mode import Values

    masked = ("index", "index_put", "index_put_", "_index_put_impl_", "masked_scatter_backward")
    values = Values()

    class Integers(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            tensors = [*tensors_in((args, kwargs))]
            name = func._schema.name.split("::")[1]
            counts = name in masked and any(tensor.dtype == torch.bool for tensor in tensors)
            if counts or not any(tensor.is_floating_point() for tensor in tensors):
                return values.__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **kwargs)

    return Integers()


def model_of(family: str) -> Any:
    """The configuration of a family's model, with few decoder blocks."""
    from transformers import CONFIG_MAPPING

    row = FAMILIES[family]
    config: Any = CONFIG_MAPPING[family]()
    text = config.text_config
    text.num_hidden_layers = row.num_blocks
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: row.num_blocks]
    if family == "gemma3":
        config.vision_config = type(config.vision_config)(**SIGLIP)
    if hasattr(config.vision_config, "out_hidden_size"):
        config.vision_config.out_hidden_size = text.hidden_size
    return config


def rows_of(family: str, images: int, image_token: int, *, are_pairs: bool) -> Any:
    """Two rows with images, as a run has them, of which text is learned: texts or pairs."""
    import numpy as np

    from fsdp_qlora.data.batches.row_images import RowImages
    from fsdp_qlora.data.batches.rows import TokenizedRows
    from fsdp_qlora.data.run_data import RunData

    row = FAMILIES[family]
    shown = [7, *[image_token] * row.num_tokens, 7]
    text = [7] * 250
    document = np.array(shown * images + text, np.int32)
    documents = 2 if are_pairs else 1
    length = documents * len(document)
    processor: Any = HandMade(row, image_token)
    values = images * sum(value.numel() for value in processor.example.values())
    table = TokenizedRows(
        np.tile(document, ROWS * documents),
        np.tile(np.arange(len(document)) >= len(document) - 200, ROWS * documents),
        np.arange(ROWS + 1) * length,
        np.arange(ROWS),
        np.full(ROWS, len(document)) if are_pairs else np.zeros(0, np.int64),
        images=RowImages(
            np.zeros((ROWS * images, 16), np.uint8), np.array([[images, values]] * ROWS)
        ),
    )
    return RunData(table, np.arange(ROWS), image_processor=processor)


def build(family: str, recompute: Any, images: int, objective: str) -> tuple[Any, Any, Any]:
    """The trainer of rank 0 of two, the placed model, and the rows."""
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.data.batches.schedule import RowsInMemory
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.planning.machine import Machine
    from fsdp_qlora.planning.placement import place
    from fsdp_qlora.planning.plan import build_plan
    from fsdp_qlora.planning.run_plan import Plan
    from fsdp_qlora.planning.run_rows import RunRows, make_schedule
    from fsdp_qlora.run.build_trainer import build_trainer

    local = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(local)
    model_config = model_of(family)
    image_token = getattr(model_config, "image_token_id", None) or model_config.image_token_index
    data = rows_of(family, images, image_token, are_pairs=objective != "sft")
    config = TrainConfig(
        objective=objective,
        precision="bf16",
        batch_size=1,
        quant_cache="off",
        recompute=recompute,
        use_cpu_offload=False,
        sharding_strategy="full_shard",
        context_length=int(data.train.lengths[0]),
        lora_target_modules=tuple(FAMILIES[family].targets.split(",")),
        batching="padded",
    )
    ranks = read_ranks(config.device)
    machine = Machine.of(config, ranks)
    tokenizer: Any = SimpleNamespace(eos_token_id=0)
    plan = build_plan(config, machine, Path("no weights"), model_config, tokenizer)
    schedule = make_schedule(config, data, machine.data_size(1))
    longest = RunRows(config, data, schedule, shares_tokens=False).longest()
    placed = place(config, plan, longest)
    shard(placed, ranks)
    trainer = build_trainer(config, Plan(placed, data, schedule, warmup_steps=0), ranks)
    return trainer, placed, RowsInMemory(data.train, data.train_rows)


def shard(placed: Any, ranks: Any) -> None:
    """Make the shards of rank 0, with whatever lies in memory."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fsdp_qlora.distributed.shards import build_mesh
    from fsdp_qlora.sharding.parallelize import materialize, shard_model
    from fsdp_qlora.sharding.recompute import set_recompute, wrap_blocks, wrap_towers

    dist.init_process_group("fake", rank=0, world_size=ranks.world_size, store=FakeStore())
    step = placed.step
    parts = placed.model.meta.parts
    wrap_blocks(parts.model, num_blocks=step.recomputing, offload=False)
    set_recompute(parts.model, step.recomputing)
    if step.recomputing:
        wrap_towers(parts.model)
    strategy = placed.placement.sharding_strategy
    mesh = build_mesh(ranks, sharding_strategy=strategy)
    shard_model(parts, mesh, sharding_strategy=strategy, precision=placed.model.precision)
    materialize(parts, ranks.device)


def measure(family: str, recompute: str, images: int, objective: str) -> dict[str, int]:
    """Bytes of one case, and what is planned for it; runs on the stand-in."""
    import torch

    from fsdp_qlora.data.batches.schedule import StepRows
    from fsdp_qlora.data.longest_rows import longest_of_table

    torch.backends.cudnn.enabled = False
    with compute_integers():
        trainer, placed, rows = build(family, recompute, images, objective)
        trainer.try_longest(longest_of_table(rows, trainer.collator))
        for step in range(3):
            trainer.train_step(StepRows(step, *rows))
    return {
        "planned": placed.memory.reserved,
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def on_stand_in(name: str) -> dict[str, int]:
    """Run one case there."""
    from stand_in import environment

    if reason := environment.why_not():
        sys.exit(reason)
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PHANTOM_GIB": 400,
        "PHANTOM_VALUES": 1,
        "OMP_NUM_THREADS": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [str(environment.PYTHON), __file__, "--inside", name]
        variables = environment.variables(Path(folder), settings)
        # Without stand_in/startup: floats are not computed.
        variables["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    found: dict[str, int] = json.loads(line)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        print(json.dumps(measure(*CASES[args.inside])), flush=True)
        return 0
    print("| case | planned | reserved | error | allocated |")
    print("|---|---|---|---|---|")
    for name in args.cases:
        found = on_stand_in(name)
        error = found["planned"] / found["reserved"] - 1
        planned, reserved, allocated = (f"{number / GIB:.2f}" for number in found.values())
        print(f"| {name} | {planned} | {reserved} | {error:+.1%} | {allocated} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
