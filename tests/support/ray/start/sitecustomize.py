"""Collect no garbage in Ray's processes: collections look at all that is imported, which is most of what they do."""

import gc

gc.disable()
