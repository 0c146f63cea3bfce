"""Pages of docs/reference for Python: every promised name, with signature, docstring and example.

The pages are read from the source, without an import, so that they are the same on every Python and
need no extra. `gen_reference.py` writes them.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGES = {
    "client": "breadbox",
    "policies": "breadbox_policies",
    "learner": "breadbox_learner",
    "adapters": "breadbox_adapters",
    "offline": "breadbox_offline",
    "rollout_worker": "breadbox_rollout",
}

CALLS = ("connect", "local_server", "Client", "Appender", "StepWriter")
DATA = ("Fragment", "fragment_of", "true_next_obs")

MORE: dict[str, dict[str, Sequence[str]]] = {
    "The mirror: steps in the memory of a learner": {
        "breadbox.mirror": (
            *("ReplayMirror", "StepMemory", "Prioritised", "StepBatch", "SequenceBatch"),
        )
    },
    "Tests of your own": {"breadbox.testing": ("start_server",)},
    "Policies": {
        "breadbox_policies": (
            *("make_policy", "policy_weights", "PolicyModule", "ActResult", "Evaluation"),
        )
    },
    "Learners": {
        "breadbox.loader": ("FragmentLoader",),
        "breadbox.writing.advantages": ("estimate_advantages", "find_successors"),
        "breadbox_learner.training.dataset": ("FragmentDataset",),
    },
    "Adapters": {
        "breadbox_adapters.sb3": (
            *("BreadboxReplayBuffer", "BreadboxNStepReplayBuffer", "BreadboxHerReplayBuffer"),
        ),
        "breadbox_adapters.cleanrl": ("ReplayBuffer", "PrioritizedReplayBuffer"),
        "breadbox_adapters.torchrl": ("BreadboxReplayBuffer",),
        "breadbox_adapters.minestudio": ("ReplayBufferInterface",),
    },
    "Recorded episodes": {
        "breadbox_offline": (
            *("Dataset", "OfflinePreLearner", "PreLearnerConfig", "StepSampling", "BufferMixer"),
            *("ValidationPolicy", "FindingPolicy", "FindingKind"),
        ),
        "breadbox_offline.training.cloning": ("clone_policy", "CloningConfig"),
        "breadbox_offline.training.stages": ("make_returns_to_go",),
    },
    "Episodes without a service": {
        "breadbox_rollout.acting.generator": ("EpisodeGenerator", "GeneratorOptions"),
        "breadbox_rollout.acting.inference": ("Inference",),
        "breadbox_rollout.environments.environments": ("EnvSpec",),
    },
}
"""What is documented beside `breadbox` itself: headings, modules, names."""

STARS: dict[griffe.ParameterKind | None, str] = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
}
CODE_SHOWN = 900
"""Characters of an example that is repeated at the names that it uses; a longer one is linked."""
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A promised name."""

    page: str
    path: str
    """What users import, such as `breadbox.mirror.ReplayMirror`."""
    thing: griffe.Object

    @property
    def name(self) -> str:
        """The name without its module."""
        return self.path.rpartition(".")[2]

    @property
    def title(self) -> str:
        """Its heading; names of `breadbox` stand alone."""
        return self.path.removeprefix("breadbox.types.").removeprefix("breadbox.")


# What is there ---------------------------------------------------------------------------------


