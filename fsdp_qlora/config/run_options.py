"""Options of memory, of the files that a run writes, and of its processes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fsdp_qlora.config.marks import (
    COUNT_OR_WORD,
    MAY_DIFFER,
    NOT_EMPTY,
    OF_RESULT,
    PER_NODE,
    POSITIVE,
    SAMPLES,
    SAVE_TIMES,
    SIZE_OR_WORD,
    SWITCH_OR_COUNT,
    all_or_at_least_1,
    at_least,
)

LogTo = Literal[
    "tqdm",
    "stdout",
    "wandb",
    "trackio",
    "tensorboard",
    "jsonl",
    "project=",
    "name=",
    "group=",
    "entity=",
]


@dataclass(frozen=True)
class RunOptions:
    """Where and how the run computes, and what it leaves."""

    # == memory ==
    auto: Annotated[bool, MAY_DIFFER] = False
    """Choose the fastest settings that are planned to fit the GPUs before training: batch_size and
    gradient_accumulation_steps with the same rows per step, and sharding_strategy and
    use_cpu_offload where these are auto. A resumed run keeps them; `fsdp-qlora plan --auto` shows
    them for other GPUs.
    """
    sharding_strategy: Annotated[
        Literal[
            "auto",
            "full_shard",
            "shard_grad_op",
            "ddp",
            "hybrid_full_shard",
            "hybrid_shard_grad_op",
        ],
        MAY_DIFFER,
        OF_RESULT,
    ] = "auto"
    """Distribution of the model: full_shard needs the least memory, shard_grad_op keeps gathered
    weights until the backward pass, ddp replicates the model on every process, hybrid_ shards
    within a machine and replicates between machines. On GPUs auto chooses ddp if the whole model
    fits on each with a margin, else, between machines, hybrid_full_shard if it fits on one of them,
    else full_shard; on a CPU full_shard.
    """
    recompute: Annotated[
        Literal["auto", "all", "none", "offload", "host"] | int, COUNT_OR_WORD, MAY_DIFFER
    ] = "auto"
    """Decoder blocks that recompute their activations in the backward pass instead of keeping them
    (activation checkpointing): all needs little memory, none is the fastest, a number means the
    first ones, and offload is all with the blocks' inputs in host memory, for very long rows. host
    recomputes none, and keeps the activations of all blocks but the last in host memory. On GPUs
    auto finds the smallest number that fits, by probing before the first step; on a CPU auto means
    all.
    """
    kernels: Annotated[Literal["auto", "plain"], MAY_DIFFER] = "auto"
    """Ways in which the parts of a block are computed. auto computes layers that share an input
    together, and on a GPU takes, for each part, the fastest kernel that is right there: a short
    trial at the start shows which are. plain takes the kernels of PyTorch and the libraries for all
    parts.
    """
    use_cpu_offload: Annotated[
        Literal["auto"] | bool | int, SWITCH_OR_COUNT, MAY_DIFFER, OF_RESULT
    ] = "auto"
    """Keep the frozen base (with full: the weights, gradients and optimizer) in host memory, and
    copy each block to the GPU when it is needed. A number above 1 offloads that many decoder
    blocks. On GPUs auto offloads all if the model does not fit otherwise.
    """
    context_parallel_size: Annotated[Literal["auto"] | int, SIZE_OR_WORD, MAY_DIFFER] = 1
    """Processes of a machine that share each micro-batch, for rows too long for one GPU: each
    computes a part of the tokens, and in attention a part of the heads. With N of them, an
    optimizer step has N times fewer rows. auto picks the smallest N that fits the longest rows, and
    multiplies gradient_accumulation_steps by it.
    """

    # == output ==
    output_dir: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "output"
    """Folder for the results: the adapter, the tokenizer, config.yaml, metrics.jsonl and the
    checkpoints.
    """
    save_model: Annotated[bool, MAY_DIFFER] = True
    """Save checkpoints, and the adapter (or the model, for full) at the end; turn it off to measure
    speed only.
    """
    save_every: Annotated[tuple[str, ...], SAVE_TIMES, MAY_DIFFER] = ("15m",)
    """Minutes (15m) or optimizer steps (500) between two checkpoints, or both (500,15m); raise it
    for slow disks. Checkpoints are also saved at the end, on a stop, and after a new best
    evaluation; none saves only these.
    """
    save_total_limit: Annotated[int, at_least(1), MAY_DIFFER] = 3
    """Number of newest checkpoints to keep, besides the one with the lowest evaluation loss."""
    mirror: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """Copy of each checkpoint elsewhere: a folder on another disk or machine, a URL (s3://, gcs://,
    az://, sftp://), or hf:OWNER/NAME (a private repository; hf:OWNER/NAME:public allows a public
    one). An empty output_dir, as on a new machine, is filled from it.
    """
    push_to_hub: Annotated[str | None, MAY_DIFFER] = None
    """Repository on the Hugging Face hub, OWNER/NAME, to upload the result to at the end of the run
    or of its budget. A new one is private, and a public one is refused, unless :public follows the
    name. output_dir has the result even if the upload fails.
    """
    base_name: Annotated[str | None, MAY_DIFFER, OF_RESULT] = None
    """Name of the base model on the Hugging Face hub, OWNER/NAME, for the adapter's
    adapter_config.json and card; by default model_name, which others cannot find if it is a local
    folder.
    """
    log_to: Annotated[tuple[LogTo, ...], NOT_EMPTY, MAY_DIFFER] = ("tqdm",)
    """Destinations of the metrics, besides metrics.jsonl and report.html in output_dir. tensorboard
    writes to tensorboard/ in output_dir. wandb and trackio take settings, as in
    wandb,project=mine,name=first: project, name, group (for runs that belong together) and, wandb
    alone, entity (the owner). Only jsonl leaves the terminal silent.
    """
    eval_steps: Annotated[int, at_least(0), MAY_DIFFER] = 0
    """Optimizer steps between two evaluations; 0 evaluates only before and after training."""
    eval_tasks: Annotated[tuple[str, ...], MAY_DIFFER] = ()
    """Tasks of lm-eval, by name or as YAML files, to measure the sharded model on at each
    evaluation.
    """
    sample_prompts: Annotated[str | None, MAY_DIFFER, PER_NODE] = None
    """File of prompts, .jsonl or one in each line, to answer at each evaluation; samples.jsonl has
    the answers.
    """

    # == run ==
    resume: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "auto"
    """Start of the run: auto resumes the run in output_dir from its newest intact checkpoint, off
    starts from scratch, and a folder starts from that checkpoint, or run with the same options and
    rows. auto:replace, off:replace and so on replace a finished or another run in output_dir. To
    train an adapter with other options or rows, see adapter.
    """
    nproc_per_node: Annotated[
        int, all_or_at_least_1("or a number of processes"), MAY_DIFFER, PER_NODE
    ] = -1
    """Number of processes to start on this machine; -1 is one per visible GPU, or one on a CPU.
    world_size is another name for it.
    """
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_DIFFER] = "auto"
    """Device of the computation; auto takes the visible GPUs, or the CPU of a machine without one.
    A dry run without a GPU plans for one, unless this is cpu.
    """
    dry_run: Annotated[Literal["samples", "samples="] | bool, SAMPLES, MAY_DIFFER] = False
    """Print the plan or rows and stop before training: true prints the sizes, the memory per
    process and the steps, without loading weights; samples prints three rows as the model sees
    them, with the trained tokens in colour, and samples=10 ten.
    """
    verbose: Annotated[bool, MAY_DIFFER, PER_NODE] = False
    """Print more at the start: memory, kernels, how weights were read, the model; in a dry run all
    options too.
    """
    max_hours: Annotated[float | None, POSITIVE, MAY_DIFFER] = None
    """Maximum hours of the run, earlier starts included; it stops in time, with a checkpoint."""
    hang_minutes: Annotated[float, at_least(0), MAY_DIFFER] = 15.0
    """Minutes without progress of a process after which the run ends and names it; raise it when a
    micro-batch, a checkpoint or a reward function takes longer. 0 is never. A missing process ends
    the run after at most 5 minutes.
    """
    on_nonfinite: Annotated[Literal["halt", "skip"], MAY_DIFFER] = "halt"
    """Action when a loss or gradient is not finite: halt ends the run, skip leaves out the step (at
    most 10 steps or 1% of them).
    """
