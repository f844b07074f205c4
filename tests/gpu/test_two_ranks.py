"""Two ranks on one card, which gloo connects: the losses of one rank, a rank without memory, and
the end of a rank.
"""

import json
import signal
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from tests.gpu.cases import COMMON, FP32, HALF, Case, read_reference
from tests.gpu.check import HAS_VALUES, IS_STAND_IN, holds
from tests.gpu.losses import run_cases
from tests.gpu.runs import started, wait_for_step
from tests.helpers.run import flags

# NCCL refuses two ranks on one card; that of the stand-in does not.
BACKEND = "" if IS_STAND_IN else "gloo"
PROGRAM = ["-m", "tests.gpu.programs.train", "--backend", BACKEND]
# In which all ranks must end once one has. The machines that the stand-in runs on may be busy.
SECONDS = 150 if IS_STAND_IN else 40

# transformers reads images of a GPU's models with torchvision, and the stand-in needs values for
# convolutions.
WITHOUT_IMAGES = "" if find_spec("torchvision") else "images need torchvision"
WITHOUT_IMAGES = WITHOUT_IMAGES if HAS_VALUES else "the stand-in has no cuDNN"


def _shared(tolerance: float = FP32, **options: object) -> Case:
    """The rows of a step that one rank has in two micro-batches; auto would replicate models that
    small.
    """
    given = {
        "train_type": "qlora",
        "gradient_accumulation_steps": 1,
        "sharding_strategy": "full_shard",
        **options,
    }
    return Case(given, same_as="qlora", tolerance=tolerance)


