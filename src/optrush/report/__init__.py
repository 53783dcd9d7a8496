"""Pages and pictures of what was measured: a ladder, a run, data. One file each that fetches nothing."""
