"""What a core holds, read from its snapshot."""

from breadbox_server.core.buffers import DEFAULT_BUFFER, BufferSet
from breadbox_server.core.model.ids import BufferName
from breadbox_server.core.snapshot import BufferSnapshot, ChunkSnapshot
from breadbox_server.core.state.chunks import ChunkState


def snapshot_of(buffers: BufferSet, name: BufferName = DEFAULT_BUFFER) -> BufferSnapshot:
    """Everything of one buffer that outlives the process."""
    [found] = [each for each in buffers.snapshot() if each.name == name]
    return found


def held_chunks(buffers: BufferSet, name: BufferName = DEFAULT_BUFFER) -> list[ChunkSnapshot]:
    """The chunks that may be drawn, by age."""
    chunks = [each for each in snapshot_of(buffers, name).chunks if each.state is ChunkState.HELD]
    return sorted(chunks, key=lambda chunk: chunk.chunk_id)
