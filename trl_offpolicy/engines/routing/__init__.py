"""Routing of mixtures of experts: record which experts a forward chose, and replay the choice."""

from trl_offpolicy.engines.routing.options import ReplayAdvice, RoutingReplay, recommend_replay
from trl_offpolicy.engines.routing.replay import Recorded, Replayed, record, replay
from trl_offpolicy.engines.routing.routers import GATES, Routers, find_routers
from trl_offpolicy.engines.routing.storage import RouteStorageError, bytes_per_token, check_routes, route_dtype

__all__ = [
    "GATES",
    "Recorded",
    "ReplayAdvice",
    "Replayed",
    "RouteStorageError",
    "Routers",
    "RoutingReplay",
    "bytes_per_token",
    "check_routes",
    "find_routers",
    "recommend_replay",
    "record",
    "replay",
    "route_dtype",
]
