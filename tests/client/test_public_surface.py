"""What users can rely on: names, and what they cost. A change here is for the changelog."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import breadbox
from breadbox import aio, appender, client, errors, lease, types

PUBLIC = [
    "AdmissionOutcome",
    "AppendResult",
    "Appender",
    "BufferConfig",
    "BufferDescription",
    "Client",
    "EpisodeEnd",
    "EpisodeReport",
    "Fragment",
    "FragmentReference",
    "FullPolicy",
    "Lease",
    "LeaseExpiryPolicy",
    "MinimumChunks",
    "ModelState",
    "ReleaseMode",
    "ReplayBufferError",
    "SampleToInsertRatio",
    "Tls",
    "WaitElapsedError",
    "aio",
    "connect",
    "errors",
    "local_server",
]

ERRORS = {
    "BackpressureError": "ReplayBufferError",
    "BufferExistsError": "ReplayBufferError",
    "BufferNotFoundError": "ReplayBufferError",
    "ClosedError": "ReplayBufferError",
    "DeadlineExceededError": "ReplayBufferError",
    "InternalError": "ReplayBufferError",
    "InvalidRequestError": "ReplayBufferError",
    "LeaseExpiredError": "ReplayBufferError",
    "LimitExceededError": "ReplayBufferError",
    "NotSupportedError": "ReplayBufferError",
    "PayloadCorruptError": "StoreError",
    "PayloadFormatError": "StoreError",
    "PayloadMissingError": "StoreError",
    "PermissionDeniedError": "ReplayBufferError",
    "ReplayBufferError": "Exception",
    "RequestMismatchError": "ReplayBufferError",
    "RequestNotFoundError": "ReplayBufferError",
    "SessionEndedError": "ReplayBufferError",
    "StoreError": "ReplayBufferError",
    "StoreFullError": "StoreError",
    "StoreUnavailableError": "StoreError",
    "StoreUrlError": "StoreError",
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
