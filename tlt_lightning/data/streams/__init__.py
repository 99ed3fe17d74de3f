"""Ask an engine for responses, or for whole conversations, and yield them as they end."""
