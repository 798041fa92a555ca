"""OpenTelemetry traces: spans are made when a stage is over, from the times that were noted, and exported aside.

Nothing here is on the way of a request but the 55 bytes of a ``traceparent`` header. Without an endpoint there is no
tracer, and OpenTelemetry is not even imported.
"""
