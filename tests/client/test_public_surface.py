"""What users can rely on: names, and what they cost. A change here is for the changelog."""

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import torch

import breadbox
from breadbox import aio, client, lease, stores
from breadbox.model import errors, types
from breadbox.model.moved import TO_SERVICE
from breadbox.writing import appender
from support.hidden_modules import hiding, modules_beyond

PUBLIC = [
    "AdmissionOutcome",
    "Appender",
    "AppenderOptions",
    "AssemblyPolicy",
    "BufferConfig",
    "Client",
    "EpisodeEnd",
    "EpisodeReport",
    "Fragment",
    "FragmentMetadata",
    "FullPolicy",
    "LeaseExpiryPolicy",
    "MinimumChunks",
    "Part",
    "ReleaseMode",
    "ReplayBufferError",
    "SampleToInsertRatio",
    "SchemaPolicy",
    "Sequence",
    "ServerOptions",
    "StalePolicy",
    "StepWriter",
    "Tls",
    "WaitElapsedError",
    "__version__",
    "aio",
    "connect",
    "errors",
    "fragment_of",
    "local_server",
    "true_next_obs",
    "types",
]

TYPES = [
    "AppendReply",
    "AppendResult",
    "AppenderCounts",
    "ArrayType",
    "Autoreset",
    "Batch",
    "BufferDescription",
    "BufferState",
    "ChunkEvent",
    "Device",
    "FragmentRead",
    "FragmentReference",
    "GroupEnd",
    "GroupEndReason",
    "Lease",
    "LeaseGrant",
    "LoadedRead",
    "LoaderKeywords",
    "LoaderOptions",
    "MemberDescription",
    "ModelState",
    "OpenGroup",
    "PackedBatch",
    "PaddedBatch",
    "PayloadReference",
    "PayloadStore",
    "PrioritiesReply",
    "PublishReply",
    "QuarantinedFragment",
    "Service",
    "Stack",
    "StepClient",
    "StepCounts",
    "StoreConfig",
    "Subscription",
    "Ticket",
    "TicketGrant",
    "TicketRenewal",
    "TorchDevice",
    "Tree",
    "WorkerSteps",
]

OPAQUE = [breadbox.types.Stack]
"""Handed on as it is: what it holds is not for users."""

ERRORS = {
    "BackpressureError": "ReplayBufferError",
    "BufferExistsError": "ReplayBufferError",
    "BufferNotFoundError": "ReplayBufferError",
    "ClosedError": "ReplayBufferError",
    "DeadlineExceededError": "ReplayBufferError",
    "GroupEndedError": "ReplayBufferError",
    "InternalError": "ReplayBufferError",
    "InvalidRequestError": "ReplayBufferError",
    "LeaseExpiredError": "ReplayBufferError",
    "LimitExceededError": "ReplayBufferError",
    "MemberNotFoundError": "ReplayBufferError",
    "NotSupportedError": "ReplayBufferError",
    "PartConflictError": "ReplayBufferError",
    "PayloadCorruptError": "StoreError",
    "PayloadFormatError": "StoreError",
    "PayloadMissingError": "StoreError",
    "PermissionDeniedError": "ReplayBufferError",
    "ReplayBufferError": "Exception",
    "RequestMismatchError": "ReplayBufferError",
    "RequestNotFoundError": "ReplayBufferError",
    "SubscriptionExistsError": "ReplayBufferError",
    "SubscriptionNotFoundError": "ReplayBufferError",
    "SchemaMismatchError": "ReplayBufferError",
    "SessionEndedError": "ReplayBufferError",
    "SessionInUseError": "ReplayBufferError",
    "StoreError": "ReplayBufferError",
    "StoreFullError": "StoreError",
    "StoreUnavailableError": "StoreError",
    "StoreUrlError": "StoreError",
    "StandbyError": "UnavailableError",
    "TicketNotFoundError": "ReplayBufferError",
    "TlsError": "UnavailableError",
    "TreeMismatchError": "ReplayBufferError",
    "UnauthenticatedError": "ReplayBufferError",
    "UnavailableError": "ReplayBufferError",
    "UnsupportedArrayError": "ReplayBufferError",
    "VersionRegressedError": "ReplayBufferError",
    "WaitElapsedError": "ReplayBufferError",
}


def test_the_public_names_are_these() -> None:
    assert PUBLIC == sorted(breadbox.__all__)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(breadbox, name) is not None
    assert name in dir(breadbox)


def test_the_types_for_annotations_are_these() -> None:
    assert TYPES == sorted(name for name in vars(breadbox.types) if name[0].isalpha())


