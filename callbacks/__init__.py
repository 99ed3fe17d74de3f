"""Callbacks of researchers, one a file, of public names only; the library's own are in `tlt_lightning.callbacks`."""
