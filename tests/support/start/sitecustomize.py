"""Collect no garbage in processes that tests start: collections look at all that is imported, most of what they do."""

import gc

gc.disable()
