"""Every door that opens a file which a row or an option names refuses what is no file, without waiting for it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_qlora.data.content import BadRow
from fsdp_qlora.data.text.images import keep_all
from fsdp_qlora.data.text.templates import find_template
from fsdp_qlora.training.rl import rewards
from fsdp_qlora.training.rl.source import truncate_rollouts
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import open_named

pytestmark = pytest.mark.quick
# Door -> how it opens a path.
DOORS: dict[str, Callable[[Path], object]] = {
    "an image of a row": lambda path: keep_all([path]),
    "a file of rewards": lambda path: rewards._run_file(path),
    "rollouts.jsonl": lambda path: truncate_rollouts(path, step=1),
    "a prompt template": lambda path: find_template(str(path)),
    "the function for all doors": open_named,
}
REFUSALS = (OSError, BadRow, TrainingError, UserError)
KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", DOORS)
def test_a_door_refuses_what_is_no_file(door: str, kind: str, tmp_path: Path) -> None:
    KINDS[kind](path := tmp_path / "named.png")
    with pytest.raises(REFUSALS, match=r"it is|is no image|a directory|symbolic"):
        DOORS[door](path)


def test_a_link_or_a_long_file_is_refused_where_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "link").symlink_to("a")
    with open_named(tmp_path / "link", most_bytes=3) as file:
        assert file.read() == b"123"
    with pytest.raises(OSError, match="it is a link"):
        open_named(tmp_path / "link", follow=False)
    with pytest.raises(OSError, match="more than"):
        open_named(tmp_path / "a", most_bytes=2)
