"""A vLLM server as the engine: the client, the transfer of weights, and how to start a server."""

from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.engine import ServerEngine

__all__ = ["Patience", "ServerClient", "ServerEngine"]
