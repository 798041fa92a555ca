"""Tools for those who work on the project; nothing here is needed at run time."""