@cache
def modules() -> griffe.ModulesCollection:
    """Every package, read from its source."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / folder for folder in PACKAGES],
        docstring_parser=griffe.Parser.google,
        extensions=griffe.load_extensions(),
        allow_inspection=False,
    )
    for package in PACKAGES.values():
        loader.load(package)
    loader.resolve_aliases()
    return loader.modules_collection


def found(path: str) -> griffe.Object:
    """The object that users get by a path."""
    thing = modules()[path]
    target = thing.final_target if isinstance(thing, griffe.Alias) else thing
    assert isinstance(target, griffe.Object)
    return target


@cache
def sections() -> dict[str, dict[str, list[Entry]]]:
    """Entries by page and heading."""
    homes = homes_of_breadbox()
    rest = sorted(set(homes) - {*CALLS, *DATA})
    types = sorted(name for name in modules()["breadbox.types"].members if name[0].isalpha())
    here = {
        "Calls": [entry(f"breadbox.{name}", homes[name]) for name in CALLS],
        "Data": [entry(f"breadbox.{name}", homes[name]) for name in DATA],
        "Values": [entry(f"breadbox.{name}", homes[name]) for name in rest],
        "Types for annotations": [
            entry(f"breadbox.types.{name}", f"breadbox.types.{name}") for name in types
        ],
    }
    more = {
        heading: [
            entry(f"{module}.{name}", f"{module}.{name}", "tools.md")
            for module, names in places.items()
            for name in names
        ]
        for heading, places in MORE.items()
    }
    return {"python.md": here, "tools.md": more}


def homes_of_breadbox() -> dict[str, str]:
    """Where each name of `breadbox` that is no module is defined."""
    tree = ast.parse((ROOT / "client/breadbox/__init__.py").read_text())
    (homes,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    return {
        name: f"breadbox.{home}.{name}"
        for home, names in homes.items()
        for name in names.split()
        if home != "model.errors"
    }


def entry(path: str, home: str, page: str = "python.md") -> Entry:
    """What is known of a name."""
    return Entry(page, path, found(home))


def entries() -> list[Entry]:
    """Every promised name."""
    return [each for page in sections().values() for some in page.values() for each in some]


@cache
def members_of(thing: griffe.Object) -> list[griffe.Function | griffe.Attribute]:
    """Public members of a class, in the order of its source, then those of bases not shown."""
    if not isinstance(thing, griffe.Class):
        return []
    shown = {id(each.thing) for each in entries()}
    is_shown = any(id(base) in shown for base in thing.mro())
    members = thing.members if is_shown else thing.all_members
    targets = {
        name: member.final_target if isinstance(member, griffe.Alias) else member
        for name, member in members.items()
        if not name.startswith("_")
    }
    return [
        each for each in targets.values() if isinstance(each, griffe.Function | griffe.Attribute)
    ]


def methods_of(thing: griffe.Object) -> Iterator[griffe.Function]:
    """Its public methods."""
    return (each for each in members_of(thing) if isinstance(each, griffe.Function))


# Examples --------------------------------------------------------------------------------------


def doc(thing: griffe.Object) -> str:
    """Its docstring, or nothing."""
    return thing.docstring.value if thing.docstring else ""


@cache
def places() -> dict[str, tuple[str, griffe.Object]]:
    """Every name and method by its link, with its title."""
    every = {}
    for each in entries():
        every[link_to(each.title, each.page)] = (each.title, each.thing)
        for method in methods_of(each.thing):
            title = f"{each.name}.{method.name}"
            every.setdefault(link_to(title, each.page), (title, method))
    return every


@cache
def examples() -> list[tuple[str, str]]:
    """Every example in docstrings and documents, each with a link to its place."""
    shown = [
        (link, code) for link, (_, thing) in places().items() for code in CODE.findall(doc(thing))
    ]
    for homes in MORE.values():
        for module in homes:
            shown += [(f"`help({module})`", code) for code in CODE.findall(doc(found(module)))]
    for page in [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("guides/*.md"))]:
        text = page.read_text()
        link = f"[{text.partition('# ')[2].partition(chr(10))[0]}](../{page.relative_to(DOCS)})"
        shown += [(link, code) for code in CODE.findall(text)]
    return shown


def example_of(each: Entry) -> Iterator[str]:
    """Code that uses a name, or a link to a call that takes or returns it and has an example."""
    if "```python" in doc(each.thing):
        return
    word = re.compile(rf"^[^#]*\b{each.name}\b", re.MULTILINE)
    module = each.path.rpartition(".")[0]
    is_shared = [other.name for other in entries()].count(each.name) > 1
    for link, code in examples():
        if word.search(code) and (module in code or not is_shared):
            yield f"Example, of {link}:\n" if len(code) < CODE_SHOWN else f"Example: {link}.\n"
            if len(code) < CODE_SHOWN:
                yield f"```python\n{textwrap.dedent(code)}```\n"
            return
    used = re.compile(rf"\b{each.name}\b")
    for link, (title, thing) in places().items():
        if thing is each.thing:
            continue
        for member in members_of(thing):
            if isinstance(member, griffe.Attribute) and used.search(str(member.annotation)):
                yield f"`{member.name}` of {link}.\n"
                return
        if isinstance(thing, griffe.Attribute) and used.search(str(thing.value)):
            yield f"Part of {link}.\n"
            return
        if not has_example(title, thing):
            continue
        if isinstance(thing, griffe.Function) and used.search(str(thing.returns)):
            yield f"Returned by {link}, which has an example.\n"
            return
        if isinstance(thing, griffe.Function | griffe.Class) and any(
            used.search(str(parameter.annotation)) for parameter in thing.parameters
        ):
            yield f"An argument of {link}, which has an example.\n"
            return


def has_example(title: str, thing: griffe.Object) -> bool:
    """True if a docstring or a document shows how it is used."""
    return "```python" in doc(thing) or title.rpartition(".")[2] in shown_words()


@cache
def shown_words() -> set[str]:
    """Every word of every example."""
    return {word for _, code in examples() for word in re.findall(r"\w+", code)}


def link_to(title: str, page: str) -> str:
    """A link to a heading of the reference."""
    return f"[`{title}`]({page}#{anchor(title)})"


def anchor(title: str) -> str:
    """What a heading is linked by, at a code host and in the site."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


