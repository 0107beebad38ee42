"""Of the template itself: answers, renders, updates, documentation, demo, benchmarks."""