NEVER_MOVED = {
    *("GroupEnd", "GroupEndReason", "OpenGroup", "PackedBatch", "PaddedBatch", "Service"),
    *("MemberDescription", "WorkerSteps", *(each for each in TYPES if each.startswith("Ticket"))),
}


@pytest.mark.parametrize("name", sorted(set(TYPES) - NEVER_MOVED))
def test_a_type_is_found_under_its_earlier_name_with_a_warning(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"breadbox.{name} is breadbox.types.{name}"):
        assert getattr(breadbox.types, name) is getattr(breadbox, name)


@pytest.mark.parametrize("name", sorted(TO_SERVICE))
def test_a_call_is_found_under_its_earlier_name_with_a_warning(name: str) -> None:
    with breadbox.connect("localhost:1") as connected:
        with pytest.warns(DeprecationWarning, match=f"client.{name} is client.service.{name}"):
            assert getattr(connected.service, name) == getattr(connected, name)
        with pytest.raises(AttributeError, match="no attribute 'no_such'"):
            getattr(connected, "no_such")  # noqa: B009 - type checkers know that it is not there


def test_what_is_listed_is_the_api_and_nothing_else() -> None:
    breadbox.connect  # noqa: B018 - names that were used are kept, and must not add others
    assert PUBLIC == dir(breadbox)


@pytest.mark.parametrize("kind", [breadbox.types.Batch, breadbox.Fragment])
def test_help_tells_each_field_of_what_holds_data(kind: Any) -> None:
    told = inspect.getdoc(kind).partition("Attributes:")[2]
    assert [] == [each.name for each in fields(kind) if f"\n    {each.name}: " not in told]


def test_everything_that_a_public_signature_mentions_is_exported() -> None:
    """Of ours: whoever writes a type annotation for what they were given finds its name."""
    public = [
        getattr(breadbox, name) for name in PUBLIC if not isinstance(getattr(breadbox, name), str)
    ]
    public += [getattr(breadbox.types, name) for name in TYPES]
    public += [aio.Client, aio.Entering, aio.Lease, aio.Service, aio.Ticket]
    public += [aio.connect, aio.local_server]
    public += [stores.Deadline, stores.Foreseen, stores.PayloadReceiver, stores.Segment]
    missing = {
        f"{where} mentions {kind.__module__}.{kind.__qualname__}"
        for thing in public
        if thing not in OPAQUE
        for where, kind in mentioned(thing)
        if kind not in public and getattr(errors, kind.__name__, None) is not kind
    }
    assert set() == missing


def mentioned(thing: object) -> Iterator[tuple[str, type]]:
    """Classes of ours in the signatures of a function, or of a class' methods and its fields."""
    if inspect.isclass(thing) and not isinstance(thing, type(inspect)):
        name = thing.__qualname__
        hints = hints_of(thing)
        yield from (
            (f"{name}.{key}", kind)
            for key, hint in hints.items()
            if key[0] != "_"
            for kind in ours(hint)
        )
        for key, member in vars(thing).items():
            if key.startswith("_"):
                continue
            function = member.fget if isinstance(member, property) else inspect.unwrap(member)
            if inspect.isfunction(function):
                yield from (
                    (f"{name}.{key}", kind)
                    for hint in hints_of(function).values()
                    for kind in ours(hint)
                )
    elif inspect.isfunction(thing):
        function = inspect.unwrap(thing)
        yield from (
            (thing.__qualname__, kind)
            for hint in hints_of(function).values()
            for kind in ours(hint)
        )


def hints_of(thing: Any) -> dict[str, Any]:
    """Resolved annotations; what is imported for type checkers alone is looked up as they do."""
    names = {"torch": torch, "Client": client.Client, "aio": aio}
    spaces = {**names, **vars(sys.modules[thing.__module__])}
    return get_type_hints(thing, globalns=spaces)


def ours(hint: Any) -> Iterator[type]:
    """Classes of the library somewhere in an annotation."""
    for part in get_args(hint):
        yield from ours(part)
    kind = get_origin(hint) or hint
    if inspect.isclass(kind) and kind.__module__.partition(".")[0] == "breadbox":
        yield kind


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        breadbox.no_such_name  # noqa: B018


def test_the_errors_and_their_bases_are_these() -> None:
    found = {
        name: kind.__mro__[1].__name__
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    }
    assert ERRORS == found


@pytest.mark.parametrize("module", [client, aio, lease, appender, types, errors])
def test_no_type_of_grpc_or_protobuf_is_in_a_public_signature(module: ModuleType) -> None:
    leaks = []
    for kind_name, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ != module.__name__:
            continue
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_"):
                continue
            text = str(inspect.signature(method))
            if "grpc" in text or "_pb2" in text or "protobuf" in text:
                leaks.append(f"{kind_name}.{name}{text}")
    assert [] == leaks


