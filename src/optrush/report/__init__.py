"""Pages and charts of measurements: a ladder, a run, data. Each page is one file without network requests."""
