"""The library's own callbacks: bar, report, completions, checkpoint. Researchers' are in callbacks/, at the top."""
