"""A vLLM server as the engine: the client, the weights it gets, and how one is started."""

from trl_offpolicy.engines.server.client import Patience, ServerClient
from trl_offpolicy.engines.server.engine import ServerEngine

__all__ = ["Patience", "ServerClient", "ServerEngine"]
