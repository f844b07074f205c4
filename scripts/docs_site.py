"""A hook of mkdocs (mkdocs.yml) for pages outside of docs/.

It rewrites links, so that they hold on GitHub and on the site alike.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

# Documents of the repository -> pages of the site.
PAGES = {
    "README.md": "index.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "dev/log.md": "log.md",
    "examples/README.md": "examples/index.md",
    "stand_in/README.md": "stand_in/internals.md",
}


def copied_files() -> Iterator[str]:
    """Paths of the examples' files, which the site has beside their page."""
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in (".ipynb", ".log", ".py", ".sh", ".svg"):
            yield path.relative_to(ROOT).as_posix()


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for path in copied_files():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **others: Any) -> str:
    """The page with its links as the site has them."""
    place = page.file.src_uri
    source = {site: path for path, site in PAGES.items()}.get(place, f"docs/{place}")
    copied = {*copied_files()}

    def rewrite(match: re.Match[str]) -> str:
        label, target, anchor = match.groups(default="")
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        there = PAGES.get(path) or (path if path in copied else None)
        if path.startswith("docs/"):
            there = path.removeprefix("docs/")
        if there is not None:
            return f"[{label}]({os.path.relpath(there, os.path.dirname(place) or '.')}{anchor})"
        return f"[{label}]({config.repo_url}/blob/main/{path})" if config.repo_url else label

    return re.sub(r"\[([^\]]*)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)", rewrite, markdown)
