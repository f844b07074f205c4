"""A result is uploaded to the hub; what cannot be uploaded is said before training, or in a
sentence after it.
"""

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import RepositoryNotFoundError

from fsdp_qlora.__main__ import main
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.export import upload
from fsdp_qlora.utils.errors import UserError
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks

TOKEN = "hf_" + "s" * 34


@dataclass
class Hub:
    """The calls of the hub's client that an upload makes. is_private: None before the repository
    was made.
    """

    login: dict[str, Any] = field(default_factory=lambda: {"name": "owner"})
    is_private: bool | None = None
    takes_commits: bool = True
    files: dict[str, bytes] = field(default_factory=dict)

    def whoami(self) -> dict[str, Any]:
        if "status" in self.login:
            error = OSError("refused")
            error.response = SimpleNamespace(status_code=self.login["status"])  # type: ignore[attr-defined]
            raise error
        return self.login

    def repo_info(self, repo: str, *, timeout: float) -> SimpleNamespace:
        if self.is_private is None:
            response: Any = SimpleNamespace(headers={}, request=None)
            raise RepositoryNotFoundError("404", response=response)
        return SimpleNamespace(private=self.is_private)

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        self.is_private = private

    def create_commit(
        self, repo: str, operations: list[CommitOperationAdd], *, commit_message: str
    ) -> None:
        if not self.takes_commits:
            raise OSError(f"no right to write with {TOKEN}\nmore")
        self.files = {
            added.path_in_repo: Path(str(added.path_or_fileobj)).read_bytes()
            for added in operations
        }


def train_with_a_hub_that_fails(argv: list[str], *, is_private: bool | None = None) -> int:
    import train

    os.environ["HF_TOKEN"] = TOKEN
    upload.HfApi = lambda: Hub(is_private=is_private, takes_commits=False)  # type: ignore[assignment, misc]
    return train.main(argv)


def test_a_result_is_uploaded_or_the_failure_is_explained(models, tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(12))
    out = tmp_path / "out"
    made = tmp_path / "made"
    options = {
        "model_name": models(),
        "dataset": rows,
        "max_steps": 2,
        "eval_fraction": 0.1,
        "lora_rank": 2,
    }
    argv = flags(**options, output_dir=out, push_to_hub="owner/result", quant_cache="off")
    public = partial(train_with_a_hub_that_fails, is_private=False)
    statuses, said = on_ranks(1, public, (argv,), tmp_path / "logs_public")
    # before training
    assert statuses == [2] and "owner/result is public" in said and not out.exists()
    statuses, said = on_ranks(2, train_with_a_hub_that_fails, (argv,), tmp_path / "logs")
    assert statuses == [0, 0] and said.count("The upload to owner/result failed: ") == 1, said
    assert "no right to write" in said and TOKEN not in said
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(upload, "HfApi", lambda: hub)
    hub = Hub()
    assert main(["export", str(out), *flags(out=made, push_to_hub="owner/result")]) == 0
    names = json.loads((made / "result.json").read_text())["files"]
    assert hub.files == {name: (made / name).read_bytes() for name in names} and hub.is_private
    assert (
        hub.files["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    )
    assert upload.upload(out, "owner/result") is None
    assert (
        hub.files["best/adapter_config.json"] == (out / "best" / "adapter_config.json").read_bytes()
    )


@pytest.mark.parametrize(
    ("repo", "is_private", "login", "says"),
    [
        ("owner/result", True, {}, None),
        ("owner/new", None, {}, None),
        ("team/new", None, {"orgs": [{"name": "Team"}]}, None),
        ("owner/result", False, {}, "owner/result is public"),
        ("other/result", True, {}, "the login owner may not write there"),
        ("owner/result", True, {"auth": {"accessToken": {"role": "read"}}}, "may not write there"),
        ("owner/result", True, {"status": 401}, "the hub refuses this machine's login"),
        ("owner/result", True, {"status": 500}, None),  # it may answer at the end
        ("owner/result", True, {"token": None}, "there is no login"),
    ],
)
def test_a_repository_is_checked_before_training(repo, is_private, login, says, monkeypatch):
    monkeypatch.setattr(upload, "get_token", lambda: login.get("token", TOKEN))
    monkeypatch.setattr(upload, "HfApi", lambda: Hub({"name": "owner", **login}, is_private))
    for option, value in (("push_to_hub", repo), ("mirror", f"hf:{repo}")):
        config = TrainConfig(**{option: value})
        with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
            upload.check_uploads(config)
        if is_private is False:
            upload.check_uploads(dataclasses.replace(config, **{option: f"{value}:public"}))
