"""The site of the documents builds without a warning, has no dead link, and fetches nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(580)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does: strictly, so that a warning ends it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return folder


@pytest.mark.long
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    resource = r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//[^>]*>"
    sheet = r"<link[^>]*rel=[\"']?(?:stylesheet|preload|icon)[^>]*href=[\"']?(?:https?:)?//[^>]*>"
    found = [
        f"{page.name}: {tag}"
        for page in site.rglob("*.html")
        for tag in re.findall(f"{resource}|{sheet}", page.read_text())
    ]
    assert [] == found
    for sheet_file in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", sheet_file.read_text())


@pytest.mark.long
def test_what_documents_link_in_the_repository_is_linked_in_the_site(site: Path) -> None:
    home = (site / "index.html").read_text()
    for target in ("operate.html", "security.html", "studies/performance.html"):
        assert f'href="{target}"' in home
    assert 'href="../SECURITY.md"' not in (site / "operate.html").read_text()
    assert "Security</a>" in (site / "operate.html").read_text(), "by its title, not its path"


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "table", "next_page"),
    [
        ("quickstart", "<td>float32</td>", "learner-cookbook.html"),
        ("off-policy", "<td>discount</td>", "my-learner.html#sac-by-the-mirror"),
    ],
)
def test_a_notebook_is_shown_with_what_its_cells_say(
    site: Path, page: str, table: str, next_page: str
) -> None:
    html = (site / f"{page}.html").read_text()
    assert table in html, "a batch, as a table"
    pictures = re.findall(r'<img[^>]* src="(examples/[^"]+\.png)"', html)
    assert [True] == [(site / each).exists() for each in pictures], "the returns, as a plot"
    assert f'href="{next_page}"' in html


@pytest.mark.long
def test_pages_link_the_notebooks_as_pages(site: Path) -> None:
    assert 'href="quickstart.html"' in (site / "testing.html").read_text()
    assert 'href="off-policy.html"' in (site / "my-learner.html").read_text()


@pytest.mark.long
def test_the_site_has_the_reference_of_the_repository(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    for heading in ("connect", "clientload_batch", "bufferconfig"):
        assert f'id="{heading}"' in page
    assert 'href="errors.html"' in page


def test_the_reference_is_that_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gen_reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stdout), done.stdout + done.stderr
