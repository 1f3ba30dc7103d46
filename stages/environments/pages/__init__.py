"""What environments over a collection of pages share: full-text search, and a session of searches and opened pages."""
