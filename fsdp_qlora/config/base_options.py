"""Options of the base model and of the rows."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fsdp_qlora.config.learn import LEARN
from fsdp_qlora.config.marks import (
    MAY_DIFFER,
    NOT_EMPTY,
    NOT_NEGATIVE,
    OF_RESULT,
    PER_NODE,
    SHARE,
    SHARE_BELOW_1,
    Limit,
    at_least,
    of_quantizer,
    one_of_names,
)
from fsdp_qlora.config.train_types import TRAIN_TYPES


@dataclass(frozen=True)
class BaseOptions:
    """Options of the base model and of the rows."""

    # == model ==
    model_name: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE, OF_RESULT] = "Qwen/Qwen3-8B-Base"
    """Name on the Hugging Face hub, or local folder, of the decoder-only model to fine-tune."""
    train_type: Annotated[str, one_of_names(TRAIN_TYPES), OF_RESULT] = "qlora"
    """Part of the model that trains. An adapter on a base in 4 bits (qlora, as custom_qlora), 8 to
    2 bits by HQQ (hqq_lora), 8 bits (int8_lora) or 16 bits (lora, as custom_lora); a DoRA adapter
    (bnb_dora, hqq_dora, dora); the blocks that `expand` inserted into a quantized base
    (bnb_llama_pro, hqq_llama_pro); or all weights (full).
    """
    precision: Annotated[
        Literal[
            "auto",
            "fp32",
            "bf16",
            "fp16",
            "fp16_autocast",
            "bf16_autocast",
            "bf16_buffers_autocast",
        ],
        OF_RESULT,
    ] = "auto"
    """Number format of the computation; auto is bf16 on GPUs that support it, fp16 on older GPUs
    and fp32 on the CPU. Trainable weights are kept in fp32; with fp16 the loss is scaled, and a
    step whose gradients overflow is skipped.
    """
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "flash_attention_2", "eager"], MAY_DIFFER
    ] = "auto"
    """Attention kernels; auto uses PyTorch's flash kernel or flash-attn on Ampere and newer GPUs,
    else SDPA, or eager for models that do not support SDPA.
    """
    trust_remote_code: Annotated[bool, MAY_DIFFER] = False
    """Run Python code from the model's files, with your permissions. Models that transformers does
    not know need it; read that code first.
    """
    quant_type: Annotated[
        Literal["auto", "nf4", "fp4", "mxfp4", "nvfp4", "fp8"], of_quantizer("bnb_4bit")
    ] = "auto"
    """Format of the frozen base: nf4 or fp4 of bitsandbytes, or one in which models are served:
    mxfp4 (4.25 bits per weight), nvfp4 (4.5) or fp8 (8, with a scale for each row). auto keeps the
    weights of a model that is published in one of these as they are, and is nf4 for others.
    """
    double_quant: Annotated[bool, of_quantizer("bnb_4bit")] = True
    """Quantize the scales of nf4's and fp4's blocks too, which saves about 0.4 bits per weight."""
    n_bits: Annotated[
        int, Limit(lambda value: value in (8, 4, 3, 2), "8, 4, 3 or 2"), of_quantizer("hqq")
    ] = 4
    """Bits per weight of an HQQ base: 8, 4, 3 or 2; fewer save memory and cost quality."""
    group_size: Annotated[
        int,
        Limit(lambda value: value >= 32 and value % 32 == 0, "a multiple of 32"),
        of_quantizer("hqq"),
    ] = 64
    """Number of weights that share a scale and a zero point in an HQQ base, a multiple of 32;
    smaller groups are more accurate, and each takes 32 bits.
    """
    int8_threshold: Annotated[float, NOT_NEGATIVE, of_quantizer("int8")] = 6.0
    """Magnitude from which activations are not rounded to 8 bits with an int8 base (LLM.int8's
    outliers); 0 rounds all of them, which is faster and less accurate.
    """
    allow_unquantized: Annotated[bool, MAY_DIFFER, OF_RESULT] = False
    """Train although less than 90% of the parameters of the decoder blocks can be quantized
    (embeddings and head do not count); the others take their full memory.
    """
    quant_cache: Annotated[str, NOT_EMPTY, MAY_DIFFER, PER_NODE] = "auto"
    """Folder that caches the quantized weights (in 4 bits a quarter of the model's size) for later
    starts; auto is quantized/ in FSDP_QLORA_CACHE or in the user's cache folder, off disables the
    cache.
    """

    # == data ==
    dataset: Annotated[tuple[str, ...], NOT_EMPTY, MAY_DIFFER, PER_NODE] = ("alpaca_sample",)
    """Rows to train on, one or more of: alpaca, alpaca_sample, alpaca_demo (no network needed),
    guanaco, sql, orca_math, dummy (to measure speed), owner/name:config[split][:1000] on the
    Hugging Face hub, a .json, .jsonl, .csv, .tsv, .parquet or .txt file (or one of these with .gz
    or .zst), or a folder of them or of datasets.save_to_disk. Several are joined; with weights, as
    in a.jsonl:0.7 b.parquet:0.3, an epoch has these shares and ends before a dataset would repeat a
    row; the next epoch continues with the next rows of each.
    """
    dataset_samples: Annotated[int | None, at_least(1)] = None
    """Number of first rows to use of each dataset; by default all (alpaca_sample, orca_math and
    dummy have their own sizes).
    """
    dataset_format: Annotated[
        Literal[
            "auto",
            "alpaca",
            "pretokenized",
            "preference",
            "messages_rejected",
            "json_pair",
            "ratings",
            "label",
            "rating",
            "messages",
            "sharegpt",
            "dolly",
            "question_answer",
            "prompt_completion",
            "guanaco",
            "text",
            "responses",
            "items",
            "request_response",
            "atif",
            "verifiers",
        ],
        OF_RESULT,
    ] = "auto"
    """Format of the rows; auto detects it from the names of the columns."""
    columns: Annotated[tuple[str, ...], MAY_DIFFER, OF_RESULT] = ()
    """Columns of the dataset whose names differ from the format's, as FORMAT'S=DATASET'S, such as
    instruction=task,output=result; ignore=NAME leaves out a column that makes rows invalid."""
    prompt_template: Annotated[str | None, MAY_DIFFER, PER_NODE, OF_RESULT] = None
    """Text around instructions and questions: alpaca, question_answer, plain, vicuna, chat (the
    model's own chat template), a text file with {instruction}, {input} and {system}; or a chat
    template for models without one: chatml, user_assistant, a .jinja file. By default the model's
    chat template, also for instructions and questions if the model was made for chats (it stops at
    a token that its template writes); otherwise the format's text.
    """
    learn: Annotated[tuple[str, ...], LEARN, MAY_DIFFER, OF_RESULT] = ("assistant",)
    """Tokens to train on: assistant (every turn of the assistant, or every response), last (only
    the last one), final (the answers behind the last result of a tool, else the last one) or all
    (the prompts too). Further words leave parts of these turns out, which are then only read:
    -reasoning, -empty_reasoning (blocks without words) and -tool_calls, as in assistant,-reasoning.
    An empty block that a chat template writes by itself is only read, unless +empty_reasoning is
    given.
    """
    context_length: Annotated[Literal["auto"] | int, at_least(2), OF_RESULT] = "auto"
    """Maximum tokens per row; longer rows are truncated, and a row whose prompt fills it is left
    out. auto is the smallest power of two that keeps 99% of the rows of each dataset whole, at most
    4,096; a resumed run keeps its value.
    """
    max_bad_rows: Annotated[float, SHARE, MAY_DIFFER] = 0.01
    """Maximum share of rows that are left out, because they are malformed or their prompt fills the
    context; with more, the run does not start. rejected.jsonl lists them.
    """
    shuffle: bool = True
    """Take the rows in a random order, another one in each epoch. false takes them in their own
    order in every epoch, as for a curriculum, and several datasets one after the other.
    """
    drop_duplicates: bool = False
    """Leave out rows to train on that equal an earlier or a held-out one: in their tokens, what is
    learned of them, and images. Without it they are counted, where there are at most 134 million
    tokens. Prompts are compared by their tokens alone.
    """
    eval_fraction: Annotated[float, SHARE_BELOW_1] = 0.0
    """Share of the rows to hold out for evaluation, such as 0.05."""
    eval_dataset: Annotated[tuple[str, ...], MAY_DIFFER, PER_NODE] = ()
    """Rows for evaluation, named as in dataset: rows.jsonl, folder[test], owner/name[validation].
    Several are evaluated one by one, as in chat=chat.jsonl code=code.jsonl; the first one's loss
    decides which checkpoint is the best.
    """
