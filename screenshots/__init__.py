"""Pictures of the pages for README, and the headless browser that takes them and runs the browser tests."""