# Markdown --------------------------------------------------------------------------------------


def block(each: Entry) -> Iterator[str]:
    """Everything about a name."""
    yield f"### {each.title}\n"
    yield from body(each.thing, each.path)
    yield from example_of(each)
    shown = {id(other.thing): other for other in entries()}
    bases = each.thing.mro() if isinstance(each.thing, griffe.Class) else []
    for base in (shown[id(base)] for base in bases if id(base) in shown):
        yield f"Everything else is as in {link_to(base.title, base.page)}.\n"
    yield from fields(each.thing)
    for method in methods_of(each.thing):
        title = f"{each.name}.{method.name}"
        yield f"#### {title}\n"
        yield from body(method, title)


def body(thing: griffe.Object, path: str) -> Iterator[str]:
    """Signature and docstring."""
    if text := signature(thing, path):
        yield f"```text\n{text}\n```\n"
    if thing.docstring:
        for section in thing.docstring.parsed:
            yield from said(section)


def signature(thing: griffe.Object, path: str) -> str:
    """How it is called; nothing for what is not."""
    if isinstance(thing, griffe.Attribute):
        return f"{path} = {thing.value}"
    if not isinstance(thing, griffe.Class | griffe.Function):
        return ""
    if isinstance(thing, griffe.Class) and {"Enum", "StrEnum", "TypedDict", "Protocol"} & {
        str(base).rpartition(".")[2] for base in thing.bases
    }:
        return f"class {path}"
    shown = list(parameters(thing.parameters))
    returns = f" -> {thing.returns}" if isinstance(thing, griffe.Function) else ""
    line = f"{path}({', '.join(shown)}){returns}"
    if len(line) <= 100:
        return line
    return f"{path}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"


def parameters(every: Iterable[griffe.Parameter]) -> Iterator[str]:
    """Parameters as they stand in a signature, without `self`."""
    star_is_shown = False
    for each in every:
        if each.name in ("self", "cls"):
            continue
        kind = each.kind
        if kind is griffe.ParameterKind.var_positional:
            star_is_shown = True
        if kind is griffe.ParameterKind.keyword_only and not star_is_shown:
            yield "*"
            star_is_shown = True
        stars = STARS.get(kind, "")
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        has_default = each.default is not None and not stars
        equals = " = " if annotation else "="
        yield f"{stars}{each.name}{annotation}{f'{equals}{each.default}' if has_default else ''}"


