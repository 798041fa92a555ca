"""Connectors: the KV stream inside other serving stacks. Importing this needs none of them."""
