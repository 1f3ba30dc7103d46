"""Screenshots for the documents, and the headless browser that takes them and runs the browser tests."""
