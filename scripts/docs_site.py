"""Hooks of MkDocs: pages from outside docs/, the notebook, and links between them all.

The documents are written for readers of the repository: README.md links docs/rollout.md, which
links ../SECURITY.md. Here each such link is turned into one between pages of the site, and one to
a file that is no page into that file's name.
"""

import re
import sys
import tempfile
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import gen_limits  # noqa: E402 - MkDocs loads this file by its path

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the repository that are pages of the site."""

LIMITS_PAGE = (
    "# Limits\n\nWhat callers can make the server do or keep, and what happens at the limit.\n\n"
)

NOTEBOOKS = {
    "examples/quickstart.ipynb": "quickstart.md",
    "examples/off_policy.ipynb": "off-policy.md",
}
"""Notebooks, which run when the site is built, and their pages."""
NOTEBOOK_S = 240.0
"""Seconds that one of its cells may take."""

LINK = re.compile(
    r"(?P<before>\[(?P<text>[^\]]*)\]\()(?P<target>(?!\w+:)[^)#\s]+)(?P<heading>#[^)]*)?\)"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that are not in docs/."""
    pages = {target: (ROOT / source).read_text() for source, target in OUTSIDE.items()}
    pages["reference/limits.md"] = LIMITS_PAGE + gen_limits.table()
    images: dict[str, bytes] = {}
    for source, target in NOTEBOOKS.items():
        pages[target], drawn = notebook_page(source)
        images |= drawn
    for path, content in (pages | images).items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    sources = {target: name for name, target in (OUTSIDE | NOTEBOOKS).items()}
    source = sources.get(page.file.src_uri)
    here = PurePosixPath(source or f"docs/{page.file.src_uri}")

    def changed(link: re.Match[str]) -> str:
        target = normpath(str(here.parent / link["target"]))
        path = (OUTSIDE | NOTEBOOKS).get(target, target.removeprefix("docs/"))
        file = files.get_file_from_path(path)
        if file is None:
            return f"{link['text']} (`{target}`)" if link["text"] != target else f"`{target}`"
        is_named = link["text"] in (target, link["target"]) and path.endswith(".md")
        before = f"[{title_of(file)}](" if is_named else link["before"]
        relative = relpath(path, PurePosixPath(page.file.src_uri).parent)
        return f"{before}{relative}{link['heading'] or ''})"

    return LINK.sub(changed, markdown)


def title_of(file: File) -> str:
    """The first heading of a page, which says more to readers of the site than its path."""
    content: str = file.content_string
    return content.partition("# ")[2].partition("\n")[0]


def notebook_page(source: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as it looks once it has run, and its pictures by their paths."""
    notebook = nbformat.read(ROOT / source, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=NOTEBOOK_S, resources=where).execute()
    name = {"unique_key": PurePosixPath(source).stem}  # Of its pictures.
    text, parts = MarkdownExporter().from_notebook_node(notebook, resources=name)
    beside = PurePosixPath(source).parent
    return text, {str(beside / name): data for name, data in parts["outputs"].items()}
