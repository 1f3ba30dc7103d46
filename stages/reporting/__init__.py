"""The report: figures, the self-contained page, the episode browser and the documents' generated blocks."""
