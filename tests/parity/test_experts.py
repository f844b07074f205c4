"""Mixture-of-experts models against transformers, PEFT and bitsandbytes: quantized, sharded,
loaded, adapted, saved.
"""

import re
import shutil
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.__main__ import main
from fsdp_qlora.export import save_results as saving
from fsdp_qlora.export.values import LiveValues
from fsdp_qlora.model.experts import expert_parameters, route_experts, router_linears
from fsdp_qlora.model.kernels.in_use import Ways
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.run.ways import TriedKernels
from fsdp_qlora.utils import safetensors_files
from tests.helpers.metrics import read_metrics
from tests.helpers.models import PROBE, SIZES
from tests.helpers.reference import batch_loss, encode, load_adapter
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, run_ranks, train_ok

FAMILIES: dict[str, dict[str, object]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # [experts, in, out], with biases
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default"},
    },
    # a dense block first, then shared experts beside the routed ones
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    # given all tokens, [experts, in, out]
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 128},
    # a linear layer that weighs the shared expert
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
# Stochastic gradient descent: Adam makes a whole step of the rounding error of a gradient that is
# nearly zero.
SETTINGS = {
    "optimizer": "sgd",
    "lr": 0.5,
    "lr_scheduler": "constant",
    "warmup": 0,
    "precision": "fp32",
}


