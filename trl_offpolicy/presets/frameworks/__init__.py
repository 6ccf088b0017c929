"""What other frameworks call these methods: their option names read, their defaults and their bugs named."""
