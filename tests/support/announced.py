"""What a server knows of fragments that a producer announced."""

from breadbox.model.fragment import Appendable
from breadbox.model.types import FragmentMetadata, PayloadReference
from breadbox.wire.conversion import METADATA, announcement


def metadata_of(fragment: Appendable, payload: PayloadReference) -> FragmentMetadata:
    """Return the metadata of a fragment with a written payload."""
    return METADATA.read(announcement(fragment, payload))
