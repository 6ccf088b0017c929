"""The corrections inside other frameworks' trainers: verl, SkyRL, slime, miles, prime-rl. See docs/integrations.md.

Each module is what the framework's own hook loads, and imports that framework only when it is called or loaded by it.
The framework keeps its data, advantages, denominators and KL term; the policy loss or the correction is this kit's.
"""
