"""OpenAI-compatible HTTP over a fleet of prefill and decode nodes."""

from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.server import Gateway

__all__ = ["Gateway", "GatewayConfig"]
