"""Hooks of MkDocs: pages from outside docs/, the reference of Python, and links between them all.

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

import breadbox

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

TOOLS = {
    "Tests of your own": ["breadbox.testing"],
    "Payload stores": [
        "breadbox.stores.base.PayloadStore",
        "breadbox.stores.open_store",
    ],
    "Policies": [
        "breadbox_policies.protocol.Policy",
        "breadbox_policies.protocol.PolicyModule",
        "breadbox_policies.networks.make_policy",
        "breadbox_policies.protocol.policy_weights",
    ],
    "For learners": [
        "breadbox.writing.advantages.estimate_advantages",
        "breadbox.writing.advantages.find_successors",
        "breadbox_learner.training.dataset.FragmentDataset",
    ],
    "The mirror: steps in the memory of a learner": [
        "breadbox.mirror.ReplayMirror",
        "breadbox.mirror.StepMemory",
        "breadbox.mirror.Prioritised",
        "breadbox.mirror.StepBatch",
        "breadbox.mirror.SequenceBatch",
    ],
    "Adapters": [
        "breadbox_adapters.sb3",
        "breadbox_adapters.cleanrl",
        "breadbox_adapters.torchrl.BreadboxReplayBuffer",
        "breadbox_adapters.minestudio.ReplayBufferInterface",
    ],
    "Recorded episodes": [
        "breadbox_offline.Dataset",
        "breadbox_offline.OfflinePreLearner",
        "breadbox_offline.BufferMixer",
    ],
}
"""What is documented beside `breadbox` itself, by heading."""

FIRST = {
    "Calls": ["connect", "local_server", "Client", "Lease", "Appender", "StepWriter"],
    "Data": ["Fragment", "fragment_of", "Batch"],
    "Raw calls": ["Service"],
}
"""What of `breadbox` stands before the rest, by heading."""

IN_TYPES = {
    name: home
    for home, name in re.findall(
        r"^from ([\w.]+) import (\w+)", Path(str(breadbox.types.__file__)).read_text(), re.MULTILINE
    )
}
"""Modules that define the names of `breadbox.types`."""

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
    pages["reference/python.md"] = python_page()
    pages["reference/aio.md"] = asyncio_page()
    pages["reference/tools.md"] = tools_page()
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


def python_page() -> str:
    """What `import breadbox` gives, but for modules: what one calls first, then types."""
    intro = "What one calls is in `breadbox`, types for annotations are in `breadbox.types`."
    lines = ["# Python", "", intro, ""]
    first = {name for names in FIRST.values() for name in names}
    homes = breadbox._HOME_OF.items()  # noqa: SLF001 - its names that are no modules
    values = sorted({name for name, home in homes if home != "model.errors"} - first)
    types = sorted(set(IN_TYPES) - first)
    for title, names in {**FIRST, "Values": values, "Types": types}.items():
        lines += [f"## {title}", "", *(block(home_of(name), level=3) for name in names)]
    return "\n".join([*lines, "## Errors", "", block("breadbox.model.errors", level=3)])


def home_of(name: str) -> str:
    """Where a name of `breadbox`, or of `breadbox.types`, is defined."""
    home = breadbox._HOME_OF.get(name)  # noqa: SLF001 - where each name is loaded from
    return f"{IN_TYPES[name] if home is None else f'breadbox.{home}'}.{name}"


def asyncio_page() -> str:
    """What `breadbox.aio` has."""
    names = ("connect", "local_server", "Client", "Lease")
    blocks = [block(f"breadbox.aio.{name}", level=2) for name in names]
    intro = "# asyncio\n\n`breadbox.aio` has the operations of `breadbox.Client`, awaited.\n"
    return "\n".join([intro, *blocks])


def tools_page() -> str:
    """What is documented beside the library itself."""
    lines = ["# Tests, policies, learners", ""]
    for title, paths in TOOLS.items():
        lines += [f"## {title}", "", *(block(path, level=3) for path in paths)]
    return "\n".join(lines)


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


def block(path: str, level: int) -> str:
    """What mkdocstrings makes of a name."""
    return f"::: {path}\n    options:\n      heading_level: {level}\n"
