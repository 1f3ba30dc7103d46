"""The documentation as a site: `python -m stages.reporting.site`."""
