"""The Breadbox server: an asyncio shell around the pure core in `breadbox_server.core`."""

import os

# Read when gRPC is first imported. By default it writes a line for each handshake that fails, which
# costs a stranger one packet.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# uvloop starts processes by fork(), after which gRPC would start its threads anew in the child: one
# in a hundred died by that before it was the compactor.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
