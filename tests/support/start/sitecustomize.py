"""Collect no garbage in processes that tests start: collections look at all that is imported, most of what they do."""

import gc
import os

gc.disable()
if not os.path.exists("/dev/nvidiactl"):  # cycles hold device memory
    gc.collect = lambda generation=2: 0  # which an engine's life has eight of, of half a second each
