"""fp16 with a scaled loss, and what stays in fp32."""

import functools

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from fsdp_qlora.model.architecture.meta_model import build_meta_model
from fsdp_qlora.model.architecture.precision import choose_precision
from fsdp_qlora.training.loss_scale import LossScale
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, train_ok

FULL_BATCH = {"batch_size": 2, "lr": 1e-3, "lr_scheduler": "constant", "warmup": 0}


# bf16 has 8 significant bits: a logit of size 4 is off by up to 2^-6, and a mean over 60 tokens of
# such errors by less than 1% of a loss of 6. autocast keeps norms and residuals in fp32. fp16 has
# 11 bits.
TOLERANCES = {"bf16": 1e-2, "bf16_autocast": 1e-2, "fp16": 2e-3, "fp16_autocast": 2e-3}


@pytest.mark.parametrize(
    ("train_type", "precisions"),
    [("qlora", ["bf16", "bf16_autocast", "fp16"]), ("full", ["fp16_autocast"])],
)
def test_losses_in_16_bits_are_those_of_fp32_up_to_rounding(
    train_type, precisions, models, tmp_path
):
    data = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    common = {
        "model_name": models(),
        "dataset": data,
        "num_epochs": 4,
        "train_type": train_type,
        **FULL_BATCH,
    }
    for name in ("fp32", *precisions):
        train_ok(2, tmp_path / name, precision=name, **common)
    fp32, norms = (read_metrics(tmp_path / "fp32", key) for key in ("loss", "grad_norm"))
    assert fp32[-1] < fp32[0] - 0.02
    for name in precisions:
        losses = read_metrics(tmp_path / name)
        assert losses == pytest.approx(fp32, rel=TOLERANCES[name]) and losses != pytest.approx(
            fp32, rel=1e-7
        ), name
        if name.startswith("fp16"):
            # nothing overflows here
            assert read_metrics(tmp_path / name, "loss_scale") == [65536.0] * 4
            assert read_metrics(tmp_path / name, "grad_norm")[0] == pytest.approx(
                norms[0], rel=1e-2
            )


def _train_from_scale(argv: list[str], first: float) -> int:
    import fsdp_qlora.training.loss_scale
    import train

    fsdp_qlora.training.loss_scale._FIRST_SCALE = first
    return train.main(argv)


def test_steps_that_overflow_are_skipped_until_the_scale_fits(models, tmp_path):
    argv = functools.partial(
        flags,
        model_name=models(),
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(4)),
        num_epochs=12,
        train_type="full",
        precision="fp16_autocast",
        log_to="stdout",
        quant_cache="off",
        **FULL_BATCH,
    )
    statuses, output = on_ranks(
        2, _train_from_scale, (argv(output_dir=tmp_path / "a"), 2.0**26), tmp_path / "a_logs"
    )
    assert statuses == [0, 0], output
    scales = read_metrics(tmp_path / "a", "loss_scale")
    skipped = [norm is None for norm in read_metrics(tmp_path / "a", "grad_norm")]
    count = skipped.index(False)
    assert 1 <= count <= 12 and not any(skipped[count:])
    assert output.count("is skipped: its gradients overflowed") == count  # rank 0 alone says so
    assert scales[: count + 1] == [2.0**26 / 2**number for number in range(count + 1)]
    assert len(set(scales[count:])) == 1
    # A skipped step changes nothing: the losses that follow are those of a run that begins at that
    # scale.
    statuses, output = on_ranks(
        2, _train_from_scale, (argv(output_dir=tmp_path / "b"), scales[count]), tmp_path / "b_logs"
    )
    assert statuses == [0, 0], output
    first = read_metrics(tmp_path / "a")
    second = read_metrics(tmp_path / "b")
    assert first[: count + 1] == pytest.approx([second[0]] * (count + 1), rel=1e-6)
    assert first[count:] == pytest.approx(second[: len(first) - count], rel=2e-3)


def test_the_loss_scale_falls_at_once_grows_late_and_is_saved():
    scale = LossScale(enabled=True)
    scale.update(overflowed=True)
    assert scale.scale == 2.0**15
    for _ in range(1999):
        scale.update(overflowed=False)
    later = LossScale(enabled=True)
    later.load_state(scale.state())
    later.update(overflowed=False)
    assert (scale.scale, later.scale) == (2.0**15, 2.0**16)
    while later.can_fall:
        later.update(overflowed=True)
    assert later.scale == 1.0
    off = LossScale(enabled=False)
    off.update(overflowed=False)
    assert off.scale == 1.0 and not off.can_fall


def test_the_default_precision_is_what_the_device_computes_in(monkeypatch):
    assert choose_precision("auto", torch.device("cpu")) == "fp32"
    assert choose_precision("fp16_autocast", torch.device("cpu")) == "fp16_autocast"
    for ampere, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, ampere=ampere: ampere
        )
        assert choose_precision("auto", torch.device("cuda")) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotary_tables_are_in_fp32_whatever_the_weights_are(family, dtype, models):
    config = AutoConfig.from_pretrained(models(family))

    def tables(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model: nn.Module = build_meta_model(
            config,
            attn_implementation="eager",
            dtype=dtype,
            compute_dtype=dtype,
            device=torch.device("cpu"),
        )
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        return {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}

    exact = tables(torch.float32)
    found = tables(dtype)
    assert found and found.keys() == exact.keys()
    assert all(
        torch.equal(found[name], exact[name]) and found[name].dtype == torch.float32
        for name in exact
    )
