"""One table per framework: which setting becomes which field here, and why others do not."""
