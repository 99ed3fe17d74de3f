"""The library's own callbacks: bar, report, completions, checkpoint. Those of researchers are in callbacks/, at the top."""