def _quantized_base(folder: Path) -> nn.Module:
    """transformers' model in fp32 with every weight that a run quantizes replaced by what
    bitsandbytes decodes.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    routers = ("gate", "shared_expert_gate", "router")
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] not in routers:
            _decode_in_place(module.weight)
        elif name.endswith(".experts"):
            _decode_in_place(module.gate_up_proj)
            _decode_in_place(module.down_proj)
    return model.eval()


@torch.no_grad()
def _decode_in_place(parameter: nn.Parameter) -> None:
    # Rows of whole blocks: bitsandbytes 0.50's CPU kernel scales wrongly where a row ends in half a
    # block.
    codes, state = bnb.quantize_4bit(
        parameter.data.reshape(-1, 64), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    parameter.copy_(bnb.dequantize_4bit(codes, state).view(parameter.shape))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in ("olmoe", "qwen2_moe")))
        for name in FAMILIES
    ],
)
def test_every_family_is_quantized_and_trains_the_same_on_two_ranks(family, models, tmp_path):
    folder = models(family, **FAMILIES[family])
    rows = make_rows(8, seed=1)
    held_out = make_rows(3, seed=2)
    common = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", rows),
        "eval_dataset": write_rows(tmp_path / "held_out.jsonl", held_out),
        "num_epochs": 2,
        **SETTINGS,
    }
    output = train_ok(1, tmp_path / "one", batch_size=4, verbose=True, **common)
    train_ok(
        2, tmp_path / "two", batch_size=2, logits_file=tmp_path / "logits.safetensors", **common
    )
    share = re.search(r"([\d.]+)% of the decoder blocks quantized", output)
    assert share is not None and float(share[1]) > 90
    for key in ("loss", "eval_loss", "grad_norm"):
        assert read_metrics(tmp_path / "two", key) == pytest.approx(
            read_metrics(tmp_path / "one", key), rel=1e-5
        )

    before, after = read_metrics(tmp_path / "two", "eval_loss")
    assert abs(after - before) > 1e-3
    batch = encode(folder, held_out)
    base = _quantized_base(folder)
    with torch.no_grad():
        assert batch_loss(base, batch).item() == pytest.approx(before, rel=1e-4)
        reloaded = load_adapter(base, tmp_path / "two")
        assert batch_loss(reloaded, batch).item() == pytest.approx(after, rel=1e-4)
        logits = load_file(tmp_path / "logits.safetensors")["logits"]
        assert (reloaded(input_ids=PROBE).logits - logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "train_type"),
    [
        ("mixtral", "qlora"),
        ("gpt_oss", "qlora"),
        ("deepseek_v3", "lora"),
        pytest.param("mixtral", "lora", marks=pytest.mark.nightly),
        pytest.param("llama4_text", "qlora", marks=pytest.mark.nightly),
    ],
)
def test_an_adapter_on_experts_trains_and_peft_loads_it(family, train_type, models, tmp_path):
    folder = models(family, **FAMILIES[family])
    common = {
        "model_name": folder,
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8, seed=1)),
        "num_epochs": 2,
        "train_type": train_type,
        "lora_rank": 4,
        "lora_target_parameters": "experts.gate_up_proj,experts.down_proj",
        **SETTINGS,
    }
    train_ok(1, tmp_path / "one", batch_size=4, **common)
    train_ok(
        2, tmp_path / "two", batch_size=2, logits_file=tmp_path / "logits.safetensors", **common
    )
    for key in ("loss", "grad_norm"):
        assert read_metrics(tmp_path / "two", key) == pytest.approx(
            read_metrics(tmp_path / "one", key), rel=1e-5
        )
    state = load_file(tmp_path / "two" / "adapter_model.safetensors")
    experts = {name: value for name, value in state.items() if ".experts." in name}
    assert len(experts) == 4 * (1 if family == "deepseek_v3" else 2)  # blocks with experts
    assert all(value.abs().max() > 0 for value in experts.values())

    base = _quantized_base(folder)
    if train_type == "lora":
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        logits = load_file(tmp_path / "logits.safetensors")["logits"]
        unadapted = base(input_ids=PROBE).logits
        reloaded = load_adapter(base, tmp_path / "two")
        assert (reloaded(input_ids=PROBE).logits - logits).abs().max() < 1e-4
    assert (unadapted - logits).abs().max() > 1e-2


# experts that end inside a block of 256 absmax, and ranks apart
SHAPES = [(4, 48, 64), (3, 160, 96), (5, 8, 8)]


def _weight(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def _save_shards(folder: Path) -> int:
    from torch.distributed.fsdp import fully_shard

    from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.distributed.shards import build_mesh

    ranks = read_ranks()
    start_process_group(ranks)
    mesh = build_mesh(ranks, sharding_strategy="full_shard")
    for shape in SHAPES:
        for transposed in (False, True):
            meta = nn.Parameter(torch.empty(shape, device="meta"))
            experts = QUANTIZERS["bnb_4bit"].experts(  # type: ignore[misc]
                meta,
                transposed=transposed,
                quant_type="nf4",
                double_quant=True,
                compute_dtype=torch.float32,
            )
            fully_shard(experts, mesh=mesh)
            experts.to_empty(device="cpu")
            start, stop = experts.shard_range(mesh)
            experts.load_shard(_weight(shape).flatten()[start:stop], mesh)
            saved = {
                name: parameter.to_local().clone() for name, parameter in experts.named_parameters()
            }
            experts.unshard()
            for index in range(shape[0]):
                x = _weight((7, shape[1] if transposed else shape[2])).requires_grad_()
                y = experts.product(x, experts.expert(index))
                y.backward(_weight(tuple(y.shape)))
                # nothing decoded is kept
                assert x.grad is not None and "DecodedMatmul" in type(y.grad_fn).__name__
                saved |= {f"y{index}": y.detach(), f"grad{index}": x.grad}
            save_file(saved, folder / f"{shape}_{transposed}_{ranks.rank}.safetensors")
    stop_process_group()
    return 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_experts_are_bitsandbytes_own_bytes_and_multiply_as_decoded(world_size, tmp_path):
    statuses, output = on_ranks(world_size, _save_shards, (tmp_path,), tmp_path / "logs")
    assert statuses == [0] * world_size, output
    for shape in SHAPES:
        codes, state = bnb.quantize_4bit(
            _weight(shape), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        state.shape = torch.Size((codes.numel() // 32, 64))  # see _decode_in_place
        decoded = bnb.dequantize_4bit(codes, state).view(shape).double()
        expected = {"weight": codes, "absmax": state.absmax, "nested_absmax": state.state2.absmax}
        for transposed in (False, True):
            parts = [
                load_file(tmp_path / f"{shape}_{transposed}_{rank}.safetensors")
                for rank in range(world_size)
            ]
            for name, value in expected.items():
                value = value.reshape(-1).view(torch.uint8)
                joined = torch.cat([part[name] for part in parts]).view(-1).view(torch.uint8)
                assert torch.equal(joined[: len(value)], value), (shape, name)
            for index in range(shape[0]):
                matrix = decoded[index].T if not transposed else decoded[index]  # [in, out]
                x = _weight((7, matrix.shape[0])).double()
                y = x @ matrix
                grad = _weight(tuple(y.shape)).double() @ matrix.T
                for part in parts:
                    assert torch.allclose(part[f"y{index}"].double(), y, rtol=1e-5, atol=1e-5)
                    assert torch.allclose(part[f"grad{index}"].double(), grad, rtol=1e-5, atol=1e-5)


def test_experts_that_share_a_quantization_block_stay_unquantized(models, tmp_path):
    sizes = {"hidden_size": 60, "head_dim": 16, "intermediate_size": 33}
    common = {
        "model_name": models("mixtral", **FAMILIES["mixtral"], **sizes),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "batch_size": 2,
        **SETTINGS,
    }
    statuses, output = run_ranks(2, flags(output_dir=tmp_path / "out", **common), tmp_path / "logs")
    assert statuses == [2, 2]
    assert re.search(r"Only \d\d\.\d% of the parameters .* mlp\.experts\.gate_up_proj", output)
    assert "--allow_unquantized true" in output and not (tmp_path / "out").exists()
    train_ok(2, tmp_path / "allowed", allow_unquantized=True, **common)


def test_missing_experts_and_wrong_names_are_named(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models("mixtral", **FAMILIES["mixtral"]), folder)
    state = load_file(folder / "model.safetensors")
    absent = next(name for name in state if name.endswith("1.block_sparse_moe.experts.2.w3.weight"))
    del state[absent]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    common = {
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        "output_dir": tmp_path / "out",
    }
    statuses, output = run_ranks(1, flags(model_name=folder, **common), tmp_path / "logs")
    assert (
        statuses == [2]
        and (f"missing: {absent} (a part of model.layers.1.mlp.experts.gate_up_proj)") in output
    )

    wrong = flags(
        model_name=models("mixtral", **FAMILIES["mixtral"]),
        lora_target_parameters="experts.up",
        **common,
    )
    statuses, output = run_ranks(1, wrong, tmp_path / "logs")
    assert statuses == [2] and "named experts.up" in output and "experts.gate_up_proj" in output


def test_a_plan_says_that_routed_experts_have_no_adapter(models, tmp_path, capsys):
    named = "mlp.experts.down_proj,mlp.experts.gate_up_proj"
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    common = flags(dataset=rows, dry_run=True, device="cpu", output_dir=tmp_path / "out")
    mixtral = models("mixtral", **FAMILIES["mixtral"])
    for options, is_said in (
        ({"model_name": mixtral}, True),
        ({"model_name": mixtral, "lora_target_parameters": named}, False),
        ({"model_name": models()}, False),
    ):
        assert main(["train", *common, *flags(**options)]) == 0
        output = "".join(capsys.readouterr())
        said = f"no adapter, which they get with --lora_target_parameters {named}."
        assert (said in output) == is_said and ("no adapter" in output) == is_said


def test_full_training_of_experts_leaves_a_model_that_transformers_loads(models, tmp_path):
    folder = models("mixtral", **FAMILIES["mixtral"])
    held_out = make_rows(3, seed=2)
    train_ok(
        2,
        tmp_path / "out",
        model_name=folder,
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(8)),
        eval_dataset=write_rows(tmp_path / "held_out.jsonl", held_out),
        train_type="full",
        batch_size=2,
        **{**SETTINGS, "lr": 0.1},
    )
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = read_metrics(tmp_path / "out", "eval_loss")
    with torch.no_grad():
        assert batch_loss(model, encode(folder, held_out)).item() == pytest.approx(after, rel=1e-5)
    assert abs(after - before) > 1e-3


@pytest.mark.parametrize(
    ("family", "routers"),
    [
        ("gpt_oss", set()),
        ("phimoe", {"mlp.router"}),
        ("qwen2_moe", {"mlp.shared_expert_gate"}),
        ("llama4_text", {"feed_forward.router"}),
        ("longcat_flash", set()),  # with a loop of its own, and experts that return their input
    ],
)
def test_experts_and_routers_are_found_by_structure(family, routers):
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {})})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    route_experts(model, torch.device("cpu"))
    in_block = {name.split(".", 4)[4] for name in expert_parameters(model)}
    assert in_block == {"experts.down_proj", "experts.gate_up_proj"}
    assert {name.split(".", 3)[3] for name in router_linears(model)} == routers


# sarvam_moe: queries, keys and values are one tensor of its files.
@pytest.mark.parametrize("family", ["qwen3_moe", *({"sarvam_moe"} & {*CONFIG_MAPPING})])
def test_a_model_of_experts_saved_in_several_files_is_read_back(
    family, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(safetensors_files, "_FILE_BYTES", 100_000)
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder = models(family, **FAMILIES.get(family, few))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saving.save_model(
        model,
        model.config,
        tokenizer.save_pretrained,
        tmp_path,
        base=None,
        dtype=torch.float32,
        values=LiveValues(keeps=True),
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def train_padded(argv: list[str]) -> int:
    """What one rank of a run does whose experts are padded as on a GPU without grouped kernel."""
    import train

    TriedKernels.choose = lambda *args: Ways(experts="padded")
    return train.main(argv)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_a_run_with_padded_experts_on_two_ranks_is_the_plain_run(family, models, tmp_path):
    options = {
        "model_name": models(family, **FAMILIES[family]),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(8, seed=1)),
        "lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj",
        "quant_cache": "off",
        "context_length": 512,
        "batch_size": 2,
        "verbose": True,
        **SETTINGS,
    }
    train_ok(2, tmp_path / "plain", kernels="plain", **options)
    argv = flags(output_dir=tmp_path / "padded", log_to="stdout", **options)
    statuses, output = on_ranks(2, train_padded, (argv,), tmp_path / "logs")
    assert statuses == [0, 0] and "rows of padding for" in output, output[-4000:]
    for key in ("loss", "grad_norm"):
        assert read_metrics(tmp_path / "padded", key) == pytest.approx(
            read_metrics(tmp_path / "plain", key), rel=1e-5
        )
    adapters = [
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "padded")
    ]
    assert any("experts" in name for name in adapters[0])
    for name, value in adapters[0].items():
        assert torch.allclose(adapters[1][name], value, rtol=1e-4, atol=1e-6), name
