"""What contributors see of the repository: forms that its host can read, and links that lead."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted(
    path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
)
PAGES = ("MAINTAINERS.md", "SUPPORT.md", "SECURITY.md", "CONTRIBUTING.md")


@pytest.mark.parametrize("form", FORMS, ids=lambda path: str(path.stem))
def test_a_form_has_what_the_host_requires_and_asks_for_something(form: Path) -> None:
    read = yaml.safe_load(form.read_text())
    fields = [each for each in read["body"] if each["type"] != "markdown"]

    assert read["name"]
    assert read["description"]
    assert len(fields) == len({each["id"] for each in fields})
    assert all(each["attributes"]["label"] for each in fields)
    assert any(each.get("validations", {}).get("required") for each in fields)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("name", PAGES)
def test_a_link_of_a_page_leads_to_a_heading_that_is_there(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", (ROOT / name).read_text())

    assert links
    for path, anchor in links:
        target = ROOT / (path or name)
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), (path, anchor)
