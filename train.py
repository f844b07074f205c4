"""Fine-tune a language model whose quantized weights are sharded over all ranks: `python train.py --help`.

Reads in the order of a run: options, launch, model and data without weights, plan, shard and load, verify,
train, save. The training step is `Trainer.train_step` in fsdp_qlora/trainer.py.
"""

import functools
import logging
import math
import os
import sys
import time
from pathlib import Path

from fsdp_qlora.cli import parse_train_config
from fsdp_qlora.config import TrainConfig, needless_lines, resolved_options, resolved_yaml
from fsdp_qlora.errors import TrainingError, UserError
from fsdp_qlora.launch import planned_processes, relaunch_if_needed

log = logging.getLogger("fsdp_qlora")


def run(config: TrainConfig) -> None:
    """One rank's part of a run."""
    # Imported here so that --help and wrong options answer at once.
    from fsdp_qlora import describe, distributed, export, hub, models, packed, parallelize, quant_cache, verify, weights
    from fsdp_qlora.adapters import peft_config
    from fsdp_qlora.checkpoint_files import Checkpoint
    from fsdp_qlora.data.prepare import prepare_data
    from fsdp_qlora.metrics import open_metric_log
    from fsdp_qlora.optim import ShardedOptimizer, learning_rate
    from fsdp_qlora.precision import PRECISIONS, choose_precision
    from fsdp_qlora.profiling import MemoryLog, open_profiler
    from fsdp_qlora.train_types import TRAIN_TYPES
    from fsdp_qlora.trainer import Schedule, Trainer, train

    ranks = distributed.read_ranks()
    distributed.set_up_logging(ranks, verbose=config.verbose)
    world_size = planned_processes(config) if config.dry_run else ranks.world_size
    output_dir = Path(config.output_dir)
    train_type = TRAIN_TYPES[config.train_type]
    precision_name = choose_precision(config.precision, ranks.device)
    precision = PRECISIONS[precision_name]
    precision.check_storage(config.quant_storage)
    if not config.dry_run:
        export.check_output_dir(output_dir, overwrite=config.overwrite_output_dir)
    log.info(describe.describe_device(ranks.device, world_size))
    for line in needless_lines(config):
        log.info(line)

    # The model without weights, and what has to be read into it.
    folder = hub.find_model_folder(config.model_name, with_weights=not config.dry_run)
    export.check_keeps_model(output_dir, folder)
    model_config = models.load_config(folder, config.model_name)
    prequantized = packed.take_settings(model_config, config.model_name)
    if prequantized:
        train_type.check_takes_4bit(config.train_type, config.model_name)
        log.info(prequantized.describe_use(quant_type=config.quant_type, double_quant=config.double_quant))
    tokenizer = models.load_tokenizer(folder, config.model_name)
    meta = parallelize.build_model(
        model_config,
        train_type,
        precision,
        ranks.device,
        attn_implementation=config.attn_implementation,
        quant_type=config.quant_type,
        double_quant=config.double_quant,
        lora_rank=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        lora_target_modules=list(config.lora_target_modules),
        prequantized=prequantized,
    )
    checkpoint = None if config.dry_run else Checkpoint(folder)
    is_packed = prequantized is not None
    sources = weights.match_tensors(meta.model, checkpoint, packed=is_packed) if checkpoint else {}
    log.info("%s, precision %s", describe.describe_model(meta), precision_name)

    # The rows, tokenized before the ranks meet: no collective waits for it.
    data = prepare_data(
        tokenizer,
        dataset=config.dataset,
        eval_dataset=config.eval_dataset,
        eval_fraction=config.eval_fraction,
        context_length=config.context_length,
        dataset_format=config.dataset_format,
        dataset_samples=config.dataset_samples,
        max_bad_rows=config.max_bad_rows,
        seed=config.seed,
        vocab_size=meta.model.get_input_embeddings().num_embeddings,
    )
    schedule = Schedule(
        num_rows=len(data.train_rows),
        batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        world_size=world_size,
        num_epochs=config.num_epochs,
        max_steps=config.max_steps,
        seed=config.seed,
    )
    warmup_steps = config.warmup_steps
    if warmup_steps < 0:
        warmup_steps = math.ceil(config.warmup_ratio * schedule.total_steps)
    num_shards = distributed.num_shards(ranks, world_size, sharding_strategy=config.sharding_strategy)
    for line in (
        *describe.describe_memory(meta, num_shards=num_shards, optimizer=config.optimizer),
        schedule.describe(warmup_steps),
        data.sample,
    ):
        log.info(line)
    if config.dry_run:
        log.info("Options:\n%s", resolved_yaml(config))
        return

    # The ranks meet; the model is sharded, then loaded shard by shard.
    memory = MemoryLog(ranks.device, enabled=config.profile_memory)
    distributed.start_process_group(ranks)
    mesh = distributed.build_mesh(ranks, sharding_strategy=config.sharding_strategy)
    if ranks.is_rank_0:
        export.prepare_output_dir(output_dir)
        (output_dir / "config.yaml").write_text(resolved_yaml(config))
    model = meta.model
    if config.use_gradient_checkpointing:
        parallelize.checkpoint_activations(model, offload=config.use_activation_cpu_offload)
    parallelize.shard_model(
        model,
        mesh,
        sharding_strategy=config.sharding_strategy,
        precision=precision,
        cpu_offload=config.use_cpu_offload,
    )
    log.debug("%s", model)
    parallelize.materialize(model, ranks.device, cpu_offload=config.use_cpu_offload)
    memory.record("after sharding")
    assert checkpoint is not None
    load_weights = functools.partial(
        weights.load_weights,
        model,
        mesh=mesh,
        device=ranks.device,
        seed=config.seed,
        max_bytes_in_flight=config.loading_buffer_mib * 2**20,
        show_progress=ranks.is_rank_0,
    )
    layers = {} if is_packed else weights.quantized_layers(model)
    cache = quant_cache.open_cache(config.quant_cache, layers, checkpoint, sources, ranks, mesh)
    if cache:
        cache.load(load_weights)
    else:
        load_weights(checkpoint=checkpoint, sources=sources, packed=is_packed)
    memory.record("after loading")
    verify.check_byte_account(model, mesh)
    verify.check_one_layer(model, checkpoint, sources, packed=is_packed)

    # Train.
    optimizer = ShardedOptimizer(model, config.optimizer, lr=config.learning_rate, weight_decay=config.wd)
    trainer = Trainer(
        model,
        optimizer,
        data.train,
        ranks,
        schedule=schedule,
        precision=precision,
        num_replicas=world_size // num_shards,
        max_grad_norm=config.grad_norm if config.apply_gradient_clipping else math.inf,
        # Gradients of an adapter are small enough to add up unsharded; a whole model's are not.
        sync_every_micro_batch=not train_type.has_adapter,
        # No token sees the padding, so any id in the vocabulary will do; a pad token may be outside of it.
        pad_token_id=tokenizer.eos_token_id,
    )
    profiler = open_profiler(
        enabled=config.profile,
        output=Path(config.profiling_output),
        rank=ranks.rank,
        with_stack=config.with_stack,
        with_shapes=config.with_shapes,
        export_trace=config.export_trace,
        export_memory_timeline=config.export_memory_timeline,
        wait_steps=config.wait_steps,
        warmup_steps=config.profiling_warmup_steps,
        active_steps=config.active_steps,
        repeat=config.repeat,
        frequency=config.profiling_frequency,
    )
    started = time.perf_counter()
    with open_metric_log(
        config.log_to,
        output_dir=output_dir,
        total_steps=schedule.total_steps,
        config=resolved_options(config),
        project_name=config.project_name,
        name=config.name,
        group=config.group,
        entity=config.entity,
        is_rank_0=ranks.is_rank_0,
    ) as metrics:
        summary = train(
            trainer,
            data,
            metrics,
            learning_rate=functools.partial(
                learning_rate,
                peak=config.learning_rate,
                schedule=config.lr_scheduler,
                warmup_steps=warmup_steps,
                total_steps=schedule.total_steps,
            ),
            eval_steps=config.eval_steps,
            profiler=profiler,
            memory=memory,
        )
        profiler.close()
        if config.save_model and train_type.has_adapter:
            adapter = peft_config(
                meta.linears,
                meta.targets,
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                dropout=config.lora_dropout,
                base_model=config.model_name,
            )
            export.save_adapter(model, adapter, tokenizer, output_dir, is_rank_0=ranks.is_rank_0)
        elif config.save_model:
            export.save_model(
                model,
                model_config,
                tokenizer,
                output_dir,
                dtype=precision.compute_dtype,
                is_rank_0=ranks.is_rank_0,
            )
        metrics.summary(summary)
    log.info(describe.describe_result(summary, output_dir, time.perf_counter() - started, saved=config.save_model))
    distributed.stop_process_group()


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 only when the run finished, 2 for bad input."""
    try:
        config = parse_train_config(argv)
        if not config.dry_run and (status := relaunch_if_needed(config, argv)) is not None:
            return status
        run(config)
    except (UserError, TrainingError) as error:
        # Every rank says why: one that stops first must not hide the reason of the others.
        rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"{rank}error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
