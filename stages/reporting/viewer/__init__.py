"""The episode viewer beside the report: every episode of the run, in files that a browser loads on demand without a server."""
