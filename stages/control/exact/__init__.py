"""Methods about values that small problems settle exactly."""