def said(section: griffe.DocstringSection) -> Iterator[str]:
    """A section of a docstring."""
    if isinstance(section, griffe.DocstringSectionText):
        yield section.value.strip() + "\n"
    elif isinstance(section, griffe.DocstringSectionAdmonition):
        yield f"**{section.title}** {section.value.contents}\n"
    elif isinstance(section.value, list):
        yield f"**{section.kind.value.capitalize()}**\n"
        yield "".join(f"- {line}\n" for line in map(item, section.value))


def item(each: griffe.DocstringElement) -> str:
    """One line of a list: an argument, a field, an error."""
    name = getattr(each, "name", "") or ""
    heads = [f"`{name}`"] if name else []
    if each.annotation is not None and str(each.annotation):
        heads.append(f"(`{each.annotation}`)" if name else f"`{each.annotation}`")
    return ": ".join(part for part in (" ".join(heads), " ".join(each.description.split())) if part)


def fields(thing: griffe.Object) -> Iterator[str]:
    """What a class has besides methods: members of an enumeration, fields, properties."""
    if not isinstance(thing, griffe.Class):
        return
    told = doc(thing).partition("Attributes:")[2]
    arguments = {parameter.name for parameter in thing.parameters}
    lines = []
    for target in members_of(thing):
        if not isinstance(target, griffe.Attribute):
            continue
        is_in_signature = target.name in arguments and not target.docstring
        if is_in_signature or re.search(rf"^ *{target.name}: ", told, re.MULTILINE):
            continue
        value = "" if target.value is None or target.annotation else f" = `{target.value}`"
        kind = f" (`{target.annotation}`)" if target.annotation is not None else ""
        first = " ".join(doc(target).split("\n\n")[0].split())
        lines.append(f"- `{target.name}`{kind}{value}{f': {first}' if first else ''}\n")
    if lines:
        yield "**Fields**\n"
        yield "".join(lines)


# Pages -----------------------------------------------------------------------------------------


def page(title: str, mark: str, intro: str, name: str) -> str:
    """A page of names, with their list first."""
    index = [
        f"- **{heading}**: {', '.join(link_to(each.title, name) for each in some)}\n"
        for heading, some in sections()[name].items()
    ]
    parts = [f"# {title}\n\n{mark}\n", intro, "".join(index)]
    for heading, some in sections()[name].items():
        parts.append(f"## {heading}\n")
        parts += [part for each in some for part in block(each)]
    return "\n".join(parts)


def python(mark: str) -> str:
    """What `import breadbox` gives."""
    intro = (
        "Calls are in `breadbox`, types for annotations in `breadbox.types`, "
        "[errors](errors.md) in `breadbox.errors`.\n"
        "`breadbox.aio` has [the same for asyncio](aio.md). The mirror, adapters, policies, "
        "recorded episodes and fixtures for tests are [on a page of their own](tools.md).\n"
        "[Upgrading](../upgrade.md) promises how long these names stay.\n"
    )
    return page("Python", mark, intro, "python.md")


def tools(mark: str) -> str:
    """What is documented beside the library itself."""
    intro = "The [calls of a client](python.md) are on another page; so are [errors](errors.md).\n"
    return page("Python: mirror, adapters, policies, tests", mark, intro, "tools.md")


def asyncio(mark: str) -> str:
    """What `breadbox.aio` has: signatures, since all else is the same."""
    parts = [
        f"# Python: asyncio\n\n{mark}\n",
        "`breadbox.aio` has the operations of [`breadbox.Client`](python.md#client), awaited: "
        "arguments, results and errors are the same. `async with` and `async for` take the place "
        "of `with` and `for`.\n",
        doc(found("breadbox.aio.local_server")) + "\n",
    ]
    for name in ("connect", "Client", "Lease", "Service"):
        thing = found(f"breadbox.aio.{name}")
        parts.append(f"## aio.{name}\n")
        shown = [thing] if isinstance(thing, griffe.Function) else list(methods_of(thing))
        for each in shown:
            title = f"aio.{name}" if each is thing else f"{name}.{each.name}"
            begins = "async " if "async" in each.labels else ""
            parts.append(f"```text\n{begins}{signature(each, title)}\n```\n")
    return "\n".join(parts)


PAGES = {"python.md": python, "aio.md": asyncio, "tools.md": tools}