# The longest row, which has no image, comes first: on ranks that share the base this was an error
# once.
_IMAGES = {"batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 2, "num_epochs": 2}
_EXPERTS = {"lora_target_parameters": "mlp.experts.gate_up_proj,mlp.experts.down_proj"}
CASES = {
    "bf16": _shared(HALF, precision="bf16"),
    "offloaded": _shared(use_cpu_offload=True),
    # Both ranks have half of each row.
    "context": _shared(
        HALF, precision="bf16", context_parallel_size=2, gradient_accumulation_steps=2
    ),
    "images": replace(_shared(**_IMAGES), model="images"),
    "images, bf16": replace(_shared(HALF, precision="bf16", **_IMAGES), model="images"),
    "experts": replace(_shared(**_EXPERTS), model="moe", same_as="qlora, experts"),
    "full_shard": _shared(),
    "shard_grad_op": _shared(sharding_strategy="shard_grad_op"),
    "ddp": _shared(sharding_strategy="ddp"),
}

BY_NCCL = ["bf16", "offloaded", "context", "experts", "shard_grad_op", "ddp"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Options of a run on rows of which some have images."""
    from tests.parity.test_images import gemma3, make_chats
    from tests.parity.test_multimodal import make_multimodal

    folder = make_multimodal(tmp_path_factory.mktemp("gemma3"), "gemma3")
    gemma3(folder)
    chats = make_chats(folder)[0]
    rows = folder / "rows.jsonl"
    rows.write_text(
        "\n".join(json.dumps(chats[number]) for number in (1, 1, 1, 1, 2, 3, 4, 5)) + "\n"
    )
    return {"model_name": folder, "dataset": rows, "log_to": "stdout", "quant_cache": "off"}


@pytest.fixture(scope="module")
def results(request, inputs, tmp_path_factory):
    """Of the cases that were selected (-k), run together since most of a run is imports."""
    wanted = {
        item.callspec.params["how"]
        for item in request.session.items
        if item.module is request.module
        and "how" in getattr(getattr(item, "callspec", None), "params", {})
    }
    wanted |= {"images"} if "images, bf16" in wanted else set()  # with whose losses it is compared
    cases = {
        name: CASES[name]
        for name in CASES
        if name in wanted and not (WITHOUT_IMAGES and "images" in name)
    }

    def inputs_of(model):
        return request.getfixturevalue("images") if model == "images" else inputs(model)

    return run_cases(cases, inputs_of, tmp_path_factory.mktemp("runs"), ranks=2, backend=BACKEND)


@pytest.fixture(scope="module")
def results_by_nccl(inputs, tmp_path_factory):
    """Of these cases, with the NCCL of a card; on the stand-in all cases are."""
    cases = {name: CASES[name] for name in BY_NCCL}
    return run_cases(cases, inputs, tmp_path_factory.mktemp("by_nccl"), ranks=2, apart=True)


@pytest.mark.parametrize("how", [name for name in CASES if "images" not in name])
def test_two_ranks_have_the_losses_of_one(how, results):
    case = CASES[how]
    result = results[how]
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    expected = read_reference()["losses"][case.same_as]
    assert len(result.losses) == len(expected)
    holds(
        result.losses == pytest.approx(expected, rel=case.tolerance),
        f"{result.losses}, one rank: {expected}",
    )


@pytest.mark.skipif(IS_STAND_IN, reason="the stand-in's NCCL joins the ranks of all other cases")
@pytest.mark.parametrize("how", BY_NCCL)
def test_two_ranks_joined_by_nccl_have_the_losses_of_one(how, results_by_nccl):
    case = CASES[how]
    result = results_by_nccl[how]
    if result.failure:
        pytest.fail(result.failure, pytrace=False)
    assert result.losses == pytest.approx(
        read_reference()["losses"][case.same_as], rel=case.tolerance
    )


@pytest.mark.skipif(bool(WITHOUT_IMAGES), reason=WITHOUT_IMAGES)
@pytest.mark.parametrize("how", ["images", "images, bf16"])
def test_losses_of_images_are_those_of_fp32(how, results):
    if failure := results[how].failure:
        pytest.fail(failure, pytrace=False)
    losses = results[how].losses
    exact = results["images"].losses
    assert len(losses) == 2
    holds(
        losses == pytest.approx(exact, rel=HALF) and 0 not in losses, f"{losses}, in fp32 {exact}"
    )


@pytest.mark.parametrize("apart", [False, True], ids=["gloo", "NCCL"])
def test_all_patterns_of_16_bits_survive_a_gather(apart, tmp_path):
    way = [] if apart else ["--backend", BACKEND]
    with started(
        ["-m", "tests.gpu.programs.patterns", *way], tmp_path, ranks=2, apart=apart
    ) as program:
        statuses = program.wait(240)
        output = program.output()
    assert "words changed" in output, output[-4000:]
    holds(statuses == [0, 0], output[-4000:])


def test_a_killed_rank_is_named_by_the_other_which_ends(inputs, tmp_path):
    options = {**inputs(), **COMMON, "train_type": "qlora", "output_dir": tmp_path / "out"}
    endless = flags(
        **{**options, "max_steps": 100000, "num_epochs": 100000, "gradient_accumulation_steps": 1}
    )
    with started([*PROGRAM, "--", *endless], tmp_path / "logs", ranks=2) as program:
        wait_for_step(program, tmp_path / "out", 2)
        program.kill(1)
        statuses = program.wait(SECONDS)
        output = program.output()
    # A closed connection ends it at once; NCCL waits, and the watchdog says it after 30 s.
    assert statuses[0] in (1, 5) and statuses[1] == -signal.SIGKILL, (statuses, output[-4000:])
    assert ("The connection to another rank was lost") in output or (
        "Rank 1 has sent no heartbeat"
    ) in output


@pytest.mark.parametrize("ranks", [1, 2])
def test_out_of_memory_is_named_with_what_helps_and_ends_all_ranks(ranks, inputs, tmp_path):
    options = {**inputs(), **COMMON, "train_type": "qlora", "output_dir": tmp_path / "out"}
    # The weights take 1 MiB, the activations of 64 rows more than what is left.
    arguments = flags(**{**options, "batch_size": 8, "recompute": "none"})
    began = time.monotonic()
    program = [*PROGRAM, "--memory_mib", 24, "--", *arguments]
    with started(program, tmp_path / "logs", ranks=ranks) as start:
        statuses = start.wait(2 * SECONDS)
        output = start.output()
    assert all(status == 1 for status in statuses), (statuses, output[-4000:])
    assert "ran out of GPU memory" in output, output[-4000:]
    assert "What helps: a smaller --batch_size" in output
    assert time.monotonic() - began < 2 * SECONDS
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()
