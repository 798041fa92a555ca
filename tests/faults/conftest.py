"""The same ends as the transport's tests have."""

from __future__ import annotations

from tests.transport.conftest import _no_thread_is_left, connect, listener, security, window_s

__all__ = ["_no_thread_is_left", "connect", "listener", "security", "window_s"]
