"""Ways to run a model as a faulty side would: in another precision, with other parts, attention or layouts."""
