"""The report: figures, the self-contained page, the episode browser and README's generated blocks."""
