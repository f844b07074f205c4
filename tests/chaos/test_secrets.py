"""Secrets in the environment, in options, configuration files and paths: in nothing that a run
leaves or says.
"""

import json
import os
from pathlib import Path

import pytest

from fsdp_qlora.utils.redact import HIDDEN, _secrets, redact, redact_values
from tests.helpers.models import make_model
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks

IN_ENVIRONMENT = "canary-of-the-environment"
IN_URL = "canary-of-a-url"
LOGIN = f"https://someone:{IN_URL}@example.invalid/rows"
# If it were ever rendered, the run would not end.
HOSTILE_TEMPLATE = (
    "{% for i in range(10**9) %}{% for j in range(10**9) %}{{ i }}{% endfor %}{% endfor %}"
)


def train_with_secrets(folder: Path, argv: list[str], bug: bool) -> int:
    """train.py's main with secrets around it, and with `bug` an exception that carries them."""
    os.environ |= {
        "HF_TOKEN": IN_ENVIRONMENT,
        "FSDP_QLORA_CACHE": str(folder / "cache"),
        "WANDB_MODE": "offline",
    }
    import sys

    import train
    from fsdp_qlora.run import train as run_train

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"could not reach {LOGIN} with {IN_ENVIRONMENT}")

    if bug:
        run_train.prepare_run = fail
    sys.argv = ["train.py", *argv]
    return train.main(argv)


def leaks(folder: Path) -> list[str]:
    """Files below a folder with a secret in them."""
    secrets = [IN_ENVIRONMENT.encode(), IN_URL.encode()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]


def test_no_secret_is_in_any_file_or_line_of_a_run(tmp_path):
    model = make_model(tmp_path / "given" / "model")
    (model / "chat_template.jinja").write_text(HOSTILE_TEMPLATE)
    rows = [*make_rows(200), {"instruction": "a", "output": ""}]
    (data := tmp_path / "given" / IN_ENVIRONMENT).mkdir()
    write_rows(data / "rows.jsonl", rows)
    (tmp_path / "given" / "run.yaml").write_text(f"group: {LOGIN}\nmodel_name: {model}\n")
    left = tmp_path / "left"
    argv = flags(
        config=tmp_path / "given" / "run.yaml",
        dataset=data / "rows.jsonl",
        name=f"run-{IN_ENVIRONMENT}",
    )
    argv += flags(
        output_dir=left / "output", log_to=f"stdout,wandb,project={IN_ENVIRONMENT}", max_steps=1
    )
    statuses, output = on_ranks(2, train_with_secrets, (left, argv, False), left / "logs")
    assert statuses == [0, 0], output
    assert leaks(left) == []
    assert len(list(left.rglob("*.wandb"))) == 1  # it was among the files
    assert (
        HIDDEN in output and f"name=run-{HIDDEN}" in (left / "output" / "config.yaml").read_text()
    )
    [rejected] = map(json.loads, (left / "output" / "rejected.jsonl").read_text().splitlines())
    assert rejected["row"].endswith("rows.jsonl:201") and rejected["reason"] == "empty output"
    # The adapter is for others: it names its base without the path to it on this machine.
    adapter = json.loads((left / "output" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "model"


@pytest.mark.parametrize("case", ["error", "bug"])
def test_a_failing_run_prints_no_secret(case, tmp_path):
    dataset = LOGIN if case == "error" else write_rows(tmp_path / "rows.jsonl", make_rows(8))
    argv = flags(
        dataset=dataset, model_name=make_model(tmp_path / "model"), output_dir=tmp_path / "output"
    )
    statuses, output = on_ranks(
        2, train_with_secrets, (tmp_path, argv, case == "bug"), tmp_path / "logs"
    )
    assert statuses == ([1, 1] if case == "bug" else [2, 2]), output
    assert f"https://{HIDDEN}@example.invalid" in output
    assert leaks(tmp_path / "logs") == []


def test_known_secret_formats_are_hidden_and_common_words_are_not(monkeypatch):
    token = "hf_" + "aB3" * 10
    assert (
        redact(f"token {token}, https://me:pw@host:8080/x?y=1") == f"token {HIDDEN}, "
        f"https://{HIDDEN}@host:8080/x?y=1"
    )
    values = {"a": [f"-{token}-", 1, None], "b": ("x", {"c": token})}
    assert redact_values(values) == {"a": [f"-{HIDDEN}-", 1, None], "b": ("x", {"c": HIDDEN})}
    common = (
        "tokenizer.json",
        "hf_hub",
        "a@b.c",
        "https://huggingface.co/owner/name@main",
        "git@host:owner/name",
    )
    for text in (
        *common,
        "tokens=5, tokenizer=x, bypass=1, sorted(rows, key=len)",
        "s3,provider=AWS,region=eu:bucket",
    ):
        assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (
            "rclone::s3,secret_access_key=a/b+c=,region=eu:bucket",
            "rclone::s3,secret_access_key=S,region=eu:bucket",
        ),
        (":sftp,host=h,pass=abc:folder", ":sftp,host=h,pass=S:folder"),
        (":b2,account=a,key=abc:folder", ":b2,account=a,key=S:folder"),
        (""":drive,token='{"access_token":"a","expiry":"b:c"}':folder""", ":drive,token=S:folder"),
        ("https://x/rows.jsonl?token=abc&rows=3", "https://x/rows.jsonl?token=S&rows=3"),
        (
            "https://x/a?X-Amz-Security-Token=a%2F&X-Amz-Signature=b",
            "https://x/a?X-Amz-Security-Token=S&X-Amz-Signature=S",
        ),
        (
            "https://x/a?api_key=abc https://x/b?AWSAccessKeyId=b",
            "https://x/a?api_key=S https://x/b?AWSAccessKeyId=S",
        ),
    ],
)
def test_secrets_in_rclone_remotes_and_url_queries_are_hidden(text, hidden):
    assert redact(text) == hidden.replace("=S", f"={HIDDEN}") == redact(redact(text))


def test_the_password_in_a_variable_of_rclone_s_is_hidden(monkeypatch):
    monkeypatch.setenv("RCLONE_CONFIG_STORE_PASS", "canary-of-rclone")
    monkeypatch.setenv("GIT_ASKPASS", "not-a-password")
    _secrets.cache_clear()
    try:
        assert redact("a canary-of-rclone, not-a-password") == f"a {HIDDEN}, not-a-password"
    finally:
        _secrets.cache_clear()