def test_importing_the_package_imports_no_dependency() -> None:
    """`breadbox --help` must not pay for gRPC and numpy."""
    code = "import sys, breadbox; print({'grpc', 'numpy', 'redis'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ("set()\n", "") == (done.stdout, done.stderr)


CALLS = ("connect", "fragment_of", "local_server", "true_next_obs")

SHOWN = {
    "breadbox.mirror": ["Prioritised", "ReplayMirror", "SequenceBatch", "StepMemory"],
    "breadbox.testing": ["start_server"],
    "breadbox.writing.advantages": ["estimate_advantages", "find_successors"],
    "breadbox_adapters.cleanrl": ["ReplayBuffer"],
    "breadbox_adapters.minestudio": ["ReplayBufferInterface"],
    "breadbox_adapters.sb3": [
        *("BreadboxHerReplayBuffer", "BreadboxNStepReplayBuffer", "BreadboxReplayBuffer"),
    ],
    "breadbox_adapters.torchrl": ["BreadboxReplayBuffer"],
    "breadbox_learner.training.dataset": ["FragmentDataset"],
    "breadbox_offline": [
        *("BufferMixer", "Dataset", "FindingKind", "FindingPolicy", "OfflinePreLearner"),
        *("PreLearnerConfig", "StepSampling", "ValidationPolicy"),
    ],
    "breadbox_offline.training.cloning": ["CloningConfig", "clone_policy"],
    "breadbox_offline.training.stages": ["make_returns_to_go"],
    "breadbox_policies": [
        *("ActResult", "Evaluation", "PolicyModule", "make_policy", "policy_weights"),
    ],
    "breadbox_rollout.acting.generator": ["EpisodeGenerator", "GeneratorOptions"],
    "breadbox_rollout.acting.inference": ["Inference"],
    "breadbox_rollout.environments.environments": ["EnvSpec"],
}
"""Names outside `breadbox` that README, docs and examples import: part of the promise, too."""


def test_every_name_that_documents_import_is_promised() -> None:
    root = Path(__file__).resolve().parents[2]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "examples").glob("*.*")]
    found: dict[str, set[str]] = {}
    for page in pages:
        for module, names in re.findall(
            r"from (breadbox[_.][\w.]+) import ([\w, ]+)", page.read_text()
        ):
            if module not in ("breadbox.errors", "breadbox.types"):  # Promised whole.
                found.setdefault(module, set()).update(re.findall(r"\w+", names))
    assert SHOWN == {module: sorted(found[module]) for module in sorted(found)}


@pytest.mark.parametrize("module", SHOWN)
def test_every_promised_name_is_there_and_says_what_it_is(module: str) -> None:
    found = importlib.import_module(module)
    assert [] == [name for name in SHOWN[module] if not inspect.getdoc(getattr(found, name))]


@pytest.mark.timeout(120)  # It reads every module.
def test_every_promised_name_is_in_the_reference_with_an_example() -> None:
    pytest.importorskip("griffe", reason="the extra docs is not installed")
    from scripts import gen_python_reference as reference

    found = {each.path: each for each in reference.entries()}
    no_entry = {"breadbox.ReplayBufferError", "breadbox.WaitElapsedError"}  # In errors.md.
    promised = {f"breadbox.{name}" for name in PUBLIC if name[0].isupper() or name in CALLS}
    promised |= {f"breadbox.types.{name}" for name in TYPES}
    promised |= {f"{module}.{name}" for module, names in SHOWN.items() for name in names}

    assert set() == promised - no_entry - set(found)
    assert [] == [
        path
        for path, each in found.items()
        if "```python" not in reference.doc(each.thing) and not any(reference.example_of(each))
    ]


def test_the_reference_can_be_read_without_building_the_site() -> None:
    root = Path(__file__).resolve().parents[2] / "docs"
    unlinked = [
        page.name
        for page in sorted(root.glob("*.md"))
        if "](reference/python.md)" not in page.read_text()
    ]
    assert [] == unlinked
    text = (root / "reference" / "python.md").read_text()
    for shown in ("### Client\n", "#### Client.fetch\n", "**Raises**\n", "```python\n"):
        assert shown in text


def test_modules_of_the_promise_can_be_imported_as_such() -> None:
    for name in ("errors", "types", "testing", "mirror", "aio"):
        assert importlib.import_module(f"breadbox.{name}") is getattr(breadbox, name)


def test_a_star_brings_what_needs_no_extra() -> None:
    program = f"{hiding(modules_beyond())}from breadbox import *\nprint(connect, types.Batch)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert 0 == done.returncode, done.stderr.decode()
