"""The same qlora step by others: transformers + PEFT + bitsandbytes in a plain loop, and by TRL
where it is installed.

All have the same weights, rows and first adapters as ours, AdamW, clipping at 1 and checkpointed
blocks. They do the same work if their first loss and gradient norm are ours, to what bf16 leaves:
TOLERANCE.
"""

import gc
import importlib.util
import statistics
import tempfile
import time
from typing import Any

import bitsandbytes
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.common import RandomWeights
from benchmarks.gpu_steps import MemoryMeter, Steps, make_config, make_rows, synchronize
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.architecture.precision import PRECISIONS

TOLERANCE = 5e-2
LR = 5e-4


def measure_peers(work: Steps, ours: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Each peer's record beside ours: losses, gradient norms, seconds, memory, and whether it did
    the same work.
    """
    batch = str(work.batches[0])
    mine = ours["batches"][batch]
    memory = ours["memory_bytes"][batch]
    results = {"ours": _summary(mine["losses"], mine["grad_norms"], mine["step_seconds"], memory)}
    peers = {"PEFT + bitsandbytes": _hand_written, "TRL + PEFT + bitsandbytes": _trl}
    if importlib.util.find_spec("trl") is None:
        del peers["TRL + PEFT + bitsandbytes"]
    for name, run in peers.items():
        meter = MemoryMeter(device)
        try:
            losses, norms, seconds = run(work, device)
            meter.record("steps")
            results[name] = _summary(losses, norms, seconds, meter.phases["steps"])
        except (RuntimeError, ValueError, ImportError, TypeError, AttributeError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for record in results.values():
        if "error" not in record:
            record["same_work"] = _is_near(record, results["ours"], "first_loss", "first_grad_norm")
    same = all(record.get("same_work", False) for record in results.values())
    return {"layers": ours["layers"], "batch": batch, "peers": results, "loss_falls": same}


def _summary(
    losses: list[float], norms: list[float], seconds: list[float], memory: dict[str, float]
) -> dict[str, Any]:
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "first_grad_norm": norms[0],
        "median_step_seconds": statistics.median(seconds),
        "peak_bytes": memory,
    }


def _is_near(found: dict[str, Any], expected: dict[str, Any], *names: str) -> bool:
    return all(
        abs(found[name] - expected[name]) <= TOLERANCE * abs(expected[name]) for name in names
    )


def load_peer(work: Steps, device: torch.device) -> Any:
    """The model as a user of transformers, PEFT and bitsandbytes has it, with our weights and first
    adapters.
    """
    config = make_config(work)
    dtype = PRECISIONS[work.precision].compute_dtype
    weights = RandomWeights(config, dtype, device)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=work.attention
        )
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            parameter.copy_(weights.read_flat(name, 0, parameter.numel()).view(parameter.shape))
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            base.set_submodule(name, _in_4_bits(module, dtype, device))
    base.is_loaded_in_4bit = True  # which PEFT asks
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()  # TRL may checkpoint the reentrant way, which needs it
    lora = LoraConfig(
        r=work.lora_rank,
        lora_alpha=2 * work.lora_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(
                    first_adapter_value(name.replace(".default", ""), parameter.shape, seed=0)
                )
    if device.type == "cuda":  # what loading took, with the whole base in 16 bits, is not a step's
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return model.train()


def _in_4_bits(linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=dtype,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data,
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=True,
        module=layer,
    )
    return layer.to(device)


def _rows(work: Steps) -> torch.Tensor:
    """The token ids of the batch, [rows, length]."""
    data, [numbers] = make_rows(work.batches[:1], make_config(work).vocab_size)
    return (
        torch.from_numpy(data.input_ids[: int(data.offsets[len(numbers)])])
        .long()
        .view(len(numbers), -1)
    )


def _hand_written(
    work: Steps, device: torch.device
) -> tuple[list[float], list[float], list[float]]:
    model = load_peer(work, device)
    ids = _rows(work).to(device)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, weight_decay=0.0)
    dtype = PRECISIONS[work.precision].compute_dtype
    losses = []
    norms = []
    seconds = []
    for step in range(work.warmup_steps + work.steps):
        synchronize(device)
        started = time.perf_counter()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        del logits
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trainable, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        synchronize(device)
        if step >= work.warmup_steps:
            seconds.append(time.perf_counter() - started)
    return losses, norms, seconds


def _trl(work: Steps, device: torch.device) -> tuple[list[float], list[float], list[float]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    ids = _rows(work).tolist()
    clock = _Clock(device)
    dtype = PRECISIONS[work.precision].compute_dtype
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=len(ids),
            max_steps=work.warmup_steps + work.steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            warmup_steps=0,
            optim="adamw_torch",
            max_grad_norm=1.0,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            max_length=work.batches[0].length,
            dataset_kwargs={"skip_prepare_dataset": True},
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            use_cpu=device.type == "cpu",
        )
        rows = Dataset.from_dict(
            {"input_ids": ids * options.max_steps, "labels": ids * options.max_steps}
        )
        trainer = SFTTrainer(
            model=load_peer(work, device),
            args=options,
            train_dataset=rows,
            processing_class=tokenizer(),
            callbacks=[clock],
        )
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    losses, norms = ([float(entry[key]) for entry in history] for key in ("loss", "grad_norm"))
    return losses, norms, clock.seconds[work.warmup_steps :]


def tokenizer() -> PreTrainedTokenizerFast:
    """TRL asks for one, though the rows are tokens already."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )


class _Clock(TrainerCallback):  # type: ignore[misc]
    """The seconds of each step of transformers' trainer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.started)
