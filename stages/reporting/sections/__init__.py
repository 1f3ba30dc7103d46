"""The page's chapters, one module per part of the lifecycle; each turns `Inputs` into a `Section`."""
